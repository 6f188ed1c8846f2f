"""The engine thread: requests of all connections through one queue per mode."""

import contextlib
import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from domino_jax.decoding.background import BackgroundGenerator, first_missing
from domino_jax.decoding.generate import Generator
from domino_jax.decoding.prefill import open_kind
from domino_jax.decoding.prefixes import Prefixes
from domino_jax.decoding.programs import Program
from domino_jax.decoding.queue import Queue, Ticket
from domino_jax.decoding.requests import Request
from domino_jax.method.pair import Models
from domino_jax.method.settings import SamplingParams
from domino_jax.runtime.errors import first_line
from domino_jax.serving.metrics import Metrics

ROUNDS = 4  # of a dispatch at most: so long a new request or a lost client waits
PAUSE = 0.1  # seconds between two looks at requests that wait for a program
MOST_WAITING = 1_024  # requests that wait for a row; more are refused
TIMEOUT = 600.0  # seconds after which a request is given up
LOADING, READY, DRAINING = "loading", "ready", "draining"


class Refusal(Exception):
    """An answer in OpenAI's error form."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclasses.dataclass(frozen=True)
class Served:
    """What a server decodes with. modes: those of requests, the last one is that of requests that name none."""

    name: str
    models: Models
    generator: Generator
    tokenizer: Any
    modes: tuple[str, ...]
    prefixes: Prefixes


@dataclasses.dataclass(frozen=True)
class Update:
    """What one dispatch added to an answer, the fields of Piece among others.

    drafted, cached, rejected: of Ticket.  seconds: of the dispatch.  refusal: if the request failed, why.
    at: when it was read (time.perf_counter).
    """

    token_ids: list[int]
    accept_lengths: list[int]
    finish_reason: str | None
    drafted: int = 0
    cached: int = 0
    rejected: Sequence[int] = ()
    seconds: float = 0.0
    refusal: Refusal | None = None
    at: float = dataclasses.field(default_factory=time.perf_counter)


@dataclasses.dataclass(eq=False)
class Job:
    """A request with the function that takes its updates, which the engine thread calls."""

    prompt: list[int]
    request: Request
    mode: str
    deliver: Callable[[Update], None]
    drafts: bool = False  # updates state the drafts that a round rejected: each round is then a dispatch
    arrived: float = dataclasses.field(default_factory=time.perf_counter)
    ticket: Ticket | None = None
    tokens: int = 0  # delivered so far
    rounds: int = 0


class Engine(threading.Thread):
    """Loads the models, compiles what serves any usual request, and then answers jobs until it is drained or stopped.

    It never waits for a compilation after that (background.py). A batch whose programs are missing runs in the general
    ones meanwhile, and a job that these do not serve waits by itself.

    Args:
        load: gives what is served, within a context (its mesh).
        most_waiting: requests that may wait for a row.
        timeout: seconds after which a request is given up, whether it waits or has a row.
        metrics: which it counts; new ones when None.

    ended: called when the thread ends.  failure: the exception that ended it, if one did.
    """

    def __init__(
        self,
        load: Callable[[], contextlib.AbstractContextManager[Served]],
        most_waiting: int = MOST_WAITING,
        timeout: float = TIMEOUT,
        metrics: Metrics | None = None,
    ):
        super().__init__(name="engine", daemon=True)
        self.status, self.failure, self.served = LOADING, None, None
        self.ended: Callable[[], None] = lambda: None
        self.metrics = metrics or Metrics()
        self._load, self._most_waiting, self.timeout = load, most_waiting, timeout
        self._jobs: set[Job] = set()
        self._arrived: list[Job] = []
        self._held: list[Job] = []  # which wait for a program
        self._servable: set[tuple] = set()  # kinds of requests that general programs serve
        self._awaited: dict[tuple, Future] = {}  # by such a kind, the program that it waits for
        self._cancelled: list[Job] = []
        self._changed = threading.Condition()
        self._queues: dict[str, Queue] = {}
        self._generator: BackgroundGenerator | None = None
        self.metrics.running.set_function(self._running)
        self.metrics.waiting.set_function(lambda: max(len(self._jobs) - self._running(), 0))
        self.metrics.compiling.set_function(self.compiling)

    # ------------------------------------------------------------------------------------- from other threads

    def submit(self, job: Job) -> None:
        """Raises Refusal."""
        with self._changed:
            if self.status != READY:  # the thread may have ended
                raise Refusal(f"the server is {self.status}.", 503)
            if len(self._jobs) >= self._most_waiting + self.served.generator.settings.batch_size:
                raise Refusal("too many requests wait; try again later.", 429)
            self._jobs.add(job)
            self._arrived.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Frees the job's row at the end of the dispatch that runs; nothing where it is finished."""
        with self._changed:
            if job in self._jobs:
                self._cancelled.append(job)
                self._changed.notify()

    def drain(self) -> None:
        """Ends the thread when everything that has arrived is answered; `ended` is called at once where none can be."""
        with self._changed:
            loading, self.status = self.status == LOADING, DRAINING
            self._changed.notify()
        if loading:
            self.ended()

    def compiling(self) -> int:
        """How many programs are being compiled."""
        return self._generator.compiling() if self._generator else 0

    # ----------------------------------------------------------------------------------------- on this thread

    def run(self) -> None:
        try:
            with self._load() as self.served:
                self._generator = BackgroundGenerator(**vars(self.served.generator), after_each=self._wake)
                self._queues = {mode: self._new_queue(mode) for mode in self.served.modes}
                self._warm_up()
                with self._changed:
                    self.status = READY if self.status == LOADING else self.status
                while self._take_messages():
                    self._end_waits()
                    self._held = [job for job in self._held if not self._start(job)]
                    for mode in self._queues:
                        self._step(mode)
        except BaseException as failure:
            self.failure = failure
        finally:
            self.drain()
            self._fail(list(self._jobs), Refusal("the server stops.", 500))
            if self._generator:
                self._generator.pool.shutdown(wait=False, cancel_futures=True)
            self.ended()

    def _running(self) -> int:
        return sum(len(queue.live()) for queue in self._queues.values())

    def _new_queue(self, mode: str) -> Queue:
        return Queue(self._generator, self.served.models, mode, prefixes=self.served.prefixes)

    def _warm_up(self) -> None:
        """Compiles what serves any usual request in the usual mode: the prefills of all lengths, and the rounds of the
        largest batch with the largest caches. One request shows that they fit into memory."""
        generator, mode = self._generator, self.served.modes[-1]
        request = generator.request(Request(0, max_new_tokens=2, sampling=SamplingParams()))
        lengths = {generator.bucket(length): length for length in range(1, generator.limits.room(2) + 1)}
        for length in lengths.values():
            while program := self._missing(mode, [0] * length, request):
                generator.demand(program).result()
            self._servable.add((mode, generator.bucket(length), open_kind([request])))
        queue = self._queues[mode]
        queue.general = True
        queue.add([0] * length, request)
        while queue.waiting or queue.live():
            queue.admit()
            queue.advance(1)
            queue.collect()
        self.served.prefixes.clear()
        self._queues[mode] = self._new_queue(mode)

    def _missing(self, mode: str, prompt: Sequence[int], request: Request) -> Program | None:
        """A program without which a request cannot be served in whatever state its queue is."""
        queue = Queue(self._generator, self.served.models, mode)
        for _ in range(2):  # the first starts a batch, and the second one is added to it
            queue.add(prompt, request)
        return first_missing(queue, True)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _take_messages(self) -> bool:
        """Waits for work; False when there will be none."""
        with self._changed:
            working = any(queue.waiting or queue.live() for queue in self._queues.values())
            if not (working or self._arrived or self._cancelled):
                if self.status == DRAINING and not self._jobs:
                    return False
                self._changed.wait(PAUSE if self._jobs else None)
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
        self._held += arrived
        for job in cancelled:
            self._forget(job)
        due = time.perf_counter() - self.timeout
        overdue = [job for job in list(self._jobs) if job.arrived < due]
        self._fail(overdue, Refusal(f"no answer in {self.timeout:g} seconds.", 504))
        return True

    def _end_waits(self) -> None:
        """Looks at programs that jobs wait for. One that failed to compile fails these jobs, and a later one tries
        again."""
        for kind, compiled in [(kind, compiled) for kind, compiled in self._awaited.items() if compiled.done()]:
            del self._awaited[kind]
            if error := compiled.exception():
                self._fail([job for job in self._held if self._kind(job) == kind], Refusal(first_line(error), 500))

    def _kind(self, job: Job) -> tuple:
        """What the general programs that serve a job depend on."""
        return job.mode, self._generator.bucket(len(job.prompt)), open_kind([job.request])

    def _start(self, job: Job) -> bool:
        """Gives a job to its queue, unless a program for it is still missing, which is then demanded."""
        kind = self._kind(job)
        if kind in self._awaited:
            return False
        if kind not in self._servable:
            if program := self._missing(job.mode, job.prompt, job.request):
                self._awaited[kind] = self._generator.demand(program, again=True)
                return False
            self._servable.add(kind)
        job.ticket = self._queues[job.mode].add(job.prompt, job.request)
        return True

    def _step(self, mode: str) -> None:
        queue = self._queues[mode]
        if not (queue.waiting or queue.live()):
            return
        try:
            queue.general = False
            # Its own size if the programs for it are there, and those for the way back.
            if not queue.settled() and (program := first_missing(queue, False, True)):
                self._generator.demand(program)
                queue.general = True
            if queue.admit():  # the first token is there before any round
                self._deliver(queue, 0.0)
            if queue.live():
                before = copy.deepcopy(queue.clock)
                one = any(job.drafts and job.mode == mode for job in list(self._jobs))
                queue.advance(1 if one else ROUNDS)
                self._deliver(queue, queue.clock.decode_seconds - before.decode_seconds)  # without compilation
                self.metrics.exploring.inc(queue.clock.exploring_seconds - before.exploring_seconds)
                for drafts, rounds in (queue.clock.widths - before.widths).items():
                    self.metrics.rounds.labels(drafts).inc(rounds)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            # What ran is lost, its arrays may be deleted, and the server goes on with another queue.
            self.served.prefixes.clear()
            self._queues[mode] = self._new_queue(mode)
            failed = [job for job in list(self._jobs) if job.mode == mode and job.ticket]
            self._fail(failed, Refusal(first_line(error), 500))

    def _deliver(self, queue: Queue, seconds: float) -> None:
        tickets = set(queue.collect())
        for job in [job for job in list(self._jobs) if job.ticket in tickets]:
            ticket = job.ticket
            new = ticket.token_ids[job.tokens :], ticket.accept_lengths[job.rounds :]
            if not (new[0] or ticket.finish_reason):  # an admission has read the rows of others too
                continue
            update = Update(*new, ticket.finish_reason, ticket.drafted, ticket.cached, ticket.rejected, seconds)
            job.tokens, job.rounds = len(ticket.token_ids), len(ticket.accept_lengths)
            if ticket.finish_reason:
                self._forget(job)
            job.deliver(update)

    def _fail(self, jobs: list[Job], refusal: Refusal) -> None:
        for job in jobs:
            self._forget(job)
            job.deliver(Update([], [], None, refusal=refusal))

    def _forget(self, job: Job) -> None:
        if job.ticket and not job.ticket.finish_reason and self.failure is None:
            self._queues[job.mode].drop(job.ticket)
        with self._changed:
            self._jobs.discard(job)
            self._held = [one for one in self._held if one is not job]
