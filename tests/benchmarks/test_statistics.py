"""What published comparisons rest on: spreads, changes seed by seed, intervals over prompts, and the tables' writer."""

import csv

import pytest

from benchmarks.studies import heads
from benchmarks.tables import changes_of, publish, say_changes, with_spread


def test_several_seeds_are_a_mean_and_half_their_range():
    assert with_spread([2.0, 2.5, 3.5]) == "2.67 ± 0.75"
    assert with_spread([2.0]) == "2.00" and with_spread([]) is None


def test_changes_are_of_the_same_seed():
    changes = changes_of([1.1, 2.0], [1.0, 2.5])
    assert changes == pytest.approx([10.0, -20.0])
    assert say_changes(changes) == "-5.0 % (+10.0, -20.0)" and say_changes([3.25]) == "+3.2 %"


def test_tau_is_pooled_and_its_interval_is_over_prompts_with_the_rounds_of_all_seeds():
    """Seeds of τ 3 and 2; every prompt alike, so the interval has no width."""
    seeds = [{"emitted": [6, 6], "rounds": [2, 2]}, {"emitted": [4, 4], "rounds": [2, 2]}]
    row = heads.tau_columns("tau", "τ", seeds)
    assert (row["tau"], row["tau_spread"], row["tau_low"], row["tau_high"]) == (2.5, 0.5, 2.5, 2.5)
    uneven = heads.tau_columns("tau", "τ", [{"emitted": [8, 2], "rounds": [2, 2]}])
    assert uneven["tau"] == 2.5 and uneven["tau_low"] == 1.0 and uneven["tau_high"] == 4.0
    assert heads.tau_columns("tau", "τ", [{"emitted": [0], "rounds": [0]}]) == {}


def test_seconds_of_a_step_leave_the_compilation_and_other_work_out():
    seconds = [60.0, 62.5, 65.0, 90.0]  # the first interval compiled, and something disturbed the last
    assert heads.step_seconds([{"step": 5 * place, "seconds": one} for place, one in enumerate(seconds, 1)]) == 0.5


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
