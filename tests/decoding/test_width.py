"""The adaptive width on a simulated machine: as fast as the best fixed width, never slower than plain decoding."""

import numpy as np
import pytest

from domino_jax.decoding.programs import Programs
from domino_jax.decoding.width import Dispatch, WidthController
from tests.helpers.decoding_models import make_generator, planted_drafts, random_models, random_prompts

WIDTHS = (0, 4, 8, 16)
ANSWER = 400  # tokens of a request
# Chances of a draft at position 1, 2, … to be accepted where the one before it was.
EASY, HARD, MIDDLE = (np.linspace(*ends, 16) for ends in ((0.9, 0.95), (0.1, 0.3), (0.7, 0.8)))
# Seconds of a round by its drafts: wide rounds are nearly free, cost two plain steps, or cost each draft.
MACHINES = {
    "accelerator": lambda drafts: 0.01 * (1 + 0.2 * (drafts > 0) + 0.005 * drafts),
    "processor": lambda drafts: 0.026 * (1 + 0.3 * (drafts > 0) + 0.085 * drafts),
    "full batch": lambda drafts: 0.02 * (1 + 0.4 * drafts),
}


class Simulation:
    """Requests one after another, or a batch of rows without end, on a machine whose dispatches vary by 3 %."""

    def __init__(self, machine, rows: int):
        self.machine, self.rows = machine, rows
        self.random = np.random.default_rng(0)
        self.controller = WidthController(WIDTHS)
        self.history, self.left = self.controller.new_history(), ANSWER
        self.seconds = self.lost = 0.0
        self.programs = set()

    def decode(self, accepted: np.ndarray, tokens: int) -> float:
        """Seconds per token of `tokens` tokens of each row; of rounds those that are expected, without luck."""
        before, emitted, expected = self.seconds, 0.0, self.expected(accepted)
        while emitted < tokens:
            choice = self.controller.choose(self.history, self.rows)
            draws = self.random.random((choice.rounds, self.rows, choice.drafts)) < accepted[: choice.drafts]
            lengths = 1 + np.cumprod(draws, axis=-1).sum(-1)
            seconds = choice.rounds * self.machine(choice.drafts) * self.random.uniform(0.97, 1.03)
            dispatch = Dispatch(choice, self.rows, seconds, timed=choice.drafts in self.programs)
            self.lost += self.controller.observe(self.history, dispatch, choice.rounds, lengths.ravel())
            self.programs.add(choice.drafts)
            self.seconds += seconds
            emitted += choice.rounds * expected[choice.drafts]
            self.left -= lengths.sum() / self.rows
            if self.rows == 1 and self.left <= 0:
                self.history, self.left = self.controller.new_history(), ANSWER  # as in a call for each answer
                self.history.new_text()
        return (self.seconds - before) / emitted

    def fixed(self, accepted: np.ndarray) -> dict[int, float]:
        """Seconds per token by fixed width."""
        return {drafts: self.machine(drafts) / tokens for drafts, tokens in self.expected(accepted).items()}

    def expected(self, accepted: np.ndarray) -> dict[int, float]:
        """Tokens of a round by its drafts."""
        return {drafts: 1 + np.cumprod(accepted[:drafts]).sum() for drafts in WIDTHS}


CASES = [("accelerator", 1), ("accelerator", 8), ("processor", 1), ("processor", 8), ("full batch", 8)]


@pytest.mark.parametrize(("machine", "rows"), CASES)
def test_it_is_as_fast_as_the_best_fixed_width_of_every_phase_and_as_plain_decoding(machine, rows):
    simulation = Simulation(MACHINES[machine], rows)
    for phase in (EASY, HARD, MIDDLE):
        simulation.decode(phase, 600)  # it settles
        fixed = simulation.fixed(phase)
        rate = 1 / simulation.decode(phase, 6_000)
        assert rate * min(fixed.values()) > 0.97, (phase[0], fixed)
        assert rate * fixed[0] > 0.97
    assert simulation.lost < 0.03 * simulation.seconds


@pytest.mark.parametrize(("machine", "rows"), CASES)
def test_a_drafter_that_is_no_help_costs_little_from_the_start(machine, rows):
    simulation, useless = Simulation(MACHINES[machine], rows), np.full(16, 0.05)
    assert simulation.decode(useless, 4_000) * 0.96 < simulation.fixed(useless)[0]


def test_a_text_after_one_of_plain_steps_begins_with_drafts():
    simulation = Simulation(MACHINES["processor"], 1)
    simulation.decode(EASY, 4_000)
    simulation.left = 10_000
    simulation.decode(HARD, 200)
    assert simulation.history.used.drafts == 0
    simulation.history.new_text()
    choice = simulation.controller.choose(simulation.history, 1)
    assert choice.drafts and not choice.baseline_seconds


def test_what_a_narrow_width_shows_says_what_a_wide_one_would_give():
    """On text that a drafter has not met, 4 drafts that are always accepted lead to 16, not to probes of them."""
    simulation = Simulation(MACHINES["processor"], 1)
    simulation.decode(np.linspace(0.6, 0.5, 16), 3_000)
    simulation.decode(np.full(16, 0.98), 600)
    assert simulation.controller.choose(simulation.history, 1).drafts == 16


@pytest.mark.parametrize(("cost", "drafts"), [(0.0, "3"), (1.0, "0")])
def test_a_queue_follows_what_its_rounds_cost_and_accept(monkeypatch, cost, drafts):
    """Each draft costs nothing, and two of three are right; or as much as a plain step, and none is right."""
    models, prompts = random_models(), random_prompts(2)
    length = {"max_new_tokens": 200, "cache_length": 256, "batch_size": 1}
    texts = [one.token_ids for one in make_generator(models, **length).generate(prompts, "autoregressive")]
    run = Programs.run

    def charged(programs, clock, program):
        if program.key[0] != "draft":
            return run(programs, clock, program)
        before, ran = clock.decode_seconds, program.arguments[1].rounds.max()
        state = run(programs, clock, program)
        clock.decode_seconds = before + 1e-3 * float(state.rounds.max() - ran) * (1 + cost * program.key[-1])
        return state

    monkeypatch.setattr(Programs, "run", charged)
    known = np.array(texts)
    known[:, :: 1 if cost else 3] ^= 1
    with planted_drafts(known):
        made = make_generator(models, **length, width="adaptive", widths=(0,), num_drafts=3)
        generated = made.generator.generate(models, prompts, "draft")
    assert [one.token_ids for one in generated.answers] == texts
    assert generated.clock.widths[drafts] > 0.8 * generated.clock.widths.total()


def test_a_machine_that_changes_is_followed():
    simulation = Simulation(MACHINES["accelerator"], 8)
    simulation.decode(MIDDLE, 3_000)
    simulation.machine = MACHINES["full batch"]
    simulation.decode(MIDDLE, 2_000)
    assert simulation.decode(MIDDLE, 6_000) * 0.97 < min(simulation.fixed(MIDDLE).values())
