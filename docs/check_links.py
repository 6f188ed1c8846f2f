"""Checks the built site: every link and picture inside it exists, and every place within a page that a link names.

python docs/check_links.py docs/_build/html
"""

import html.parser
import pathlib
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    """The links of one page, and the ids that links may name."""

    def __init__(self, file: pathlib.Path):
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.ids.add(value)


def broken_links(site: pathlib.Path) -> list[str]:
    """One line for each link of a page in `site` that leads nowhere."""
    pages = {file.resolve(): Page(file) for file in site.rglob("*.html")}
    broken = []
    for file, page in pages.items():
        for link in page.links:
            address = urllib.parse.urlparse(link)
            if address.scheme or address.netloc:
                continue
            path = urllib.parse.unquote(address.path)
            to = (file.parent / path).resolve() if path else file
            place = urllib.parse.unquote(address.fragment)
            missing = not to.exists() or (place and to in pages and place not in pages[to].ids)
            if missing:
                broken.append(f"{file.relative_to(site.resolve())}: {link}")
    return broken


def main() -> None:
    site = pathlib.Path(sys.argv[1])
    if not (site / "index.html").is_file():
        sys.exit(f"{site} holds no site: build it first, with sphinx-build docs {site}")
    broken = broken_links(site)
    print("\n".join(broken) if broken else f"all links inside {site} lead somewhere")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
