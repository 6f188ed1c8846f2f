"""Drafters on the same answers, by hand: walks, rates, pairs, speed-ups."""

import numpy as np
import pytest

from domino_jax.decoding.answers import TargetAnswer
from domino_jax.decoding.requests import Request
from domino_jax.evals.acceptance_figures import acceptance_figures, pairs
from domino_jax.evals.evaluation import LINES, build_evaluation, sections, tau_rows
from domino_jax.method.exact import Accepted


def accepted_of(drafts, backbone=None) -> Accepted:
    log_q = np.full((len(drafts), 4), np.log(0.5))
    return Accepted(np.array(drafts), backbone if backbone is None else np.array(backbone), log_q)


def answers(*tokens: int, tasks=(None, None)) -> list[TargetAnswer]:
    return [
        TargetAnswer(str(index), [1, 2], list(range(count)), Request(index), task)
        for index, (count, task) in enumerate(zip(tokens, tasks, strict=True))
    ]


# Two answers of 7 and 4 tokens. With four drafts the first one's rounds emit 3, 1, 2 and the second's 3.
TEXTS = answers(7, 4, tasks=("add", "sort"))
FIRST = [accepted_of([2, 0, 0, 0, 1, 0], backbone=[0] * 6), accepted_of([2, 1, 0], backbone=[0] * 3)]
SECOND = [accepted_of([0] * 6), accepted_of([0] * 3)]


def test_tau_is_the_tokens_after_the_first_ones_by_the_rounds_of_a_walk_at_every_width():
    figures = acceptance_figures(TEXTS, FIRST)
    assert figures["tau"] == {"1": 9 / 6, "2": 9 / 4, "4": 9 / 4}
    assert figures["rounds"] == 4 and figures["tau_backbone"] == 1.0
    assert figures["accept_by_position"] == [3 / 4, 2 / 4, 0, 0]
    assert figures["tasks"]["add"] == {"answers": 1, "tau": {"1": 6 / 4, "2": 2.0, "4": 2.0}}
    assert figures["tasks"]["sort"]["tau"]["4"] == 3.0


def test_answers_of_one_token_have_no_round_and_change_no_figure():
    texts = [*answers(7, 1, tasks=("add", "none")), *answers(4, 1)]
    short = accepted_of([], [])
    figures = acceptance_figures(texts, [FIRST[0], short, FIRST[1], short])
    assert figures["tasks"]["none"]["tau"] == {"1": None, "2": None, "4": None}
    assert figures["tau"] == acceptance_figures(TEXTS, FIRST)["tau"]
    assert all(1 <= low <= high for low, high in figures["intervals"].values())


def test_differences_are_paired_by_answer():
    [pair] = pairs({"A": FIRST, "B": SECOND})
    assert pair["drafters"] == ["A", "B"]
    assert pair["tau"]["4"]["difference"] == pytest.approx(9 / 4 - 1)
    low, high = pair["tau"]["4"]["interval"]
    assert 1.0 <= low <= high <= 2.0
    # The difference of two equal drafters is 0 in every sample, although each τ varies.
    assert pairs({"A": FIRST, "B": FIRST})[0]["tau"]["4"]["interval"] == [0.0, 0.0]


def test_the_tables_name_every_drafter_and_width():
    origin = {"target": {"path": "T", "quantize": None}, "dtype": "float32"}
    origin["answers"] = {"source": "A", "chosen": 1.0, "temperatures": [0.0]}
    facts = dict.fromkeys(("A", "B"), {"head": "domino", "block_size": 4})
    made = build_evaluation(TEXTS, {"A": FIRST, "B": SECOND}, facts, origin, {"A": {"0": 0.01, "4": 0.02}})
    heading, *rows = tau_rows(made)
    assert heading == ["τ by drafts of a round", "1", "2", "4", "backbone alone"]
    assert [row[0] for row in rows] == ["A", "B"] and rows[1][1].startswith("1.000 (1.00 to 1.00)")
    tables = {name: rows for name, _, rows in sections(made)}
    assert tables["By task"][1] == ["add", "1", "2.000", "1.000"]
    assert tables["Speed-up over plain decoding by drafts of a round"][1] == ["A", "1.12 ×"]
    assert tables["Differences"][1][0] == "A − B"


def test_six_drafters_have_six_colours():
    assert len(set(LINES)) == len(LINES) == 6
