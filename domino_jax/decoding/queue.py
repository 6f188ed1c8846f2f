"""Requests through the rows of one batch, one dispatch at a time: the loop of `Generator` and of the server's engine.

while queue.live() or queue.waiting:
    queue.admit()             # the sizes of batch and caches; the prefills of requests that get a row
    queue.advance(rounds)     # one dispatch, whose width follows the last ones where it is adaptive
    queue.collect()           # the only host read
"""

import dataclasses
import time
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from domino_jax.decoding import queue_sizes as sizes
from domino_jax.decoding.prefill import ANY_SAMPLING, earlier_text, prefill_program
from domino_jax.decoding.prefixes import Prefixes
from domino_jax.decoding.programs import Clock, Program, Programs
from domino_jax.decoding.requests import Request
from domino_jax.decoding.settings import TREE
from domino_jax.decoding.width import PROBE, Choice, Dispatch
from domino_jax.method.loop import DecodeState, put_rows
from domino_jax.method.pair import Pair
from domino_jax.method.settings import SamplingKind
from domino_jax.models.cache import slots_of


@dataclasses.dataclass(eq=False)
class QueuedRequest:
    """A prompt with its request, and the answer so far.

    token_ids, accept_lengths, finish_reason: of Generation; finish_reason is None until the end.
    length: committed tokens, the prompt's included.  drafted: drafts verified so far.
    cached: tokens of the prompt whose keys and values were taken from an earlier text.
    rejected: drafts of the last dispatch that were not emitted, if it was one round of a chain.
    admitted: when it got a row (time.perf_counter).
    """

    prompt: Sequence[int]
    request: Request
    token_ids: list[int] = dataclasses.field(default_factory=list)
    accept_lengths: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    length: int = 0
    drafted: int = 0
    cached: int = 0
    rejected: Sequence[int] = ()
    admitted: float = 0.0


