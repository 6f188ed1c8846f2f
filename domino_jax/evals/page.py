"""Self-contained pages with tables and plots, from the template page.html: report.html of a run and others."""

import base64
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from domino_jax.runtime.files import write_whole
from domino_jax.runtime.json_files import write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = Path(__file__).with_name("page.html")
PLOTS = "plots"


def write_page(
    folder: Path, name: str, content: Mapping[str, Any], pictures: Mapping[str, "Figure"], **parts: Any
) -> None:
    """Writes plots/, NAME.html and, last, NAME.json with `content`, each whole or not at all. parts: of page_of."""
    from domino_jax.evals.plots import save  # here: a decoding at the terminal needs no matplotlib

    names = save(folder / PLOTS, pictures) if pictures else []
    images = {file: (folder / PLOTS / file).read_bytes() for file in names}
    write_whole(folder / f"{name}.html", page_of(versions=content["versions"], pictures=images, **parts))
    write_json(folder / f"{name}.json", content)


def page_of(
    *, facts: Mapping[str, str], versions: Mapping[str, str], pictures: Mapping[str, bytes], **parts: Any
) -> str:
    """The HTML text of a page; everything that comes out of a file or a model is escaped.

    Args:
        parts: of the template: heading, title, rows of the first table, notes, and sections, each of a heading, a
            sentence and the rows of a table.
    """
    environment = jinja2.Environment(autoescape=True, finalize=printable)
    facts = {**facts, "versions": ", ".join(f"{name} {version}" for name, version in versions.items())}
    encoded = {name: base64.b64encode(data).decode() for name, data in pictures.items()}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(**parts, facts=facts, pictures=encoded)


def printable(value: Any) -> Any:
    """A text with control characters, which HTML does not allow, replaced by U+FFFD; line breaks and tabs stay."""
    if type(value) is not str:  # also HTML that jinja has made
        return value
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cs") else "\ufffd" for letter in value
    )
