"""evals/server_check.py on literal answers: which texts are wrong, and what explains a low τ."""

from types import SimpleNamespace

import numpy as np
import pytest

from domino_jax.decoding.answers import TargetAnswer
from domino_jax.decoding.requests import Request
from domino_jax.evals.server_check import acceptance_of, compare_tau, server_lines, text_verdicts
from domino_jax.method.exact import Accepted, TargetChoice
from domino_jax.method.settings import SamplingParams

STOP = 9
LOADED = SimpleNamespace(stop_ids=(STOP,), tokenizer=None)


def answer(*ids, name="a"):
    return TargetAnswer(name, [1, 2], ids, Request(0, 0, None, SamplingParams()))


def verdicts(ids, margins, choices=None):
    choice = TargetChoice(np.asarray(margins, np.float32), np.asarray(choices or ids))
    return text_verdicts([answer(*ids)], [choice], 1e-4, LOADED)


def test_a_text_is_the_targets_own_or_leaves_it_at_a_near_tie_or_is_wrong():
    def counts(*margins):
        return [verdicts([5, 6, STOP], margins)[name] for name in ("own", "near_tie", "wrong")]

    assert counts(0, 0, 0) == [1, 0, 0]
    assert counts(0, 9e-5, 0) == [0, 1, 0]
    assert counts(0, 2e-4, 0) == [0, 0, 1]


def test_the_first_wrong_token_is_shown_with_both_texts():
    first = verdicts([5, 6, 7, STOP], [0, 0, 0.5, 0.1], [5, 6, 8, 4])["first_wrong"]
    expected = {"id": "a", "token": 2, "server_id": 7, "target_id": 8, "margin": 0.5}
    assert first == expected | {"server_text": "[5, 6, 7, 9]", "target_text": "[5, 6, 8]"}


def test_an_answer_that_goes_on_after_its_stop_token_is_wrong():
    first = verdicts([5, STOP, 7], [0, 0, 0])["first_wrong"]
    assert (first["token"], first["target_id"]) == (2, None)


def lines(texts, dtype="float32", tau=None):
    server = {"url": "URL", "model": "M", "texts": texts, "not_whole": 1, "cut": 0}
    server["prompts"] = {"same": 1, "of": 1, "first_other": None}
    return server_lines({"server": server, "dtype": dtype, "drafters": {"D": {"server": tau}}})


def test_a_difference_that_bfloat16_explains_is_named():
    near, far = (verdicts([5, 6], [0, margin], [5, 7]) for margin in (0.2, 0.3))
    assert "token 1 is 6, but the target chooses 7, 0.2 above it. That is a near tie in bfloat16" in lines(near)[1]
    assert "bfloat16" not in lines(far)[1] and "bfloat16" not in lines(near, "bfloat16")[1]
    assert lines(near)[2].startswith("Not judged: 1 texts")
    assert lines(near)[-1] == "τ of the server with D: the server states no acceptance."


# Ten tokens after the first; a round keeps two drafts of the head's, one of the backbone's.
LONG = answer(*range(11))
ACCEPTED = Accepted(np.full(10, 2), np.ones(10, int), np.zeros((10, 4)))


def cause(rounds, kept_first=None, drafts=4):
    acceptance = {"ids": ["a"], "rounds": rounds, "drafts": drafts * rounds}
    acceptance |= {} if kept_first is None else {"kept_first": kept_first}
    other = TargetAnswer("other", [1], [1, 2, 3], LONG.request)
    return compare_tau([other, LONG], [Accepted(np.zeros(2), np.zeros(2), np.zeros((2, 4))), ACCEPTED], acceptance)


def test_tau_is_of_the_same_answers_with_the_same_number_of_drafts():
    assert cause(4) == {"drafts": 4, "tau": 2.5, "tau_one_pass": 2.5, "tau_backbone": 2.0, "hint": None}
    assert cause(5, drafts=1) == {"drafts": 1, "tau": 2.0, "tau_one_pass": 2.0, "tau_backbone": 2.0, "hint": None}
    assert compare_tau([LONG], [ACCEPTED], None) is None


@pytest.mark.parametrize(
    ("rounds", "kept_first", "says"),
    [
        (5, 5, "the τ of the backbone alone, 2.00: the head is missing"),
        (10, 0, "0% of the rounds keep the first draft, 75% in the pass: check the shift"),
        (6, 6, "The first draft is kept and later ones are lost"),
        (6, None, "does not state which drafts are lost"),
    ],
)
def test_a_low_tau_names_its_cause(rounds, kept_first, says):
    tau = cause(rounds, kept_first)
    assert says in tau["hint"] and 'docs/choose.md, "When τ is low"' in tau["hint"]
    assert tau["hint"] in lines(verdicts([5], [0]), tau=tau)[-1]


def test_acceptance_is_that_of_the_answers_or_of_the_counters():
    counts = [{"rounds": 3, "drafts": 24, "kept_first": 2}, {"rounds": 2, "drafts": 16, "kept_first": 0}, None]
    stated = {name: {"counts": count} for name, count in zip("abc", counts, strict=True)}
    assert acceptance_of(stated, {}) == {"ids": ["a", "b"], "rounds": 5, "drafts": 40, "kept_first": 2}
    gained = {"ids": ["c"], "rounds": 1, "drafts": 8, "kept_first": 1}
    assert acceptance_of({"c": stated["c"]}, gained) == gained
    assert acceptance_of({"c": stated["c"]}, gained | {"rounds": 0}) is None
    # llama.cpp also counts drafts that it accepts after the end of a short answer.
    assert acceptance_of({"d": {"counts": {"rounds": -2, "drafts": 8}}}, {}) is None
