"""Which requests the compiled programs serve. Any other request would stop its queue for a compilation.

General programs (Queue.general) depend on a request's mode, the size of its prompt and the kind of its sampling. The
usual ones are compiled before the server is ready, and others when a request needs them. After that come the programs
that chats need next.
"""

import copy
import itertools
from collections.abc import Iterator

from domino_jax.decoding.background import BackgroundGenerator, Rehearsal, first_missing
from domino_jax.decoding.generate import Generator
from domino_jax.decoding.prefill import open_kind
from domino_jax.decoding.prefixes import Prefixes
from domino_jax.decoding.programs import Program
from domino_jax.decoding.queue import LEAST_PART, Queue
from domino_jax.decoding.requests import QueuedRequest, Request
from domino_jax.method.pair import Pair
from domino_jax.method.settings import SamplingParams
from domino_jax.serving.requests import ServedRequest


class Readiness:
    """The kinds of requests that are served."""

    def __init__(self, generator: BackgroundGenerator, models: Pair):
        self.generator, self.models = generator, models
        self._served: set[tuple] = set()

    def warm_up(self, queue: Queue) -> None:
        """Compiles what serves any usual request of the queue's mode. One request in the queue shows that the largest
        batch and caches fit into memory."""
        self.generator.compile_all(usual_programs(self.generator, self.models, queue.mode))
        queue.general = True
        queue.add(QueuedRequest([0] * prompt_lengths(self.generator)[-1], usual_request(self.generator)))
        while queue.busy():
            queue.step(1)

    def serves(self, request: ServedRequest) -> bool:
        """Whether all programs for a request are compiled; the first one that is missing is demanded."""
        if request.awaited and not request.awaited.done():
            return False
        size = self.generator.general_bucket(self.generator.bucket(len(request.prompt)))
        kind = request.mode, size, open_kind([request.request])
        if kind not in self._served:
            queue = Queue(Rehearsal.of(self.generator), self.models, request.mode)
            queue.add(QueuedRequest(request.prompt, request.request))
            if program := first_missing(queue, True):
                request.awaited = self.generator.demand(program, waits=True)
                return False
            self._served.add(kind)
        return True


def usual_request(generator: Generator) -> Request:
    return generator.request(Request(0, max_new_tokens=2, sampling=SamplingParams()))


def prompt_lengths(generator: Generator) -> list[int]:
    """The longest prompt of each size to which general programs pad prompts."""
    room = range(1, generator.limits.room(2) + 1)
    return list({generator.general_bucket(generator.bucket(length)): length for length in room}.values())


def usual_programs(generator: Generator, models: Pair, mode: str) -> list[Program]:
    """The general programs, which serve any usual request; those that take longest to compile come first."""
    missing: dict[tuple, tuple] = {}
    for length in prompt_lengths(generator):
        queue = Queue(Rehearsal.of(generator, missing), models, mode)
        queue.add(QueuedRequest([0] * length, usual_request(generator)))
        _step(queue, True)
    programs = (program for program, _ in missing.values())
    return sorted(programs, key=lambda program: program.key[0] in ("admit", "empty"))


def chat_programs(generator: Generator, models: Pair, mode: str) -> Iterator[Program]:
    """The programs of chats, of short ones first: in the general batch the copy of the first turn's text and the start
    of the second turn from it; then all of a chat that is alone, with the way back to the general batch."""
    buckets = {generator.bucket(max(length, LEAST_PART)) for length in range(1, generator.limits.room(2) + 1)}
    for bucket, general in itertools.product(sorted(buckets), (True, False)):
        missing, prefixes = {}, Prefixes(1, 2**62)
        first = max(min(3 * bucket // 4, generator.limits.room(2) - LEAST_PART), 1)
        for length in (first, first + LEAST_PART // 2):
            queue = Queue(Rehearsal.of(generator, missing), models, mode, prefixes=prefixes)
            turn = QueuedRequest([0] * length, usual_request(generator))
            queue.add(turn)
            _step(queue, general)
            _step(copy.copy(queue), True)
            queue.store(0, turn)
        yield from (program for program, _ in missing.values() if program.key not in generator.compiled)


def _step(queue: Queue, general: bool) -> None:
    queue.general = general
    queue.admit()
    queue.advance(1)
