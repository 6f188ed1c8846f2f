"""benchmarks/device/regeneration.py: what it counts, and its report."""

import pytest

from benchmarks.device import regeneration
from benchmarks.device.regeneration import DRAFTED, PLAIN, CountingAnswerer, RowRounds, Run
from domino_jax.decoding.conversations import start_conversation
from domino_jax.method.pair import Models
from domino_jax.method.settings import GeneratorSettings
from tests.helpers.models import load_golden


@pytest.mark.parametrize("drafted", [False, True])
def test_row_rounds_count_every_row_of_a_dispatch_and_those_still_at_work(drafted):
    """Two golden prompts and two rows without one, until the batch shrinks to the row that goes on."""
    golden = load_golden("tied_shift")
    target, drafter = golden.target, golden.drafter
    models = Models(target.module, target.params, *((drafter.module, drafter.params) if drafted else ()))
    answerer = CountingAnswerer(models, GeneratorSettings(0, 8, batch_size=4, stop_ids=(257,)))
    rows = [{"id": str(place), "token_ids": case["prompt"]} for place, case in enumerate(golden.figures["generate"])]
    answers = answerer.answer([start_conversation(row, place, None, False) for place, row in enumerate(rows[:2])])
    rounds = [len(one.accept_lengths) if drafted else len(one.token_ids) - 1 for one in answers]
    seconds, counted = answerer.take()
    computed = 4 * min(rounds) + max(rounds) - min(rounds)
    assert counted == RowRounds(computed, unfinished=sum(rounds)) and seconds > 0
    assert answerer.take() == (0.0, RowRounds())


def test_the_report_states_the_rates_and_the_share_of_finished_rows():
    runs = {
        PLAIN: [Run(1_000, 2.0, RowRounds(400, 300)), Run(1_000, 2.5, RowRounds(400, 300))],
        DRAFTED: [Run(1_000, 1.0, RowRounds(100, 60)), Run(1_000, 1.0, RowRounds(100, 60))],
    }
    lines = regeneration.report(runs, 64, 32, "A machine.").splitlines()
    assert "| target alone | 450 | 400 | 25% |" in lines
    assert "| with the drafter | 1,000 | 100 | 40% |" in lines
    assert lines[-1] == "With the drafter 2.25 × the tokens per second (2.00 to 2.50)."
