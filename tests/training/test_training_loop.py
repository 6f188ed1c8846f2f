"""The training loop and its hooks on a one-layer drafter: rows, checkpoints, resuming, SIGTERM, steps not finite."""

import contextlib
import functools
import os
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.losses import Loss
from domino_jax.method.optimizer import make_optimizer
from domino_jax.method.state import init_state
from domino_jax.method.step import make_train_step
from domino_jax.runtime.errors import DominoError, NonFiniteError
from domino_jax.runtime.preemption import Preempted, Preemption
from domino_jax.runtime.watchdog import Watchdog
from domino_jax.training import hooks
from domino_jax.training.checkpoints import Checkpoints
from domino_jax.training.loop import TrainingLoop
from domino_jax.training.metrics import MetricsWriter, read_rows
from domino_jax.training.non_finite import NonFiniteGuard
from domino_jax.training.step_clock import StepClock
from tests.helpers.models import random_tokens, tiny_drafter, tiny_target

STEPS = 6
OTHER = 20  # another length of a batch, whose program no test compiles: its step fails before


@functools.cache
def model():
    """(the jitted step, new state, the step's arguments for a batch) of a one-layer drafter."""
    target = tiny_target(tied=False)
    drafter = tiny_drafter(target.config, layers=1, target_layer_ids=(0,))
    optimizer = make_optimizer("adamw")
    choices = {"learning_rate": lambda _: jnp.float32(1e-2), "curriculum": lambda _: jnp.float32(0.5)}
    step = make_train_step(
        target.module, drafter.module, optimizer, num_anchors=4, loss=Loss(), ema_decay=0.0, **choices
    )
    start = jax.jit(lambda: init_state(drafter.module, optimizer, jax.random.key(0)))
    return step, start, lambda batch: (target.params, batch, jax.random.key(1))


class Stream:
    """Batches that depend on their number alone; `lengths` are of those with another length."""

    def __init__(self, number, lengths):
        self._number, self._lengths = number, lengths

    def state(self):
        return {"batches": self._number}

    def __next__(self):
        self._number += 1
        length = self._lengths.get(self._number, 16)
        tokens = np.asarray(random_tokens((2, length), seed=self._number))
        return {"tokens": tokens, "loss_mask": np.ones((2, length), np.float32), "row_ids": np.arange(2)}


def evaluation(tau=lambda step: 1.0 + step, during=None):
    """Stands in for the passes over held-out prompts: `during` happens before it calls `between`."""

    def evaluate(params, between):
        if during:
            during()
        between()
        return {"eval_tau": tau(evaluate.step)}

    evaluate.measured_with = "these answers"
    return evaluate


def train(workdir, *, log=1, save=2, evaluate=None, hook=None, step=None, lengths=None):
    """One start of a run in `workdir`, as train.main makes it; returns its loop and the steps it exported.

    evaluate: after every second step.  hook: called first after every step.
    """
    jitted, new, inputs = model()
    exported = []
    with Checkpoints(workdir, 99, lambda line: None) as checkpoints, contextlib.ExitStack() as stack:
        restored = checkpoints.restore_latest(jax.eval_shape(new))
        done, state, position = (restored.step, restored.state, restored.data_state) if restored else (0, new(), None)
        metrics = stack.enter_context(MetricsWriter(workdir, STEPS, start_step=done))
        loop = TrainingLoop(
            STEPS,
            done,
            state,
            step=step or jitted,
            inputs=inputs,
            stream=Stream(position["batches"] if position else 0, lengths or {}),
            batch_size=2,
            store=hooks.store_in(checkpoints, metrics, {}),
            guard=NonFiniteGuard(True, 0, str),
            clock=StepClock(),
            watchdog=Watchdog(0),
            preemption=stack.enter_context(Preemption(lambda line: None)),
        )
        if hook:
            loop.every(1, hook)
        loop.every(log, hooks.log_to(metrics))
        loop.every(save, hooks.save)
        loop.every(1, hooks.leave_on_sigterm)
        if evaluate:
            export = lambda params, step, tau: exported.append(step)  # noqa: E731
            run_evaluation = hooks.evaluate_with(evaluate, checkpoints, metrics, export)

            def at_step(loop):
                evaluate.step = loop.done
                run_evaluation(loop)

            loop.every(2, at_step)
            if loop.is_due(2):
                at_step(loop)
        loop.run()
    return types.SimpleNamespace(loop=loop, exported=exported)


def at(step, action):
    """A hook that acts after one step."""
    return lambda loop: action() if loop.done == step else None


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def die():
    raise KeyboardInterrupt


def steps_with(workdir, key):
    return [row["step"] for row in read_rows(workdir / "metrics.jsonl") if key in row]


