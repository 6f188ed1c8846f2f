"""Work between the steps of a training run: logs, checkpoints, evaluations, and the end on SIGTERM."""

from collections.abc import Callable, Mapping
from typing import Any

from domino_jax.method.state import TrainState
from domino_jax.runtime.agreement import from_primary
from domino_jax.runtime.preemption import Preempted
from domino_jax.training.checkpoints import Checkpoints
from domino_jax.training.loop import Hook, TrainingLoop
from domino_jax.training.metrics import MetricsWriter


def store_in(checkpoints: Checkpoints, metrics: MetricsWriter, meta: Mapping[str, Any]) -> Callable[..., None]:
    """The `store` of a TrainingLoop. meta: JSON values that a later start compares."""

    def store(done: int, state: TrainState, position: Mapping, finish: bool) -> None:
        checkpoints.save(done, state, position, meta)
        metrics.flush()
        if finish:
            checkpoints.wait()  # the process may leave at once from here on

    return store


def log_to(metrics: MetricsWriter) -> Hook:
    """Writes a row of metrics and rates."""

    def log(loop: TrainingLoop) -> None:
        values = loop.values()  # first: it waits for the devices
        metrics.write(loop.done, {**values, **loop.clock.rates()})

    return log


def save(loop: TrainingLoop) -> None:
    loop.save(finish=loop.done == loop.steps)


def leave_on_sigterm(loop: TrainingLoop) -> None:
    """Every step asks, because all processes have to agree on the step after which they leave."""
    if loop.preemption.reached(loop.done):
        loop.save(finish=True)
        raise Preempted


def evaluate_with(
    evaluate: Any, checkpoints: Checkpoints, metrics: MetricsWriter, export: Callable[[dict, int, float], None]
) -> Hook:
    """Measures τ on held-out prompts, and exports the drafter if it is the best so far.

    The checkpoint comes first and the row in metrics.jsonl last. A start that does not find the row evaluates again; if
    an earlier start wrote it, nothing is done.

    Args:
        evaluate: (drafter parameters, function to call now and then) → metrics with "eval_tau". Its `measured_with`
            tells evaluations apart whose τ must not be compared.
        export: (drafter parameters, step, τ) writes the drafter.
    """

    def hook(loop: TrainingLoop) -> None:
        if from_primary(lambda: metrics.has(loop.done, "eval_tau")):
            return
        loop.save(finish=True)
        done, params = loop.done, loop.state.best_params

        def between() -> None:
            loop.watchdog.renew()
            if loop.preemption.reached(done):
                raise Preempted

        with loop.long_task("an evaluation"):
            measured = evaluate(params, between)
            checkpoints.mark_tau(done, measured["eval_tau"], evaluate.measured_with)
            if checkpoints.best() == (done, measured["eval_tau"]):
                export(params, done, measured["eval_tau"])
            metrics.write(done, measured)

    return hook
