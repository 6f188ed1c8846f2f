"""Which requests the compiled programs serve. Any other request would stop its queue for a compilation.

General programs (Queue.general) depend on a request's mode, the bucket of its prompt and the kind of its sampling.
Those of the usual kinds are compiled before the server is ready, and others when a request needs them.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from domino_jax.decoding.background import BackgroundGenerator, first_missing
from domino_jax.decoding.prefill import open_kind
from domino_jax.decoding.programs import Program
from domino_jax.decoding.queue import Queue, QueuedRequest
from domino_jax.decoding.requests import Request
from domino_jax.method.pair import Pair
from domino_jax.method.settings import SamplingParams
from domino_jax.serving.requests import ServedRequest


class Readiness:
    """The kinds of requests that are served, and the compilations that other kinds wait for."""

    def __init__(self, generator: BackgroundGenerator, models: Pair):
        self.generator, self.models = generator, models
        self._served: set[tuple] = set()
        self._awaited: dict[tuple, Future] = {}

    def warm_up(self, queue: Queue) -> None:
        """Compiles what serves any usual request of a queue's mode: the prefills of all lengths, and the rounds of the
        largest batch with the largest caches. One request in the queue shows that they fit into memory."""
        generator, mode = self.generator, queue.mode
        request = generator.request(Request(0, max_new_tokens=2, sampling=SamplingParams()))
        lengths = {generator.bucket(length): length for length in range(1, generator.limits.room(2) + 1)}
        for length in lengths.values():
            while program := self._missing(mode, [0] * length, request):
                generator.demand(program).result()
            self._served.add(self._kind(mode, [0] * length, request))
        queue.general = True
        queue.add(QueuedRequest([0] * length, request))
        while queue.waiting or queue.live():
            queue.admit()
            queue.advance(1)
            queue.collect()

    def serves(self, request: ServedRequest) -> bool:
        """Whether all programs for a request are compiled; the first one that is missing is demanded."""
        kind = self._kind_of(request)
        if kind in self._awaited:
            return False
        if kind not in self._served:
            if program := self._missing(request.mode, request.prompt, request.request):
                self._awaited[kind] = self.generator.demand(program, again=True)
                return False
            self._served.add(kind)
        return True

    def failures(self, waiting: Sequence[ServedRequest]) -> Iterator[tuple[list[ServedRequest], BaseException]]:
        """Those of the requests that wait for a program that failed to compile, and its error; a later request demands
        it again. Ends the waits for all programs that are compiled or failed."""
        for kind, compiled in [(kind, compiled) for kind, compiled in self._awaited.items() if compiled.done()]:
            del self._awaited[kind]
            if error := compiled.exception():
                yield [request for request in waiting if self._kind_of(request) == kind], error

    def _missing(self, mode: str, prompt: Sequence[int], request: Request) -> Program | None:
        """A program without which a request cannot be served in whatever state its queue is."""
        queue = Queue(self.generator, self.models, mode)
        for _ in range(2):  # the first starts a batch, and the second one is added to it
            queue.add(QueuedRequest(prompt, request))
        return first_missing(queue, True)

    def _kind_of(self, request: ServedRequest) -> tuple:
        return self._kind(request.mode, request.prompt, request.request)

    def _kind(self, mode: str, prompt: Sequence[int], request: Request) -> tuple:
        return mode, self.generator.bucket(len(prompt)), open_kind([request])
