"""tables.py: the paper's form to the letter, and what notes state."""

import dataclasses

import pytest

from domino_jax.evals.tables import (
    concurrency_rows,
    paper_rows,
    position_rows,
    width_note,
)
from tests.helpers.report_runs import info_with, report_of, two_runs


@pytest.mark.parametrize(
    ("tasks", "columns"), [(("gsm8k", "mbpp"), ["gsm8k", "mbpp", "average"]), ((), ["all prompts"])]
)
def test_a_table_has_a_column_for_each_task_and_their_average(tasks, columns):
    rows = paper_rows([report_of(tasks={task: two_runs() for task in tasks})])
    count = len(columns)
    assert rows[0] == ["method", *columns]
    assert rows[1:] == [["Target alone", *["1.00 × / –"] * count], ["Domino", *["4.00 × / 2.17"] * count]]


def test_several_drafters_share_one_plain_run_and_name_their_methods():
    reports = [report_of(info=dataclasses.replace(info_with(), drafter_name=name)) for name in "AB"]
    assert [row[0] for row in paper_rows(reports)[1:]] == ["Target alone", "A: Domino", "B: Domino"]


def test_throughput_has_a_row_for_each_number_of_rows():
    def mode(speed, gain):
        return {"tokens_per_second": speed, "speedup": gain, "drafts_per_round": 2.504}

    identical = {"domino": {"same": 3, "of": 4, "near_ties": 1, "violations": 0}}
    level = {
        "modes": {"autoregressive": mode(1234.6, 1.0), "domino": mode(2469.2, 2.0)},
        "identical_outputs": identical,
    }
    assert concurrency_rows({"8": level}) == [
        ["rows together", "autoregressive, tokens/s", "domino, tokens/s", "drafts", "speed-up", "identical"],
        ["8", "1,235", "2,469", "2.5", "2.00 ×", "3 of 4 (1 near ties)"],
    ]


def test_a_chain_beside_a_deeper_tree_has_no_rates_where_it_drafts_nothing():
    def rates(*values):
        return {"accept_rate_by_position": list(values), "conditional_accept_rate_by_position": [0.5] * len(values)}

    rows = position_rows({"autoregressive": rates(), "domino": rates(0.5), "tree": rates(0.6, 0.3)}, 3)
    chain, tree = ["domino", "0.50 (0.50)", "–"], ["tree", "0.60 (0.50)", "0.30 (0.50)"]
    assert rows == [["position", "1", "2"], chain, tree]
    report = {"round_widths": {"domino": 2, "tree": 3}, "verify_width": 3, "drafter": {"block_size": 2}}
    stated = "τ is measured with block size 2: a round can emit at most "
    assert width_note(report) == stated + "2 tokens with domino, 3 tokens with tree."
    assert width_note({**report, "round_widths": {"domino": 3, "tree": 3}}) == stated + "3 tokens."