class Queue:
    """The rows of a batch and the requests that wait for one. queue_sizes.py says how large batch and caches are.

    Args:
        requests: all requests. None: they keep coming, each with its own sampling. The batch then grows again, and each
            prompt is read alone, so that few programs serve any mixture.
        prefixes: where finished texts leave their caches, and prompts look for them. Not used in fixed shape: a text
            would depend on the modes that ran before, and texts read in two parts may round otherwise.

    rows: None for those that are free.
    kind: of all requests; None where all sample as the generator does. Where requests keep coming, prefills and rounds
        have another one, which follows from their requests.
    least, most: slots that the caches have at all times, and that they never exceed.
    general: batch and caches have their largest size and rounds serve any sampling, so that few programs serve any
        requests; else they have the size that the requests need.
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
        self.least, self.most = sizes.cache_limits(generator, self.waiting)
        self.state: DecodeState | None = None
        self.controller = generator.controller(mode)
        self.history = self.controller and self.controller.new_history()
        self.last_dispatch: Dispatch | None = None  # where the width is adaptive

    def add(self, request: QueuedRequest) -> None:
        self.waiting.append(request)

    def live(self) -> dict[int, QueuedRequest]:
        """{row: its request} of the rows that answer one."""
        return {row: request for row, request in enumerate(self.rows) if request}

    def slots(self, wanted: int) -> int:
        return max(self.least, min(wanted, self.most))

    # ------------------------------------------------------------------------------------------------- one step

    def admit(self) -> list[QueuedRequest]:
        """Gives batch and caches the sizes that the requests need, and starts those that get a row; returns these."""
        count = sizes.batch_rows(self)
        staying = sizes.staying_rows(self.rows, count) if self.state else []
        self.rows = [self.rows[row] for row in staying] + [None] * (count - len(staying))
        together = sizes.admitted_together(self)
        started = self._fill(together if self.state else 1)
        if not self.live():
            return []
        if self.history and started and (self.state is None or count == 1):
            self.history.new_text()
        self._sample_by(self.kind)
        rest = started
        if self.state is None:
            first, rest = (started[:1], started[1:]) if self.open else (started, [])
            self.state = self.prefill([self.rows[row] for row in first], 1 if self.open else count)
            staying = [0] if self.open else list(range(count))
        sizes.match_sizes(self, staying)
        for first in range(0, len(rest), together):
            self._put(rest[first : first + together])
        if self.open:
            self._sample_by(sizes.rounds_kind(self))
        return [self.rows[row] for row in started]

    def settled(self) -> bool:
        """Whether batch and caches have the size that the requests need, and none can start: admit() does nothing."""
        if not self.state or (self.waiting and None in self.rows):
            return False
        present = len(self.rows), slots_of(self.state.target_cache), self.state.sampling.kind
        return present == (sizes.batch_rows(self), sizes.cache_slots(self), sizes.rounds_kind(self))

    def advance(self, rounds: int) -> None:
        """Up to `rounds` rounds in one dispatch."""
        clock, choice = self.clock, None
        if self.history:
            choices = () if self.general else (self.controller.choose(self.history, len(self.rows)), self.history.used)
            at_hand = (option for option in choices if option and self.generator.at_hand(self._rounds(rounds, option)))
            choice = next(at_hand, Choice(self.controller.widths[-1], PROBE))
        compiled = clock.compile_seconds
        self.state, seconds = self.generator.run(clock, self._rounds(rounds, choice))
        clock.decode_seconds += seconds
        if choice:
            self.last_dispatch = Dispatch(choice, len(self.rows), seconds, timed=clock.compile_seconds == compiled)

    def _rounds(self, rounds: int, choice: Choice | None) -> Program:
        limits = {"idle": sizes.idle_rows(self), "drafts": choice and choice.drafts}
        rounds = min(rounds, choice.rounds) if choice else rounds
        return self.generator.dispatch(self.models, self.state, self.mode, rounds, **limits)

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
            drafts, end = int(drafted[row]) - request.drafted, counts[row]
            self.clock.drafts += drafts
            one_round = len(fresh) == 1 and self.mode != TREE
            request.rejected = tokens[row, end : end + drafts + 1 - fresh[0]].tolist() if one_round else ()
            request.length, request.drafted = int(lengths[row]), int(drafted[row])
            if done[row]:
                stopped = request.token_ids[-1] in np.asarray(self.generator.stop_ids)
                request.finish_reason = "stop" if stopped and not request.request.ignore_eos else "length"
                self.rows[row] = None
                if self.prefixes:
                    sizes.store_text(self, row, request)
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

    # ------------------------------------------------------------------------------------------------- prefills

    def prefill(self, requests: Sequence[QueuedRequest], rows: int) -> DecodeState:
        """A batch of `rows`; those without a request are done once they have a single token."""
        [first, *_], earlier = requests, None
        if self.prefixes and rows == 1:
            earlier, first.cached = earlier_text(self, first)
        program = prefill_program(self, requests, rows, earlier)
        if earlier and not self.generator.at_hand(program):
            first.cached = 0
            program = prefill_program(self, requests, rows)
        state, seconds = self.generator.run(self.clock, program)
        self.clock.prefill_seconds += seconds
        return state.replace(sampling=state.sampling.replace(kind=self.kind)) if self.open else state

    def _sample_by(self, kind: SamplingKind) -> None:
        if self.open and self.state:
            self.state = self.state.replace(sampling=self.state.sampling.replace(kind=kind))

    def _fill(self, multiple: int) -> list[int]:
        """Gives free rows to waiting requests, a multiple of `multiple` of them; returns these rows."""
        free = [row for row, request in enumerate(self.rows) if request is None][: len(self.waiting)]
        free = free[: len(free) // multiple * multiple]
        for row in free:
            self.rows[row] = self.waiting.popleft()
            self.rows[row].length = len(self.rows[row].prompt)
            self.rows[row].admitted = time.perf_counter()
        return free

    def _put(self, rows: Sequence[int]) -> None:
        """The requests of these rows, in place of those that are done."""
        fresh = self.prefill([self.rows[row] for row in rows], len(rows))
        slots = slots_of(self.state.target_cache), slots_of(fresh.target_cache)
        key = ("admit", len(self.rows), slots[0], len(rows), slots[1], self.plain, self.kind)
        program = Program(key, put_rows, (self.state, fresh, np.array(rows, np.int32)), donate=(0,))
        self.state, seconds = self.generator.run(self.clock, program)
        self.clock.prefill_seconds += seconds
