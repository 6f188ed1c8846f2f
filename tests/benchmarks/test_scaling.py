"""compilers/scaling.py: its tables from stored entries, and the page that an incomplete folder leaves as it is."""

import json
import sys

from benchmarks.compilers import scaling

FIGURES = {
    **{"date": "2026-11-21", "jax": "0.10.2", "fits": True, "peak_bytes_per_chip": 3.3e9, "chip_bytes": 16e9},
    **{"rows": 16, "chips": 16, "flops": 224e12, "bytes_accessed": 81.9e9},
}
SMALL, LARGE = ({"size": size, "topology": "v5e:4x4", "anchors": 256, "length": 3072} for size in ("0_6b", "32b"))


def store(folder, entry, found):
    scaling.file_of(entry, folder).write_text(json.dumps(found))


def test_the_document_has_the_entries_of_a_folder_with_their_dates(tmp_path):
    store(tmp_path, SMALL, FIGURES)
    store(tmp_path, LARGE, {"error": "RESOURCE_EXHAUSTED", "date": "2026-11-23", "jax": "0.10.2"})
    text = scaling.document(tmp_path)
    assert "(2026-11-21, 2026-11-23, jax 0.10.2, the TPU and" in text
    assert "| 0.6B | yes | 3.3 of 16 | 14.0 | 100 (memory) | 10.00 |\n" in text
    assert "| 32B | **no**: it does not compile |" in text
    assert "## v5e:4x4, 16 chips" in text and "| 8B |" not in text and "## h200" not in text


def test_an_incomplete_folder_leaves_the_page_as_it_is(tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(scaling, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["scaling", f"--folder={tmp_path}", "--write"])
    store(tmp_path, SMALL, FIGURES)
    scaling.main()
    assert "32b-v5e-4x4-a256-s3072" in capsys.readouterr().out and not list((tmp_path / "docs").iterdir())
    for entry in scaling.entries():
        store(tmp_path, entry, FIGURES)
    scaling.main()
    assert "## h200, 1 chip" in (tmp_path / "docs" / "scaling.md").read_text()
