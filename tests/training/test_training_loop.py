"""training/loop.py with everything around it played: in which order a run saves, evaluates, logs and leaves."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.state import TrainState
from domino_jax.runtime.errors import DominoError, NonFiniteError
from domino_jax.runtime.preemption import Preempted
from domino_jax.runtime.watchdog import Watchdog
from domino_jax.training.loop import Intervals, TrainingLoop
from domino_jax.training.step_clock import Profile, StepClock


class Played:
    """Checkpoints, metrics, preemption, guard and data at once: writes down what the loop asks of them."""

    def __init__(self, lengths, stop_at=None, best=None, poisoned=None):
        self.events, self.stop_at, self._poisoned = [], stop_at, poisoned
        self._lengths, self._best, self._taken = iter(lengths), best, 0

    def save(self, step, state, position, meta):
        assert position == {"batches": step}, f"step {step} is saved with the data position {position}"
        self.events.append(f"save {step}")

    def wait(self):
        self.events.append("wait")

    def best(self):
        return self._best

    def mark_tau(self, step, tau):
        self.events.append(f"τ {step}")
        self._best = max(self._best or (step, tau), (step, tau), key=lambda pair: (pair[1], pair[0]))

    def write(self, step, values):
        self.events.append(f"{'evaluated' if 'eval_tau' in values else 'log'} {step}")

    def flush(self):
        pass

    def advance(self, step):
        pass

    def progress(self, label, total):
        raise AssertionError("the evaluation is played")

    def say(self, text):
        pass

    @contextlib.contextmanager
    def nothing_to_lose(self):
        self.events.append("nothing to lose")
        yield
        self.events.append("something to lose")

    def reached(self, step):
        inside = self.events[-1:] == ["nothing to lose"]
        return self.stop_at == (f"evaluation {step}" if inside else step)

    def remember(self, *_):
        pass

    def check(self, values):
        if self._poisoned is not None and values["step"] >= self._poisoned:
            raise NonFiniteError

    def state(self):
        return {"batches": self._taken}

    def __next__(self):
        self._taken += 1
        return {"tokens": np.zeros((1, next(self._lengths)), np.int32), "row_ids": np.zeros(1, np.int32)}


def loop_of(played, done=0, evaluated=None, steps=4, save=2, evaluate=0, taus=(1.0, 1.0), log=1, step=None):
    taus = iter(taus)
    played._taken = done

    def measure(params, between, progress):
        between()
        return {"eval_tau": next(taus)}

    def take(state, batch):
        number = state.step + 1
        return state.replace(step=number), {"anchors": jnp.float32(1.0), "loss": jnp.float32(1.0), "step": number}

    zero = jnp.zeros((), jnp.int32)
    return TrainingLoop(
        Intervals(steps, log, save, evaluate),
        step=step or take,
        evaluate=measure,
        export=lambda params, step, tau: played.events.append(f"export {step}"),
        checkpoints=played,
        preemption=played,
        watchdog=Watchdog(0),
        metrics=played,
        clock=StepClock(),
        guard=played,
        profile=Profile("", ()),
        stream=played,
        batch_size=1,
        meta={},
        state=TrainState(zero + done, {}, (), {}, zero, zero),
        done=done,
        evaluated=evaluated,
    )


WHOLE = ["wait"]  # what was saved is in its files
COMPILES = ["nothing to lose", "something to lose"]


def test_steps_are_logged_then_saved_and_the_last_checkpoint_is_waited_for():
    played = Played([8] * 4)
    loop_of(played).run()
    assert played.events == [*COMPILES, "log 1", "log 2", "save 2", "log 3", "log 4", "save 4", *WHOLE]


def test_another_shape_is_compiled_after_a_checkpoint():
    played = Played([8, 8, 8, 16])
    loop_of(played, save=4).run()
    assert played.events[2:] == ["log 1", "log 2", "log 3", "save 3", *WHOLE, *COMPILES, "log 4", "save 4", *WHOLE]


def test_a_step_that_is_not_finite_is_not_saved_before_another_shape_is_compiled():
    played = Played([8, 8, 16, 8], poisoned=2)
    with pytest.raises(NonFiniteError):
        loop_of(played, save=4, log=4).run()
    assert played.events == COMPILES


def test_the_compilation_of_another_shape_counts_in_no_rate(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    shapes, rates = set(), []

    def step(state, batch):
        now[0] += 1.0 if batch["tokens"].shape in shapes else 100.0
        shapes.add(batch["tokens"].shape)
        return state, {"anchors": jnp.float32(1.0), "step": jnp.int32(0)}

    played = Played([8, 8, 16, 8])
    played.write = lambda number, values: rates.append(values)
    loop_of(played, save=4, log=4, step=step).run()
    assert rates[0]["rows_per_second"] == 1.0 and rates[0]["productive_seconds"] == 2.0


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        ("RESOURCE_EXHAUSTED: out of memory", DominoError, "does not fit the memory .* raise train.accumulate"),
        ("INTERNAL: broken", jax.errors.JaxRuntimeError, "INTERNAL: broken"),
    ],
)
def test_a_step_that_does_not_fit_the_memory_is_one_message(error, raised, message):
    def step(state, batch):
        raise jax.errors.JaxRuntimeError(error)

    with pytest.raises(raised, match=f"(?s){message}"):
        loop_of(Played([8]), step=step).run()


def test_the_time_that_the_run_takes_is_printed_once_it_was_measured(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def step(state, batch):
        now[0] += 100.0 if not lines or "compiling" in lines[-1] else 2.0
        return state, {"anchors": jnp.float32(1.0), "step": jnp.int32(0)}

    played = Played([8] * 40)
    played.say = lines.append
    loop_of(played, steps=40, save=40, step=step).run()
    assert lines == [
        "compiling the training step",
        "first step, with its compilation: 100.0 s",
        "2.00 s per step on this machine: 0:01:16 for the 38 steps that are left",
    ]


def test_the_host_is_at_most_one_step_ahead_of_the_devices_so_that_it_hears_sigterm_in_time():
    ahead, most = set(), []

    class OnDevice:
        def __init__(self, number):
            self.number = number
            ahead.add(number)
            most.append(len(ahead))

        def block_until_ready(self):
            ahead.discard(self.number)
            return self

        def __float__(self):
            return 1.0

    played = Played([8] * 20)
    numbers = iter(range(20))
    loop_of(
        played, steps=20, save=20, log=20, step=lambda state, batch: (state, {"anchors": OnDevice(next(numbers))})
    ).run()
    assert max(most) == 2  # the step before, and the one just dispatched


def test_an_evaluation_begins_after_its_checkpoint_and_ends_with_its_row():
    played = Played([8] * 4)
    loop_of(played, evaluate=2, taus=(2.0, 1.0)).run()
    first = ["save 2", "save 2", *WHOLE, "nothing to lose", "τ 2", "export 2", "evaluated 2", "something to lose"]
    last = ["save 4", *WHOLE, "save 4", *WHOLE, "nothing to lose", "τ 4", "evaluated 4", "something to lose"]
    assert played.events[2:] == ["log 1", "log 2", *first, "log 3", "log 4", *last]


def test_a_start_behind_an_evaluation_without_its_row_evaluates_first_and_with_it_does_not():
    for evaluated, begins in ((None, "save 2"), (2, "nothing to lose")):
        played = Played([8] * 4)
        loop_of(played, done=2, evaluated=evaluated, evaluate=2).run()
        assert played.events[0] == begins
        assert played.events.count("evaluated 2") == (evaluated is None)


def test_sigterm_saves_the_step_and_ends_the_run():
    played = Played([8] * 4, stop_at=3)
    with pytest.raises(Preempted):
        loop_of(played).run()
    assert played.events[-3:] == ["log 3", "save 3", *WHOLE]
    assert "log 4" not in played.events


def test_sigterm_in_an_evaluation_leaves_no_trace_of_it():
    played = Played([8] * 4, stop_at="evaluation 2")
    with pytest.raises(Preempted):
        loop_of(played, evaluate=2).run()
    assert played.events[-2:] == [*WHOLE, "nothing to lose"]


def test_a_finished_state_takes_no_step():
    played = Played([])
    loop_of(played, done=4, evaluated=4, evaluate=2).run()
    assert played.events == []
