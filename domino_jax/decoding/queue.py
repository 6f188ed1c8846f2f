"""Requests through the rows of one batch, one dispatch at a time: the loop of `Generator` and of the server's engine.

while queue.busy():
    queue.step(rounds)
"""

import functools
import itertools
import time
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from domino_jax.decoding.batch_shape import CACHE_STEP, BatchShape, ShapeLimits, next_shape, taken_over
from domino_jax.decoding.prefill import ANY_SAMPLING, open_kind, prefill_program
from domino_jax.decoding.prefixes import SHORTEST, CachedText, Prefixes
from domino_jax.decoding.programs import Clock, Program, Programs
from domino_jax.decoding.requests import QueuedRequest
from domino_jax.decoding.row_programs import admit_program, empty_program, keep_program, resize_state
from domino_jax.decoding.width import PROBE, Choice, Dispatch
from domino_jax.method.loop import DecodeState
from domino_jax.method.pair import Pair
from domino_jax.method.settings import SamplingKind
from domino_jax.models.cache import slots_of

LEAST_PART = 64  # tokens that are read after a prefix or in an open queue, padding included: few sizes, few programs


class Queue:
    """The rows of a batch and the requests that wait for one.

    Args:
        requests: all requests. None: they keep coming, each with its own sampling. The batch then grows again, and each
            prompt is read alone, so that few programs serve any mixture.
        prefixes: where finished texts leave their caches, and prompts look for them. Not used in fixed shape: a text
            would depend on the modes that ran before, and texts read in two parts may round otherwise.

    rows: None for those that are free.
    kind: of all requests; None where all sample as the generator does. Where requests keep coming, prefills and rounds
        have another one, which follows from their requests.
    limits: the sizes of batch and caches.
    general: batch and caches have their largest size, prompts have one of few sizes and rounds serve any sampling, so
        that few programs serve any requests; else all have the size that the requests need.
    """

    def __init__(
        self,
        generator: Programs,
        models: Pair,
        mode: str,
        requests: Sequence[QueuedRequest] | None = None,
        *,
        prefixes: Prefixes | None = None,
        clock: Clock | None = None,
    ):
        self.generator, self.models, self.mode = generator, models, mode
        self.plain, self.open = generator.plain(mode), requests is None
        self.prefixes = prefixes if prefixes and prefixes.most_bytes and not generator.settings.fixed_shape else None
        self.clock = clock or Clock()
        self.rows: list[QueuedRequest | None] = []
        self.waiting: deque[QueuedRequest] = deque(requests or ())
        samplings = {entry.request.sampling for entry in self.waiting}
        delayed = any(entry.request.min_tokens for entry in self.waiting)
        plain = not delayed and samplings <= {generator.settings.sampling}
        self.kind = ANY_SAMPLING if self.open else None if plain else SamplingKind.of(samplings, delayed)
        self.general = False
        least, most = _cache_limits(generator, self.waiting)
        least = generator.slots(LEAST_PART) if self.open else least  # no prompt has fewer
        several = not (self.open or generator.settings.fixed_shape)
        self.limits = ShapeLimits(generator.batches, least, most, generator.block_rows(mode), several)
        self.state: DecodeState | None = None
        self.controller = generator.controller(mode)
        self.history = self.controller and self.controller.new_history()
        self.last_dispatch: Dispatch | None = None  # where the width is adaptive

    def add(self, request: QueuedRequest) -> None:
        self.waiting.append(request)

    def live(self) -> dict[int, QueuedRequest]:
        """{row: its request} of the rows that answer one."""
        return {row: request for row, request in enumerate(self.rows) if request}

    def busy(self) -> bool:
        return bool(self.waiting) or any(self.rows)

    # ------------------------------------------------------------------------------------------------- one step

    def step(self, rounds: int) -> list[QueuedRequest]:
        """Gives rows to requests that wait, runs up to `rounds` rounds and reads what all live rows have emitted."""
        self.admit()
        if rounds:
            self.advance(rounds)
        return self.collect()

    def shape(self) -> BatchShape | None:
        """The shape of the state: until a batch is resized, `rows` may already have its next number."""
        return self.state and BatchShape(len(self.state.done), slots_of(self.state.target_cache))

    def next_shape(self) -> BatchShape:
        limits = self._limits()
        waiting = [len(entry.prompt) for entry in itertools.islice(self.waiting, limits.batches[-1])]
        return next_shape(self.shape(), [entry.length for entry in self.live().values()], waiting, limits)

    def admit(self) -> list[QueuedRequest]:
        """Gives batch and caches the sizes that the requests need, and starts those that get a row; returns these."""
        shape = self.next_shape()
        staying = taken_over(self.rows, shape.rows) if self.state else []
        self.rows = [self.rows[row] for row in staying] + [None] * (shape.rows - len(staying))
        started = [row for row, request in enumerate(self.rows) if request is None][: shape.admitted]
        for row in started:
            request = self.rows[row] = self.waiting.popleft()
            request.length, request.admitted = len(request.prompt), time.perf_counter()
        if not self.live():
            return []
        if self.history and started and (self.state is None or shape.rows == 1):
            self.history.new_text()
        self._sample_by(self.kind)
        groups = [started[first : first + shape.together] for first in range(0, len(started), shape.together)]
        if self.state is None and (shape.rows == 1 or not self.open):
            self.state = self.prefill([self.rows[row] for row in started], shape.rows)
            groups, staying = [], list(range(shape.rows))
        if self.state and self.shape()[:2] != shape[:2]:
            run = functools.partial(self.generator.run, self.clock)
            self.state = resize_state(self.state, shape.rows, shape.slots, staying, run, self.generator.delete)
        for rows in groups:
            fresh = self.prefill([self.rows[row] for row in rows], len(rows))
            if self.state is None:
                self.state = self.generator.run(self.clock, empty_program(fresh, shape.rows, shape.slots))
            self.state = self.generator.run(self.clock, admit_program(self.state, fresh, rows))
        if self.open:
            self._sample_by(self._rounds_kind())
        return [self.rows[row] for row in started]

    def settled(self) -> bool:
        """Whether batch and caches have the size that the requests need, and none can start: admit() does nothing."""
        if not self.state or self.state.sampling.kind != self._rounds_kind():
            return False
        shape = self.next_shape()
        return not shape.admitted and shape[:2] == self.shape()[:2]

    def advance(self, rounds: int) -> None:
        """Up to `rounds` rounds in one dispatch."""
        clock, choice = self.clock, None
        if self.history:
            choices = () if self.general else (self.controller.choose(self.history, len(self.rows)), self.history.used)
            at_hand = (option for option in choices if option and self.generator.at_hand(self._rounds(rounds, option)))
            choice = next(at_hand, Choice(self.controller.widths[-1], PROBE))
        compiled, begin = clock.compile_seconds, clock.decode_seconds
        self.state = self.generator.run(clock, self._rounds(rounds, choice))
        if choice:
            seconds, timed = clock.decode_seconds - begin, clock.compile_seconds == compiled
            self.last_dispatch = Dispatch(choice, len(self.rows), seconds, timed)

    def _rounds(self, rounds: int, choice: Choice | None) -> Program:
        idle = self._limits().idle(len(self.rows), len(self.waiting))
        rounds = min(rounds, choice.rounds) if choice else rounds
        drafts = choice and choice.drafts
        return self.generator.dispatch(self.models, self.state, self.mode, rounds, idle=idle, drafts=drafts)

    def collect(self) -> list[QueuedRequest]:
        """Reads what the live rows have emitted since the last call, frees the rows that are done; returns all live."""
        state, live = self.state, self.live()
        columns = state.done, state.lengths, state.drafted, state.counts, state.rounds, state.tokens, state.accepts
        done, lengths, drafted, counts, rounds, tokens, accepts = jax.device_get(columns)
        emitted, longest = [], 0
        for row, request in live.items():
            before = len(request.token_ids)
            request.token_ids += tokens[row, before : counts[row]].tolist()
            fresh = accepts[row, len(request.accept_lengths) : rounds[row]].tolist()
            request.accept_lengths += fresh
            emitted += fresh[: len(fresh) - bool(done[row])]  # the end of an answer cuts its last round
            longest = max(longest, len(fresh))
            self.clock.decode_tokens += len(request.token_ids) - max(before, 1)
            self.clock.drafts += int(drafted[row]) - request.drafted
            request.length, request.drafted = int(lengths[row]), int(drafted[row])
            if done[row]:
                stopped = request.token_ids[-1] in np.asarray(self.generator.stop_ids)
                request.finish_reason = "stop" if stopped and not request.request.ignore_eos else "length"
                self.rows[row] = None
                if self.prefixes:
                    self.store(row, request)
        if self.last_dispatch and longest:
            lost = self.controller.observe(self.history, self.last_dispatch, longest, emitted)
            self.clock.exploring_seconds += lost
            self.clock.widths[str(self.last_dispatch.choice.drafts)] += longest
        self._free_idle()
        return list(live.values())

    def drop(self, request: QueuedRequest) -> None:
        """Gives up a request: it no longer waits, or its row is free for the next one."""
        if request in self.waiting:
            self.waiting.remove(request)
        for row, live in self.live().items():
            if live is request:
                self.rows[row] = None
                self._free_idle()
                if self.state is None:
                    return
                ended = np.arange(len(self.rows)) == row
                self.state = self.state.replace(done=np.asarray(self.state.done) | ended)

    def _free_idle(self) -> None:
        """An open queue without requests holds no caches while it waits for the next one."""
        if self.open and not self.live():
            self.state = None

    def _limits(self) -> ShapeLimits:
        return self.limits.largest() if self.general else self.limits

    def _rounds_kind(self) -> SamplingKind:
        return open_kind([entry.request for entry in self.live().values()], cheapest=not self.general)

    def _sample_by(self, kind: SamplingKind) -> None:
        if self.open and self.state:
            self.state = self.state.replace(sampling=self.state.sampling.replace(kind=kind))

    # ------------------------------------------------------------------------------------------------- prefills

    def prefill(self, requests: Sequence[QueuedRequest], rows: int) -> DecodeState:
        """A batch of `rows`; those without a request are done once they have a single token."""
        models = Pair(self.models.target, self.models.target_params) if self.plain else self.models
        sizes = self._prompt_sizes(max(len(entry.prompt) for entry in requests))
        kind = open_kind([entry.request for entry in requests]) if self.open else self.kind
        arguments = self.generator, models, requests, rows
        program, [first, *_] = prefill_program(*arguments, sizes, kind), requests
        if self.prefixes and rows == 1 and (earlier := self._earlier_text(first, sizes[1])):
            part = self._part(len(first.prompt) - first.cached, sizes[1]), sizes[1]
            shorter = prefill_program(*arguments, part, kind, earlier)
            if self.generator.at_hand(shorter):
                program = shorter
            else:
                first.cached = 0
                self.clock.prefix_waits += 1
        state = self.generator.run(self.clock, program)
        return state.replace(sampling=state.sampling.replace(kind=self.kind)) if self.open else state

    def _prompt_sizes(self, length: int) -> tuple[int, int]:
        """The tokens that a prompt is padded to, and the slots of its caches."""
        bucket = self.generator.bucket(max(length, LEAST_PART) if self.open else length)
        if self.general:
            bucket = self.generator.general_bucket(bucket)
        return bucket, max(self.limits.least, min(self.generator.slots(bucket), self.limits.most))

    def _part(self, tokens: int, slots: int) -> int:
        """The tokens, padding included, that a prompt with caches of `slots` reads after an earlier text."""
        return min(max(self.generator.bucket(tokens), LEAST_PART), slots)

    def _earlier_text(self, request: QueuedRequest, slots: int) -> CachedText | None:
        """The text whose caches a prompt starts from, if there is one; sets request.cached."""
        earlier, cached = self.prefixes.longest(request.prompt, self.plain)
        # Padding to the bucket must not need more slots than the whole prompt does.
        cached = min(cached, slots - self._part(len(request.prompt) - cached, slots))
        request.cached = cached if cached >= SHORTEST else 0
        return earlier if request.cached else None

    def store(self, row: int, request: QueuedRequest) -> None:
        """Stores the caches of a row that is done, cut to its text; without memory for it, frees all that are stored:
        the complete answer must not fail because of a copy that only later prompts need."""
        program = keep_program(self.state, row, self.generator.slots(request.length))
        if not self.generator.at_hand(program):
            self.clock.prefix_waits += 1
            return
        try:
            caches = self.generator.run(self.clock, program)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self.prefixes.clear()
            return
        text = np.array([*request.prompt, *request.token_ids][: request.length], np.int32)
        self.prefixes.add(CachedText(text, *caches))


def whole_answers(generator: Programs, requests: Sequence[QueuedRequest]) -> int:
    """Slots for the longest prompt with its whole answer and a block of any mode."""
    return max(len(entry.prompt) + entry.request.max_new_tokens for entry in requests) + generator.limits.block_rows


def _cache_limits(generator: Programs, waiting: Sequence[QueuedRequest]) -> tuple[int, int]:
    """The fewest and the most slots of a queue's caches."""
    least, largest = generator.slots(1), generator.settings.cache_length
    if generator.settings.fixed_shape:
        # Sums over more slots may round otherwise, and modes reach a length after different numbers of rounds. So the
        # caches keep one size, which does not depend on the mode.
        return generator.slots(whole_answers(generator, waiting)) if waiting else largest, largest
    if len(waiting) <= generator.settings.batch_size:
        return least, largest
    # While prompts wait some row is always near its end, so the caches stay at their largest: no power of two.
    room = CACHE_STEP * -(-whole_answers(generator, waiting) // CACHE_STEP)
    longest = max(len(entry.prompt) for entry in waiting)
    most = min(max(room, generator.slots(generator.bucket(longest))), largest)
    return min(least, most), most
