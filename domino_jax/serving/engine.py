"""The engine thread: requests of all connections through one queue per mode."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import jax

from domino_jax.decoding.background import BackgroundGenerator, first_missing
from domino_jax.decoding.queue import Queue
from domino_jax.runtime.errors import first_line
from domino_jax.serving.metrics import Metrics
from domino_jax.serving.readiness import Readiness, chat_programs
from domino_jax.serving.requests import AnswerPart, Refusal, ServedModel, ServedRequest

ROUNDS = 4  # of a dispatch at most: a new request or a lost client waits for them
PAUSE = 0.1  # seconds between two looks at requests that wait for a program
MOST_WAITING = 1_024  # requests that wait for a row; more are refused
TIMEOUT = 600.0  # seconds after which a request is given up
LOADING, READY, DRAINING = "loading", "ready", "draining"


class Engine(threading.Thread):
    """Loads the models, compiles what serves any usual request, and then answers requests until it is drained.

    It never waits for a compilation after that (background.py). A batch whose programs are missing runs in the general
    ones meanwhile, and a request that these do not serve waits by itself.

    Args:
        load: gives what is served, within a context (its mesh).
        most_waiting: requests that may wait for a row.
        timeout: seconds after which a request is given up, whether it waits or has a row.

    ended: called when the thread ends.  failure: the exception that ended it, if one did.
    """

    def __init__(
        self,
        load: Callable[[], contextlib.AbstractContextManager[ServedModel]],
        most_waiting: int = MOST_WAITING,
        timeout: float = TIMEOUT,
        metrics: Metrics | None = None,
    ):
        super().__init__(name="engine", daemon=True)
        self.status, self.failure, self.served = LOADING, None, None
        self.ended: Callable[[], None] = lambda: None
        self.metrics = metrics or Metrics()
        self._load, self._most_waiting, self.timeout = load, most_waiting, timeout
        self._requests: dict[ServedRequest, None] = {}  # in the order of their arrival
        self._cancelled: list[ServedRequest] = []
        self._changed = threading.Condition()
        self._queues: dict[str, Queue] = {}
        self._generator: BackgroundGenerator | None = None
        self.metrics.running.set_function(self._running)
        self.metrics.waiting.set_function(lambda: max(len(self._requests) - self._running(), 0))
        self.metrics.compiling.set_function(self.compiling)

    # ------------------------------------------------------------------------------------- from other threads

    def submit(self, request: ServedRequest) -> None:
        """Raises Refusal."""
        with self._changed:
            if self.status != READY:  # the thread may have ended
                raise Refusal(f"the server is {self.status}.", 503)
            if len(self._requests) >= self._most_waiting + self.served.generator.settings.batch_size:
                raise Refusal("too many requests wait; try again later.", 429)
            self._requests[request] = None
            self._changed.notify()

    def cancel(self, request: ServedRequest) -> None:
        """Frees the request's row at the end of the dispatch that runs; nothing where it is finished."""
        with self._changed:
            if request in self._requests:
                self._cancelled.append(request)
                self._changed.notify()

    def drain(self) -> None:
        """Ends the thread when everything that has arrived is answered; `ended` is called at once where none can be."""
        with self._changed:
            loading, self.status = self.status == LOADING, DRAINING
            self._changed.notify()
        if loading:
            self.ended()

    def compiling(self) -> int:
        return self._generator.compiling() if self._generator else 0

    # ----------------------------------------------------------------------------------------- on this thread

    def run(self) -> None:
        try:
            with self._load() as self.served:
                self._generator = BackgroundGenerator(**vars(self.served.generator), after_each=self._wake)
                mode = self.served.modes[-1]
                readiness = Readiness(self._generator, self.served.models)
                readiness.warm_up(self._new_queue(mode))
                self.served.prefixes.clear()
                self._queues = {mode: self._new_queue(mode) for mode in self.served.modes}
                with self._changed:
                    self.status = READY if self.status == LOADING else self.status
                self._generator.compile_later(chat_programs(self._generator, self.served.models, mode))
                while self._take_messages():
                    for request in self._held():
                        if error := request.awaited and request.awaited.done() and request.awaited.exception():
                            self._fail([request], Refusal(first_line(error), 500))
                        elif readiness.serves(request):
                            self._queues[request.mode].add(request)
                            request.queued = True
                    for mode in self._queues:
                        self._step(mode)
        except BaseException as failure:
            self.failure = failure
        finally:
            self.drain()
            self._fail(list(self._requests), Refusal("the server stops.", 500))
            if self._generator:
                for pool in (self._generator.pool, self._generator.urgent):
                    pool.shutdown(wait=False, cancel_futures=True)
            self.ended()

    def _running(self) -> int:
        return sum(request.admitted > 0 for request in list(self._requests))

    def _held(self) -> list[ServedRequest]:
        """The requests that are not in a queue, because they have just arrived or wait for a program."""
        return [request for request in list(self._requests) if not request.queued]

    def _new_queue(self, mode: str) -> Queue:
        return Queue(self._generator, self.served.models, mode, prefixes=self.served.prefixes)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _take_messages(self) -> bool:
        """Waits for work; False when there will be none."""
        with self._changed:
            working = any(queue.busy() for queue in self._queues.values())
            working |= any(not request.awaited or request.awaited.done() for request in self._held())
            if not (working or self._cancelled):
                if self.status == DRAINING and not self._requests:
                    return False
                self._changed.wait(PAUSE if self._requests else None)
            cancelled, self._cancelled = self._cancelled, []
        for request in cancelled:
            self._forget(request)
        due = time.perf_counter() - self.timeout
        overdue = [request for request in list(self._requests) if request.arrived < due]
        self._fail(overdue, Refusal(f"no answer in {self.timeout:g} seconds.", 504))
        return True

    def _step(self, mode: str) -> None:
        queue = self._queues[mode]
        if not queue.busy():
            return
        try:
            queue.general, waits = False, queue.clock.prefix_waits
            # Its own size if the programs for it are there, and those for the way back.
            if not queue.settled() and (program := first_missing(queue, False, True)):
                self._generator.demand(program)
                queue.general = True
            if queue.admit():  # the first token is there before any round
                self._deliver(queue, 0.0)
            if queue.live():
                before = queue.clock.decode_seconds
                queue.advance(ROUNDS)
                self._deliver(queue, queue.clock.decode_seconds - before)  # without compilation
            self.metrics.prefix_waits.inc(queue.clock.prefix_waits - waits)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            # The batch is lost, its arrays may be deleted, and the server goes on with another queue.
            self.served.prefixes.clear()
            self._queues[mode] = self._new_queue(mode)
            failed = [request for request in list(self._requests) if request.mode == mode and request.queued]
            self._fail(failed, Refusal(first_line(error), 500))

    def _deliver(self, queue: Queue, seconds: float) -> None:
        for request in queue.collect():
            if part := request.next_part(seconds):
                if request.finish_reason:
                    self._forget(request)
                request.deliver(part)

    def _fail(self, requests: Sequence[ServedRequest], refusal: Refusal) -> None:
        for request in requests:
            self._forget(request)
            request.deliver(AnswerPart([], [], None, refusal=refusal))

    def _forget(self, request: ServedRequest) -> None:
        if request.queued and not request.finish_reason and self.failure is None:
            self._queues[request.mode].drop(request)
        with self._changed:
            self._requests.pop(request, None)
