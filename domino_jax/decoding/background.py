"""Programs that are compiled on other threads, for a server that must not stop for them.

Which programs a step of a queue needs is what the step itself runs: `first_missing` carries it out with shapes in place
of arrays.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from domino_jax.decoding.generate import Generator
from domino_jax.decoding.programs import FULL, Clock, Program, Programs
from domino_jax.decoding.queue import Queue
from domino_jax.models import sharding
from domino_jax.runtime.environment import mappings_in_use
from domino_jax.runtime.errors import DominoError, first_line

log = logging.getLogger(__name__)


def shapes(tree: Any) -> Any:
    """The ShapeDtypeStruct of every array; on a mesh with its sharding, whole on every device for host arrays."""
    mesh = jax.sharding.get_mesh()

    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        on_mesh = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and isinstance(leaf.sharding, NamedSharding)
        place = leaf.sharding if on_mesh else None if mesh.empty else sharding.replicated(mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(shape_of, tree)


class Missing(Exception):
    """A rehearsal needs a program that is not compiled."""

    def __init__(self, program: Program):
        super().__init__(program.key)
        self.program = program


@dataclasses.dataclass(frozen=True, eq=False)
class Rehearsal(Programs):
    """Programs that do not run: their results are shapes.

    missing: {key: a program that is not compiled, and its result}, filled by what runs. None: the first one is Missing.
    """

    missing: dict[tuple, tuple[Program, Any]] | None = None

    @classmethod
    def of(cls, programs: Programs, missing: dict | None = None) -> "Rehearsal":
        fields = {field.name: getattr(programs, field.name) for field in dataclasses.fields(Programs)}
        return cls(**fields | {"controllers": {}}, missing=missing)

    def run(self, clock: Clock, program: Program) -> Any:
        if program.key in self.compiled:
            return shapes(self.compiled[program.key].out_info)
        if self.missing is None:
            raise Missing(program)
        if program.key not in self.missing:
            with self.exact():
                program = program._replace(arguments=shapes(program.arguments))
                self.missing[program.key] = program, self.result(program)
        return self.missing[program.key][1]

    def at_hand(self, program: Program) -> bool:
        return self.missing is not None or program.key in self.compiled

    def delete(self, tree: Any) -> None:
        pass


def first_missing(queue: Queue, *general: bool) -> Program | None:
    """The first program that is not compiled of those that the queue's next steps need; None if all are compiled.

    general: Queue.general of one step after another. The queue stays as it is.
    """
    trial = copy.copy(queue)
    trial.generator, trial.history = Rehearsal.of(queue.generator), copy.deepcopy(queue.history)
    trial.rows = [request and copy.copy(request) for request in queue.rows]
    trial.waiting = deque(map(copy.copy, itertools.islice(queue.waiting, queue.generator.settings.batch_size)))
    trial.state, trial.prefixes = shapes(queue.state), None  # a prompt can always be read whole
    try:
        for trial.general in general:
            trial.admit()
            trial.advance(1)
    except Missing as missing:
        return missing.program
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class BackgroundGenerator(Generator):
    """A generator whose programs are compiled on other threads when they are demanded; after_each is called there.

    demanded, pool: programs that make decoding faster.  awaited, urgent: those that a request waits for.
    """

    after_each: Callable[[], None] = lambda: None
    demanded: dict[tuple, Future] = dataclasses.field(default_factory=dict)
    awaited: dict[tuple, Future] = dataclasses.field(default_factory=dict)
    pool: Executor = dataclasses.field(default_factory=lambda: ThreadPoolExecutor(1, "compiler"))
    urgent: Executor = dataclasses.field(default_factory=lambda: ThreadPoolExecutor(1, "urgent-compiler"))

    def at_hand(self, program: Program) -> bool:
        if program.key not in self.compiled:
            self.demand(program)
        return program.key in self.compiled

    def demand(self, program: Program, waits: bool = False) -> Future:
        """The compilation of a program, which begins once in its pool. Shapes replace arrays, which would fill memory.

        waits: a request waits for it; it begins once more if it has failed.
        """
        futures, pool = (self.awaited, self.urgent) if waits else (self.demanded, self.pool)
        earlier = futures.get(program.key)
        if earlier is None or (waits and earlier.done() and earlier.exception()):
            if mappings_in_use() > FULL:
                none = Future()
                none.set_exception(DominoError("this process has no memory mappings left for another program."))
                return none
            program = program._replace(arguments=shapes(program.arguments))
            future = futures[program.key] = pool.submit(self._compile_on, jax.sharding.get_mesh(), program)
            future.add_done_callback(self._report)
        return futures[program.key]

    def compile_all(self, programs: Sequence[Program]) -> None:
        """Compiles programs at once, and returns when the last one is compiled."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(functools.partial(self._compile_on, jax.sharding.get_mesh()), programs))

    def compile_later(self, programs: Iterator[Program]) -> None:
        """Compiles programs one after another. Programs that are demanded meanwhile come first."""

        def demand_next(mesh: Mesh) -> None:
            with jax.set_mesh(mesh):
                if program := next(programs, None):
                    with contextlib.suppress(RuntimeError):  # the pool is shut down
                        self.demand(program)
                        self.pool.submit(demand_next, mesh).add_done_callback(self._report)

        self.pool.submit(demand_next, jax.sharding.get_mesh()).add_done_callback(self._report)

    def _report(self, future: Future) -> None:
        if not future.cancelled() and (error := future.exception()):
            log.warning("a program did not compile: %s", first_line(error))
        self.after_each()

    def compiling(self) -> int:
        """The programs that are demanded and not compiled yet."""
        return sum(not future.done() for future in (*self.demanded.values(), *self.awaited.values()))

    def _compile_on(self, mesh: Mesh, program: Program) -> None:
        with jax.set_mesh(mesh), self.exact():
            self.compiled[program.key] = self.jitted(program).lower(*program.arguments).compile()
