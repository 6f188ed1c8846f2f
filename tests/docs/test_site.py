"""The parts of the documentation site that need no Sphinx."""

import runpy

import pytest

from tests.helpers.paths import ROOT

DRAWN = runpy.run_path(str(ROOT / "docs" / "draw_figures.py"))["FIGURES"]
BROKEN_LINKS = runpy.run_path(str(ROOT / "docs" / "check_links.py"))["broken_links"]


@pytest.mark.parametrize("name", DRAWN)
def test_the_stored_figure_is_what_its_script_draws(name):
    assert (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") == DRAWN[name]()


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "index.html").write_text('<h1 id="top"></h1><a href="#top"></a><a href="b.html#there"></a>')
    (tmp_path / "b.html").write_text('<a href="index.html#gone"></a><img src="none.png"><a href="https://x.org/y"></a>')
    assert sorted(BROKEN_LINKS(tmp_path)) == [
        "b.html: index.html#gone",
        "b.html: none.png",
        "index.html: b.html#there",
    ]
