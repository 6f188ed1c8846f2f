"""The steps of a run, and hooks after every n of them: loop.every(n, function). hooks.py has the hooks of a run.

A compilation cannot be interrupted and may take long, so it begins after a checkpoint: a signal, a crash or a hang in
it loses nothing.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from domino_jax.method.state import TrainState
from domino_jax.runtime.distributed import say
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.preemption import Preemption
from domino_jax.runtime.watchdog import Watchdog
from domino_jax.training.non_finite import NonFiniteGuard
from domino_jax.training.step_clock import StepClock

NO_MEMORY = (
    "the training step does not fit the memory of these devices. --dry_run prints how much it needs.\n"
    "Widen --config.mesh.fsdp, raise train.accumulate, or set train.remat=True."
)

Hook = Callable[["TrainingLoop"], None]


@dataclasses.dataclass
class TrainingLoop:
    """The steps from `state` to the last one. Hooks read `done`, `state` and `values()`.

    steps: T.  done: steps that `state` has taken.
    step: (state, *inputs(batch)) → (state, metrics).  inputs: the process' batch → the step's other arguments.
    stream: the data, an iterator with state().  batch_size: rows of a step, over all processes.
    store: (steps done, state, position in the data, finish) writes a checkpoint; with `finish` it returns once the
    checkpoint is complete.
    measured: metrics of the last step, still on the devices; None before the first step of a start.
    """

    steps: int
    done: int
    state: TrainState
    step: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    inputs: Callable[[Mapping], tuple]
    stream: Any
    batch_size: int
    store: Callable[[int, TrainState, Mapping, bool], None]
    guard: NonFiniteGuard
    clock: StepClock
    watchdog: Watchdog
    preemption: Preemption
    measured: dict[str, jax.Array] | None = None
    hooks: list[tuple[int, Hook]] = dataclasses.field(default_factory=list)

    def every(self, steps: int, function: Hook) -> None:
        """Calls function(loop) after every `steps` steps and the last one, never if it is 0; in order of adding."""
        self.hooks.append((steps, function))

    def is_due(self, every: int) -> bool:
        return every > 0 and self.done > 0 and (self.done == self.steps or self.done % every == 0)

    def run(self) -> TrainState:
        """The state after the last step.

        The devices always have one step to do while the host prepares the next. A host further ahead would see SIGTERM
        too late.
        """
        shapes = set()
        while self.done < self.steps:
            position = self.stream.state()
            with self.clock.spent("data"):
                batch = next(self.stream)
            self.guard.remember(self.done + 1, batch["row_ids"])
            before, shape = self.measured, batch["tokens"].shape
            began, compiles = time.monotonic(), shape not in shapes  # jit compiles once for each shape of a batch
            if before is None:
                say("compiling the training step")
            elif compiles:
                self.save(finish=True, position=position)
            with self._compiling() if compiles else contextlib.nullcontext():
                self.state, self.measured = self.step(self.state, *self.inputs(batch))
                jax.block_until_ready(self.measured if compiles else before)
            shapes.add(shape)
            self.done += 1
            if before is None:
                say(f"first step, with its compilation: {time.monotonic() - began:.1f} s")
                self.clock.restart()
            elif not compiles:
                self.clock.step_done(self.batch_size, self.batch_size * shape[1])
            for steps, function in self.hooks:
                if self.is_due(steps):
                    function(self)
            self.watchdog.beat()
        return self.state

    def values(self) -> dict[str, float]:
        """The last step's metrics on the host, which waits for the devices.

        Raises NonFiniteError: a loss or gradient was not finite, and the run is to stop there.
        """
        values = {name: float(value) for name, value in jax.device_get(self.measured).items()}
        self.guard.check(values)
        return values

    def save(self, finish: bool = False, position: Mapping | None = None) -> None:
        """A checkpoint of the state, unless a step before it was not finite.

        Args:
            finish: return once the checkpoint is complete.
            position: of the data after the batches that `state` was trained on; None: where the stream is.
        """
        if self.measured is not None:
            self.values()
        with self.clock.spent("aside"), self.watchdog.slow("a checkpoint"):
            self.store(self.done, self.state, self.stream.state() if position is None else position, finish)

    @contextlib.contextmanager
    def long_task(self, name: str) -> Iterator[None]:
        """For work between steps that begins after a checkpoint: SIGTERM may end a lone process in it at once."""
        with self.clock.spent("aside"), self.preemption.nothing_to_lose(), self.watchdog.slow(name):
            yield

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        try:
            with self.long_task("a step and its compilation"):
                yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise DominoError(NO_MEMORY) from error
