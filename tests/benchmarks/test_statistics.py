"""Means of several seeds, and the writer of tables."""

import csv

from benchmarks.tables import publish, with_spread


def test_several_seeds_are_a_mean_and_half_their_range():
    assert with_spread([2.0, 2.5, 3.5]) == "2.67 ± 0.75"
    assert with_spread([2.0]) == "2.00"


def test_a_table_is_a_data_file_and_some_columns_in_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nBefore.\n")
    table = [{"name": "a", "tau": 2.0 / 3, "hidden": 1}, {"name": "b", "tau": None, "late": 12345.678}]
    for _ in range(2):  # a second writing replaces the first
        publish(page, "some table", table, {"name": "drafter", "tau": "τ"}, "Says.")
    text = page.read_text()
    assert text.startswith("# Title\n\nBefore.\n") and text.count("| a | 0.67 |") == 1 and "| b | – |" in text
    with (tmp_path / "data" / "some_table.csv").open() as file:
        assert list(csv.DictReader(file)) == [
            {"name": "a", "tau": "0.66667", "hidden": "1", "late": ""},
            {"name": "b", "tau": "", "hidden": "", "late": "12346.0"},
        ]
