"""report.html: parses, loads nothing, and escapes what it shows."""

import base64
import collections
import html.parser
import re

from domino_jax.evals.page import page_of
from domino_jax.evals.tables import page_parts
from tests.helpers.report_runs import report_of, sections_of, two_runs

HOSTILE = "</span><script src=https://evil.example/x.js></script><img src=http://evil.example/i.png onerror=x>\x00&amp;"
VOID = {"meta", "img"}


class Page(html.parser.HTMLParser):
    """Elements as (name, attributes), and the text of each kind; a tag that is closed out of order is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], collections.defaultdict(str)
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in self.open:
            self.texts[tag] += data


PICTURE = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (1000).to_bytes(4) + (500).to_bytes(4)


def test_a_page_is_whole_html_that_loads_nothing_and_what_comes_out_of_files_and_models_is_text():
    sections = sections_of(target={"path": HOSTILE, "quantize": None})
    parts = page_parts(report_of(two_runs(), sections))
    text = page_of(**parts, versions={}, pictures={"accept_lengths.png": PICTURE})
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>") and [tag for tag, _ in page.elements[:2]] == ["html", "head"]
    assert {tag for tag, _ in page.elements} & {"script", "link", "iframe", "object", "base", "form"} == set()
    attributes = [pair for _, attrs in page.elements for pair in attrs.items()]
    loaded = [value for key, value in attributes if key in ("src", "href", "srcset")]
    assert loaded == [f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"]
    assert not re.search(r"url\(|@import", text) and not any(key.startswith("on") for key, _ in attributes)
    assert any("default-src 'none'" in value for key, value in attributes if key == "content")
    assert page.texts["dd"].startswith(HOSTILE.replace("\x00", "\ufffd"))
