"""report.html: parses, loads nothing, and escapes what it shows."""

import base64
import dataclasses
import html.parser
import re
import types

from domino_jax.evals.page import render_page
from tests.helpers.report_runs import INFO, report_of, two_runs

HOSTILE = "</span><script src=https://evil.example/x.js></script><img src=http://evil.example/i.png onerror=x>\x00&amp;"
VOID = {"meta", "img"}


class Page(html.parser.HTMLParser):
    """Elements as (name, attributes, text); a tag that is closed out of order is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append(types.SimpleNamespace(tag=tag, attrs=dict(attrs), text=""))
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        for element in self.open:
            element.text += data

    def all(self, tag, kind=""):
        return [one for one in self.elements if one.tag == tag and kind in one.attrs.get("class", "").split() + [""]]


PICTURE = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (1000).to_bytes(4) + (500).to_bytes(4)


def page_of(name="p1") -> str:
    info = dataclasses.replace(INFO, target={"path": name})
    return render_page(report_of(two_runs(), info), {"accept_lengths.png": PICTURE})


def test_a_page_is_whole_html_that_loads_nothing():
    text = page_of()
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>") and [one.tag for one in page.elements[:2]] == ["html", "head"]
    assert {one.tag for one in page.elements} & {"script", "link", "iframe", "object", "base", "form"} == set()
    loaded = [value for one in page.elements for key, value in one.attrs.items() if key in ("src", "href", "srcset")]
    assert loaded == [f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"]
    assert not re.search(r"url\(|@import", text)
    assert "default-src 'none'" in page.all("meta")[2].attrs["content"]


def test_what_comes_out_of_files_and_models_is_text():
    page = Page(page_of(name=f"p{HOSTILE}"))
    assert not page.all("script") and len(page.all("img")) == 1
    visible = HOSTILE.replace("\x00", "\ufffd")
    assert all(not key.startswith("on") for one in page.elements for key in one.attrs)
    assert page.all("dd")[0].text == f"p{visible}"
