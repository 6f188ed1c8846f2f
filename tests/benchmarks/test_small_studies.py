"""The studies of trainings once at --small: the table that each writes."""

import csv

import pytest

from tests.helpers.studies import places, rows, run


@pytest.mark.slow(minutes=5)
def test_heads(tmp_path):
    run("studies.heads", "--costs", "--rates=0.001,0.002", *places(tmp_path))
    table = rows(tmp_path, "heads")
    assert [row["drafter"] for row in table] == ["Domino", "DFlash (no head)", "xPress, 2 passes", "EAGLE-3"]
    for row in table:
        assert 1 <= float(row["tau_1_t0"]) <= float(row["tau_7_t0"]) <= 8 and float(row["tau_7_t1"]) >= 1
        assert 1 <= int(row["steps_in_time"]) <= 2 and float(row["round_over_step"]) > 0
    assert all(" to " in row["lead_t1"] for row in table[1:])
    with (tmp_path / "data" / "heads_groups.csv").open() as file:
        groups = [row for row in csv.DictReader(file) if (row["by"], row["temperature"]) == ("kind of prompt", "0")]
    taus = {row["drafter"]: float(row["mean_t0"]) for row in table}
    assert {row["drafter"]: float(row["tau"]) for row in groups} == pytest.approx(taus, rel=1e-3)
    assert (tmp_path / "images" / "heads.png").stat().st_size > 10_000
