"""The studies of trainings once at --small: the table that each writes."""

import pytest

from tests.helpers.studies import places, rows, run


@pytest.mark.slow(minutes=2)
def test_ablations(tmp_path):
    run("studies.ablations", *places(tmp_path))
    run("studies.ablations", "--variant=markov drafter.head=markov train.gamma=3.0", *places(tmp_path))
    table = rows(tmp_path, "ablation head")
    assert len(table) == 3 and all(float(row["tau"]) >= 1 and float(row["base_loss"]) > 0 for row in table)
    described = rows(tmp_path, "ablation variants")
    assert described[0] == table[2] and described[1]["training"] == "markov: drafter.head=markov train.gamma=3.0"


@pytest.mark.slow(minutes=6)
def test_heads(tmp_path):
    run("studies.heads", *places(tmp_path))
    table = rows(tmp_path, "heads b")
    assert [row["drafter"] for row in table] == ["DFlash (no head)", "Domino", "EAGLE-3", "xPress, 2 passes"]
    for row in table:
        assert 1 <= float(row["tau_t0"]) <= 4 and float(row["tflops"]) > 0 and float(row["trained_m"]) > 0
        assert float(row["tokens_s"]) > 0 and float(row["round_ms"]) > 0
    assert " 0 differ by more than a near tie" in (tmp_path / "page.md").read_text()
