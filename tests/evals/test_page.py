"""report.html loads nothing, and what comes out of files and models is text in it. Its body: test_snapshots.py."""

import base64
import html
import re

from domino_jax.evals.page import page_of
from domino_jax.evals.tables import page_parts
from tests.helpers.report_runs import report_of, sections_of, two_runs

HOSTILE = "</span><script src=https://evil.example/x.js></script><img src=http://evil.example/i.png onerror=x>&amp;"
PICTURE = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (1000).to_bytes(4) + (500).to_bytes(4)


def test_a_page_loads_nothing_and_what_comes_out_of_files_and_models_is_text():
    sections = sections_of(target={"path": HOSTILE + "\x00", "quantize": None})
    text = page_of(**page_parts(report_of(two_runs(), sections)), versions={}, pictures={"a.png": PICTURE})
    assert text.startswith("<!DOCTYPE html>") and "default-src 'none'" in text
    assert f"<dd>{html.escape(HOSTILE)}\ufffd</dd>" in text
    assert not re.search(r"<(script|link|iframe|object|base|form)|url\(|@import|\son\w+=[^x]", text)
    assert re.findall(r'<[^>]* (?:src|href|srcset)="([^"]*)"', text) == [
        f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
    ]