def losses(workdir):
    return [row["loss"] for row in read_rows(workdir / "metrics.jsonl") if "loss" in row]


def saved(workdir):
    return sorted(int(path.parent.name) for path in (workdir / "checkpoints").glob("*/manifest.json"))


def content(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(workdir, state) of a run that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, train(workdir).loop.state


def test_rows_and_checkpoints_come_at_their_intervals_and_after_the_last_step(whole, tmp_path):
    assert steps_with(whole[0], "loss") == [1, 2, 3, 4, 5, 6] and saved(whole[0]) == [2, 4, 6]
    train(tmp_path, log=4, save=5)
    assert steps_with(tmp_path, "loss") == [4, 6] and saved(tmp_path) == [5, 6]


def test_a_run_that_died_continues_bit_for_bit_and_one_that_ended_takes_no_step(whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, hook=at(5, die))
    for _ in range(2):
        assert content(train(tmp_path).loop.state) == content(whole[1])
        assert losses(tmp_path) == losses(whole[0]) and steps_with(tmp_path, "loss") == [1, 2, 3, 4, 5, 6]


def test_sigterm_ends_the_run_with_its_step_logged_and_saved(whole, tmp_path):
    with pytest.raises(Preempted):
        train(tmp_path, hook=at(3, terminate))
    assert saved(tmp_path) == [2, 3] and steps_with(tmp_path, "loss") == [1, 2, 3]
    assert content(train(tmp_path).loop.state) == content(whole[1])
    assert losses(tmp_path) == losses(whole[0])


def test_the_best_drafter_is_exported_and_an_evaluation_is_made_once(tmp_path):
    assert train(tmp_path, evaluate=evaluation({2: 2.0, 4: 1.5, 6: 3.0}.get)).exported == [2, 6]
    assert steps_with(tmp_path, "eval_tau") == [2, 4, 6]
    again = train(tmp_path, evaluate=evaluation(during=lambda: pytest.fail("evaluated again")))
    assert not again.exported and steps_with(tmp_path, "eval_tau") == [2, 4, 6]


@pytest.mark.parametrize("during", [terminate, die], ids=["SIGTERM", "a crash"])
def test_an_evaluation_that_was_cut_off_is_made_by_the_next_start(tmp_path, monkeypatch, during):
    monkeypatch.setattr(Preemption, "nothing_to_lose", contextlib.nullcontext)  # the signal would end this process
    with pytest.raises((Preempted, KeyboardInterrupt)):
        train(tmp_path, save=99, evaluate=evaluation(during=during))
    assert saved(tmp_path) == [2] and not steps_with(tmp_path, "eval_tau")
    assert train(tmp_path, evaluate=evaluation()).exported == [2, 4, 6]
    assert steps_with(tmp_path, "eval_tau") == [2, 4, 6]


@pytest.mark.parametrize("lengths", [{}, {5: OTHER}], ids=["at a checkpoint", "before another shape"])
def test_a_step_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path, lengths):
    step, _, _ = model()

    def poisoned(state, params, *rest):
        bad = int(state.step) == 3
        return step(state, jax.tree.map(lambda leaf: leaf * np.nan, params) if bad else params, *rest)

    with pytest.raises(NonFiniteError, match="step 4"):
        train(tmp_path, log=99, save=3 if lengths else 2, step=poisoned, lengths=lengths)
    assert saved(tmp_path) == [3 if lengths else 2]


@pytest.mark.parametrize(
    ("error", "raised"),
    [("RESOURCE_EXHAUSTED: out of memory", DominoError), ("INTERNAL: broken", jax.errors.JaxRuntimeError)],
)
def test_what_was_done_before_another_shape_is_saved_before_its_compilation_fails(tmp_path, error, raised):
    step, _, _ = model()

    def fails(state, params, batch, key):
        if batch["tokens"].shape[1] == OTHER:
            raise jax.errors.JaxRuntimeError(error)
        return step(state, params, batch, key)

    with pytest.raises(raised):
        train(tmp_path, save=99, step=fails, lengths={4: OTHER})
    assert saved(tmp_path) == [3]


def test_the_host_is_at_most_one_step_ahead_of_the_devices_so_that_it_sees_sigterm_in_time(tmp_path):
    ahead, most = set(), []

    class OnDevice(float):
        def block_until_ready(self):
            ahead.discard(self)
            return self

    def dispatched(state, params, batch, key):
        value = OnDevice(len(most))
        ahead.add(value)
        most.append(len(ahead))
        return state, {"anchors": value, "skipped": 0, "bad_step": 0}

    train(tmp_path, log=99, save=99, step=dispatched)
    assert max(most) == 2  # the step before, and the one that was just dispatched
