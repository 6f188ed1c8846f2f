"""The steps of a run and what happens between them: logs, checkpoints, evaluations, and the end on SIGTERM.

What takes long and cannot be interrupted (a compilation, most of an evaluation) begins after a checkpoint, so that a
signal, a crash or a hang in it costs nothing. An evaluation ends with its row in metrics.jsonl: a start that does not
find the row evaluates again.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from domino_jax.method.state import NonFiniteGuard, TrainState
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.preemption import Preempted, Preemption
from domino_jax.runtime.progress import duration
from domino_jax.runtime.watchdog import Watchdog
from domino_jax.training.checkpoints import Checkpoints
from domino_jax.training.metrics import MetricsWriter
from domino_jax.training.step_clock import Profile, StepClock

NO_MEMORY = (
    "the training step does not fit the memory of these devices. --dry_run prints how much it needs.\n"
    "Widen --config.mesh.fsdp, raise train.accumulate, or set train.remat=True."
)


@dataclasses.dataclass(frozen=True)
class Intervals:
    """How many steps there are, and after how many of them something is due. evaluate: 0 is never."""

    steps: int
    log: int
    save: int
    evaluate: int

    def is_due(self, every: int, done: int) -> bool:
        """Whether something is due after `done` steps; the last step is always one of them, the start never."""
        return every > 0 and done > 0 and (done == self.steps or done % every == 0)


@dataclasses.dataclass
class TrainingLoop:
    """All steps of a run from `state` on.

    step: (state, the process' batch) → (state, metrics).
    evaluate: (drafter parameters, what to call every few rounds, MetricsWriter.progress) → metrics with "eval_tau".
    None: no evaluations.  export: (drafter parameters, step, τ) writes the drafter.
    stream: the data, an iterator with state().  batch_size: rows of a step, over all processes.
    meta: JSON values that a later start compares.
    done: steps that `state` has taken.  evaluated: the last step with an evaluation, if it is known.
    announced: whether the time that the run takes was printed.
    """

    intervals: Intervals
    step: Callable[[TrainState, Mapping], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[dict, Callable[[], None], Callable], dict] | None
    export: Callable[[dict, int, float], None]
    checkpoints: Checkpoints
    preemption: Preemption
    watchdog: Watchdog
    metrics: MetricsWriter
    clock: StepClock
    guard: NonFiniteGuard
    profile: Profile
    stream: Any
    batch_size: int
    meta: Mapping[str, Any]
    state: TrainState
    done: int
    evaluated: int | None = None
    announced: bool = False

    def run(self) -> TrainState:
        """The state after the last step, saved.

        Raises:
            Preempted: SIGTERM ended the steps before, or an evaluation; what was done is saved as well.
        """
        intervals, measured, shapes = self.intervals, None, set()
        self.watchdog.on_hang = self._log_hang
        try:
            while True:
                if intervals.is_due(intervals.evaluate, self.done) and self.done != self.evaluated:
                    self._evaluate()
                if self.done >= intervals.steps:
                    return self.state
                self.profile.before(self.done + 1)
                position = self.stream.state()
                with self.clock.waiting_for_data():
                    batch = next(self.stream)
                self.guard.remember(self.done + 1, batch["row_ids"])
                if batch["tokens"].shape in shapes:
                    measured = self._step(batch, measured)
                else:
                    shapes.add(batch["tokens"].shape)
                    measured = self._first_step_of_shape(batch, position, measured)
                self._after_step(measured)
                self.watchdog.beat()
        finally:
            self.watchdog.on_hang = None

    def _step(self, batch: Mapping, before: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """A step whose program is compiled: its metrics, still on the devices.

        The devices always have one step to do while the host prepares the next. Further ahead the host would find out
        about SIGTERM only when they have caught up.
        """
        self.state, measured = self.step(self.state, batch)
        jax.block_until_ready(before)
        self.done += 1
        self.clock.step_done(self.batch_size, self.batch_size * batch["tokens"].shape[1], measured["anchors"])
        self.profile.after(self.done, measured)
        return measured

    def _first_step_of_shape(
        self, batch: Mapping, position: Mapping, before: Mapping[str, jax.Array] | None
    ) -> dict[str, jax.Array]:
        """A step that compiles, since jit compiles once for each shape of a batch; what was done before is saved.

        Args:
            position: of the data before the batch.  before: metrics of the step before; None at a start.
        """
        if before is None:
            self.metrics.say("compiling the training step")
        else:
            self._read(before)
            self._save(finish=True, position=position)
        # The clock leaves the first step of a start out by itself.
        aside = contextlib.nullcontext() if before is None else self.clock.aside()
        with self._compiling(), aside:
            self.state, measured = self.step(self.state, batch)
            jax.block_until_ready(measured)
        self.done += 1
        if before is None:
            self.clock.step_done(self.batch_size, self.batch_size * batch["tokens"].shape[1], measured["anchors"])
            self.metrics.say(f"first step, with its compilation: {self.clock.first_step_seconds:.1f} s")
        self.profile.after(self.done, measured)
        return measured

    def _read(self, measured: Mapping[str, jax.Array]) -> dict[str, float]:
        """A step's metrics on the host; a NonFiniteError before anything that is not finite is saved."""
        values = {name: float(value) for name, value in jax.device_get(measured).items()}
        self.guard.check(values)
        return values

    def _after_step(self, measured: Mapping[str, jax.Array]) -> None:
        """What is due after a step, and its end where SIGTERM was agreed on."""
        intervals, last = self.intervals, self.done == self.intervals.steps
        log = intervals.is_due(intervals.log, self.done)
        save = intervals.is_due(intervals.save, self.done) or intervals.is_due(intervals.evaluate, self.done)
        stop = self.preemption.reached(self.done)
        if log or save or stop:  # besides compilations the only host reads of the loop
            values = self._read(measured)
        if log:
            rates = self.clock.rates()
            self.metrics.write(self.done, {**values, **rates})
            self._announce(rates)
        self.metrics.advance(self.done)
        if save or stop:
            self._save(finish=last or stop)
        if stop:
            raise Preempted

    def _announce(self, rates: Mapping[str, float]) -> None:
        """How long the run takes on this machine, once: at the first rows that measured steps without compilation."""
        if self.announced or "rows_per_second" not in rates:
            return
        self.announced = True
        each, left = self.batch_size / rates["rows_per_second"], self.intervals.steps - self.done
        text = f"{each:.2f} s per step on this machine: {duration(each * left)} for the {left:,} steps that are left"
        self.metrics.say(text + (", evaluations not included" if self.intervals.evaluate else ""))

    def _save(self, finish: bool, position: Mapping | None = None) -> None:
        """A checkpoint of the state as it is.

        Args:
            finish: return only when it counts.
            position: of the data after the batches that `state` was trained on; None: where the stream is.
        """
        position = self.stream.state() if position is None else position
        with self.clock.aside(), self.watchdog.slow("a checkpoint"):
            self.checkpoints.save(self.done, self.state, position, self.meta)
            self.metrics.flush()
            if finish:
                self.checkpoints.wait()  # the process may leave at once from here on

    def _evaluate(self) -> None:
        """Decode held-out prompts, and export the drafter where it is the best so far.

        Its checkpoint comes first, and its row in metrics.jsonl last: cut off anywhere, the next start does it again.
        """
        self._save(finish=True)
        done = self.done

        def between() -> None:
            self.watchdog.renew()
            if self.preemption.reached(done):
                raise Preempted

        with self.clock.aside(), self.preemption.nothing_to_lose(), self.watchdog.slow("an evaluation"):
            found = self.evaluate(self.state.best_params, between, self.metrics.progress)
            self.checkpoints.mark_tau(done, found["eval_tau"])
            if self.checkpoints.best() == (done, found["eval_tau"]):
                self.export(self.state.best_params, done, found["eval_tau"])
            self.metrics.write(done, found)
        self.evaluated = done

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        with self.preemption.nothing_to_lose(), self.watchdog.slow("a step and its compilation"):
            try:
                yield
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                raise DominoError(NO_MEMORY) from error

    def _log_hang(self, seconds: float) -> None:
        self.metrics.write(self.done, {"hang": 1.0, "hang_seconds": seconds})
        self.metrics.flush()  # the process may be ended next
