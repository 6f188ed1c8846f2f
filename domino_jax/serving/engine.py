"""The engine thread: requests of all connections through one queue per mode."""

import contextlib
import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from domino_jax.decoding.generate import Generator
from domino_jax.decoding.prefixes import Prefixes
from domino_jax.decoding.queue import Queue, Ticket
from domino_jax.decoding.requests import Request
from domino_jax.method.pair import Models
from domino_jax.method.settings import SamplingParams
from domino_jax.runtime.errors import first_line
from domino_jax.serving.metrics import Metrics

ROUNDS = 4  # of a dispatch at most: so long a new request or a lost client waits
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
    """Loads the models, compiles the usual programs, and then answers jobs until it is drained or stopped.

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
        self._cancelled: list[Job] = []
        self._changed = threading.Condition()
        self._queues: dict[str, Queue] = {}
        self.metrics.running.set_function(self._running)
        self.metrics.waiting.set_function(lambda: max(len(self._jobs) - self._running(), 0))

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
        """Ends the thread when everything that has arrived is answered."""
        with self._changed:
            self.status = DRAINING
            self._changed.notify()

    # ----------------------------------------------------------------------------------------- on this thread

    def run(self) -> None:
        try:
            with self._load() as self.served:
                self._queues = {mode: self._new_queue(mode) for mode in self.served.modes}
                self._warm_up()
                with self._changed:
                    self.status = READY if self.status == LOADING else self.status
                while self._take_messages():
                    for mode in self._queues:
                        self._step(mode)
        except BaseException as failure:
            self.failure = failure
        finally:
            self.drain()
            self._fail(list(self._jobs), Refusal("the server stops.", 500))
            self.ended()

    def _running(self) -> int:
        return sum(len(queue.live()) for queue in self._queues.values())

    def _new_queue(self, mode: str) -> Queue:
        return Queue(self.served.generator, self.served.models, mode, prefixes=self.served.prefixes)

    def _warm_up(self) -> None:
        """Compiles what requests in the usual mode need: prefills of all lengths, rounds of all batches and caches.

        Programs of other modes are compiled when they are first used.
        """
        generator, mode = self.served.generator, self.served.modes[-1]
        sizes, size = [], generator.settings.batch_size
        while size:
            sizes, size = [*sizes, size], generator.smaller_batch(size)
        longest = generator.limits.room(2)
        lengths = sorted({min(1 << power, longest) for power in range(4, longest.bit_length() + 1)})
        largest = {generator.slots(length): length for length in lengths}.values()  # of each size of caches
        queue = self._queues[mode]
        widths = generator.widths(mode) if queue.pace else (None,)
        for number, length in enumerate(lengths):  # the second prompt of a length starts from the first one's caches
            for sampling in (SamplingParams(), SamplingParams(1.0))[: 1 + (length in largest)]:
                for count in sizes if length in largest else sizes[-1:]:
                    request = generator.request(Request(0, max_new_tokens=2, sampling=sampling))
                    for _ in range(count):
                        queue.add([number] * length, request)
                    while (queue.waiting or queue.live()) and self.status == LOADING:
                        queue.admit()
                        for drafts in widths:
                            limits = {"idle": queue.idle(), "clock": queue.clock, "drafts": drafts}
                            queue.state = generator.advance(queue.models, queue.state, mode, 1, **limits)
                        queue.collect()
        self.served.prefixes.clear()
        self._queues[mode] = self._new_queue(mode)

    def _take_messages(self) -> bool:
        """Waits for work; False when there will be none."""
        with self._changed:
            while not (self._arrived or self._cancelled or self._jobs):
                if self.status == DRAINING:
                    return False
                self._changed.wait()
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
        for job in arrived:
            job.ticket = self._queues[job.mode].add(job.prompt, job.request)
        for job in cancelled:
            self._forget(job)
        due = time.perf_counter() - self.timeout
        overdue = [job for job in list(self._jobs) if job.arrived < due]
        self._fail(overdue, Refusal(f"no answer in {self.timeout:g} seconds.", 504))
        return True

    def _step(self, mode: str) -> None:
        queue = self._queues[mode]
        if not (queue.waiting or queue.live()):
            return
        try:
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
