"""Prompts in, answers out: prompts queue for the rows of a batch, whose size follows the work that is left."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.decoding.limits import Limits
from domino_jax.decoding.programs import Clock, Programs
from domino_jax.decoding.requests import Request
from domino_jax.decoding.seats import Seats
from domino_jax.method.loop import DecodeState, Prompts, put_rows, take_rows
from domino_jax.method.pair import Models
from domino_jax.method.sampling import RowSampling, SamplingKind, request_keys
from domino_jax.method.settings import DecodeSettings, canonical_mode
from domino_jax.models.cache import resize, slots_of

QUEUE_STEP = 128  # caches of a queue end at a multiple of it: TPUs pad scores to as many lanes
POLLED_ROUNDS = 32  # rounds of a dispatch when the caller polls between dispatches: seconds of work at most


@dataclasses.dataclass(frozen=True)
class Generation:
    """One answer.

    token_ids: new tokens only, a stop id included.  accept_lengths: tokens emitted per round, [] when plain.
    """

    token_ids: list[int]
    accept_lengths: list[int]
    finish_reason: str  # "stop" | "length"


@dataclasses.dataclass(frozen=True)
class Piece:
    """What some rounds added to one answer; finish_reason is None until the last piece."""

    token_ids: list[int]
    accept_lengths: list[int]
    finish_reason: str | None


class Generated(NamedTuple):
    answers: list[Generation]
    clock: Clock


@dataclasses.dataclass(frozen=True)
class _Batch:
    """What all dispatches of one call share.

    kind: of all its requests, so that one program serves them.
    least, most: slots that its caches have at all times, and that they never exceed.
    """

    models: Models
    mode: str
    plain: bool
    kind: SamplingKind | None
    least: int
    most: int
    clock: Clock

    def slots(self, wanted: int) -> int:
        return max(self.least, min(wanted, self.most))


@dataclasses.dataclass(frozen=True, eq=False)
class Generator(Programs):
    """Generates for any number of prompts with fixed shapes: one compiled program per mode, rows and cache slots.

    Between dispatches the caches grow and shrink to the slots that the longest unfinished row needs (`Programs.slots`;
    where prompts wait for a row, at most what the longest answer needs), and the batch shrinks to the rows that the
    requests left need (`Programs.batch_rows`).

    Made by `new_generator`.
    """

    # ------------------------------------------------------------------------------------------- whole answers

    def generate(
        self,
        models: Models,
        prompts: Sequence[Sequence[int]],
        mode: str,
        requests: Sequence[int | Request] | None = None,
        between: Callable[[int], None] | None = None,
    ) -> Generated:
        """Answers in the order of the prompts, at most `batch_size` in flight at a time, and the time they took.

        Args:
            requests: for each prompt a Request, or only the id of its noise; the prompt's index when None.
            between: called after every few rounds with the answers finished; an exception from it ends the call.

        Raises:
            DataError: an empty prompt or one that does not fit, before anything runs.
        """
        self.check_mode(mode)
        requests = self._requests(prompts, requests)
        batch = self._batch(models, mode, prompts, requests)
        answers: list[Generation | None] = [None] * len(prompts)
        lengths = [len(prompt) for prompt in prompts]
        seats = Seats([None] * self.batch_rows(len(prompts)), range(len(prompts)))
        state = None
        # A round emits at least one token per unfinished row, so this many rounds always suffice.
        most = POLLED_ROUNDS if between else self.settings.max_new_tokens
        while seats.waiting or seats.unfinished():
            keep = seats.keep(self.batch_rows(len(seats.unfinished()) + len(seats.waiting)))
            rows, together = len(seats.rows), self.admitted_together(len(seats.rows), len(seats.waiting))
            free = seats.fill(lengths, together if state else 1)
            asked = [seats.rows[slot].index for slot in free]
            asked = [(prompts[index], requests[index]) for index in asked]
            if state is None:
                state, asked = self._start(batch, *zip(*asked, strict=True), rows), []
            state = self._fit(batch, state, seats.longest(), keep)
            for first in range(0, len(asked), together):
                some = slice(first, first + together)
                state = self._admit(batch, state, free[some], asked[some])
            # The dispatch ends when requests that wait can have rows, or a smaller batch holds the rest.
            waiting = len(seats.waiting)
            ended = self.admitted_together(rows, waiting) if waiting else rows - self.smaller_batch(rows)
            state = self.advance(models, state, mode, most, idle=ended - 1, clock=batch.clock)
            if between:
                between(sum(answer is not None for answer in answers))
            columns = (state.tokens, state.counts, state.accepts, state.rounds)
            done, committed, drafted, columns = jax.device_get((state.done, state.lengths, state.drafted, columns))
            for slot, row in seats.unfinished().items():
                batch.clock.drafts += int(drafted[slot]) - row.drafted
                row.length, row.drafted = int(committed[slot]), int(drafted[slot])
                if done[slot]:
                    answer = collect([column[slot] for column in columns], self.stop_ids)
                    batch.clock.decode_tokens += len(answer.token_ids) - 1
                    answers[row.index], seats.rows[slot] = answer, None
        return Generated(answers, batch.clock)

    def stream(
        self,
        models: Models,
        prompt: Sequence[int],
        mode: str,
        chunk_rounds: int = 1,
        request: int | Request = 0,
        clock: Clock | None = None,
    ) -> Iterator[Piece]:
        """One answer piece by piece: the same compiled round, up to `chunk_rounds` of it per dispatch and host read.

        Args:
            clock: counts on with every piece.
        """
        self.check_mode(mode)
        requests = self._requests([prompt], [request])
        batch = self._batch(models, mode, [prompt], requests, clock)
        state = self._start(batch, [prompt], requests, rows=1)
        tokens, rounds = 0, 0
        while True:
            columns = (state.tokens, state.counts, state.accepts, state.rounds, state.done)
            *row, done = (column[0] for column in jax.device_get(columns))
            whole = collect(row, self.stop_ids)
            reason = whole.finish_reason if done else None
            batch.clock.decode_tokens += len(whole.token_ids) - max(tokens, 1)
            yield Piece(whole.token_ids[tokens:], whole.accept_lengths[rounds:], reason)
            if done:
                return
            tokens, rounds = len(whole.token_ids), len(whole.accept_lengths)
            state = self._fit(batch, state, len(prompt) + tokens - 1, [0])
            state = self.advance(models, state, mode, chunk_rounds, clock=batch.clock)

    # --------------------------------------------------------------------------------------------- one dispatch

    def start(
        self,
        models: Models,
        prompts: Sequence[Sequence[int]],
        requests: Sequence[int | Request],
        plain: bool = False,
        rows: int | None = None,
    ) -> DecodeState:
        """Prefills one batch of `rows` (batch_size); rows without a prompt are done once they have a single token.

        The caches have room for the whole answers and a block of any mode.

        plain: leave out the drafter's context, which autoregressive decoding does not need.
        """
        requests = [self.request(request) for request in requests]
        least = self._slots_of_answers(prompts, requests)
        batch = _Batch(models, "", plain, self._sampling_kind(requests), least, self.settings.cache_length, Clock())
        return self._start(batch, prompts, requests, rows)

    def advance(
        self,
        models: Models,
        state: DecodeState,
        mode: str,
        max_rounds: int,
        idle: int | None = None,
        longest: int | None = None,
        clock: Clock | None = None,
    ) -> DecodeState:
        """Runs up to max_rounds rounds in one dispatch (loop.run_rounds); the state passed in is donated.

        Args:
            longest: None: the rounds end before a live row would outgrow the caches. Blocks that do not fit are lost.
        """
        rows, slots = state.done.shape[0], slots_of(state.target_cache)
        idle = rows - 1 if idle is None else idle
        longest = slots - self.block_rows(mode) if longest is None else longest
        arguments = (models, state, self.stop_ids, *(np.int32(limit) for limit in (max_rounds, idle, longest)))
        key = (canonical_mode(mode), rows, slots, _kind(state.sampling), bool(state.draft_cache))
        result, seconds = self.run(clock or Clock(), key, self.rounds(mode, rows), arguments, donate=(1,))
        if clock:
            clock.decode_seconds += seconds
        return result

    def _batch(
        self,
        models: Models,
        mode: str,
        prompts: Sequence[Sequence[int]],
        requests: Sequence[Request],
        clock: Clock | None = None,
    ) -> _Batch:
        least, most = 0, self.settings.cache_length
        if self.settings.fixed_shape and prompts:
            # Sums over more slots may round otherwise, and modes reach a length after different numbers of rounds. So
            # the caches keep one size, which does not depend on the mode.
            least = self._slots_of_answers(prompts, requests)
        elif len(prompts) > self.settings.batch_size:
            # While prompts wait some row is always near its end, so the caches stay at their largest: no power of two.
            longest = max(map(len, prompts))
            room = QUEUE_STEP * -(-self._longest_answer(prompts, requests) // QUEUE_STEP)
            most = min(max(room, self.slots(self.bucket(longest))), most)
        return _Batch(models, mode, self.plain(mode), self._sampling_kind(requests), least, most, clock or Clock())

    def _start(self, batch: _Batch, prompts, requests: list[Request], rows: int | None = None) -> DecodeState:
        missing = (rows or self.settings.batch_size) - len(prompts)
        tokens = [*prompts, *[prompts[0]] * missing]
        requests = [*requests, *[dataclasses.replace(requests[0], max_new_tokens=1)] * missing]
        lengths = np.array([len(row) for row in tokens], np.int32)
        bucket = self.bucket(int(lengths.max()))
        padded = np.zeros((len(tokens), bucket), np.int32)
        for row, prompt in zip(padded, tokens, strict=True):
            row[: len(prompt)] = prompt
        limits = np.array([request.max_new_tokens for request in requests], np.int32)
        seeds = np.array([request.seed for request in requests], np.int32)
        keys = request_keys(seeds, jnp.asarray([request.noise for request in requests], jnp.int32))
        sampling = batch.kind and RowSampling.of([request.sampling for request in requests], batch.kind)
        models = batch.models
        if batch.plain:
            models = Models(models.target, models.target_params)
        slots = batch.slots(self.slots(bucket))
        arguments = (models, Prompts(padded, lengths, limits, keys, sampling), self.stop_ids)
        key = ("prefill", len(tokens), bucket, slots, batch.plain, _kind(sampling))
        state, seconds = self.run(batch.clock, key, functools.partial(self.prefill, slots=slots), arguments)
        batch.clock.prefill_seconds += seconds
        return state

    def _fit(self, batch: _Batch, state: DecodeState, longest: int, keep: Sequence[int]) -> DecodeState:
        """The rows `keep` with caches that hold `longest` tokens and a block; the state passed in is used up.

        It works layer by layer, so that at most one layer exists twice at a time.
        """
        slots = batch.slots(self.slots(longest + self.block_rows(batch.mode)))
        before, places = state.done.shape[0], np.array(keep, np.int32)
        if (before, slots_of(state.target_cache)) == (len(keep), slots):
            return state

        def run(key: tuple, function, part):
            fitted, seconds = self.run(batch.clock, key, function, (part, places))
            batch.clock.decode_seconds += seconds
            return fitted

        def fit(part):
            shapes = tuple((rows.shape, rows.dtype) for rows in jax.tree.leaves(part))
            fitted = run(("resize", shapes, len(keep), slots), functools.partial(_fit_part, slots=slots), part)
            for rows in jax.tree.leaves(part):
                rows.delete()
            return fitted

        target, draft = (tuple(map(fit, cache)) for cache in (state.target_cache, state.draft_cache))
        state = state.replace(target_cache=(), draft_cache=())
        if len(keep) < before:
            state = run(("shrink", before, len(keep), _kind(state.sampling)), take_rows, state)
        return state.replace(target_cache=target, draft_cache=draft)

    def _admit(
        self, batch: _Batch, state: DecodeState, slots: Sequence[int], asked: Sequence[tuple[Sequence[int], Request]]
    ) -> DecodeState:
        """The state with new prompts in place of the rows `slots`, which are done; the state passed in is donated."""
        fresh = self._start(batch, *zip(*asked, strict=True), len(asked))
        sizes = state.done.shape[0], slots_of(state.target_cache), len(asked), slots_of(fresh.target_cache)
        key = ("admit", *sizes, batch.plain, _kind(fresh.sampling))
        state, seconds = self.run(batch.clock, key, put_rows, (state, fresh, np.array(slots, np.int32)), donate=(0,))
        batch.clock.prefill_seconds += seconds
        return state

    def _slots_of_answers(self, prompts: Sequence[Sequence[int]], requests: Sequence[Request]) -> int:
        """The size that holds every prompt with its whole answer and a block of any mode."""
        return self.slots(self._longest_answer(prompts, requests))

    def _longest_answer(self, prompts: Sequence[Sequence[int]], requests: Sequence[Request]) -> int:
        """Tokens of the longest prompt with its whole answer and a block of any mode."""
        pairs = zip(prompts, requests, strict=True)
        return max(len(prompt) + one.max_new_tokens for prompt, one in pairs) + self.limits.block_rows

    # ------------------------------------------------------------------------------------------------- requests

    def _requests(self, prompts, requests: Sequence[int | Request] | None) -> list[Request]:
        requests = [self.request(request) for request in (range(len(prompts)) if requests is None else requests)]
        for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            self.check_prompt(prompt, f"prompt {index}", request)
        return requests

    def request(self, request: int | Request) -> Request:
        """A request, or the id of its noise, with the generator's own values where it has none."""
        request = request if isinstance(request, Request) else Request(request)
        missing = [name for name in ("seed", "max_new_tokens", "sampling") if getattr(request, name) is None]
        return dataclasses.replace(request, **{name: getattr(self.settings, name) for name in missing})

    def _sampling_kind(self, requests: Sequence[Request]) -> SamplingKind | None:
        """None where all requests sample as the generator does, which is then a constant of the program."""
        if all(request.sampling == self.settings.sampling for request in requests):
            return None
        return SamplingKind.of([request.sampling for request in requests])

    def check_prompt(self, prompt: Sequence[int], name: str, request: int | Request = 0) -> None:
        """Raises DataError for a prompt that cannot be answered (limits.py)."""
        self.limits.check_prompt(prompt, self.request(request).max_new_tokens, name)


def new_generator(models: Models, settings: DecodeSettings, stop_ids: Sequence[int] = ()) -> Generator:
    """The generator of these models, of which only the shapes are read.

    stop_ids: token ids that end an answer, unless ignore_eos. Those outside the vocabulary are dropped, because no
        token has them.

    Raises:
        DominoError: settings that do not fit the models.
    """
    vocab, drafter = models.target.config.vocab_size, models.drafter and models.drafter.config
    settings.check(vocab, drafter)
    limits = Limits.of(models, settings)
    # An id that no token has keeps the array non-empty without ever stopping a row.
    stop_ids = sorted({token for token in stop_ids if token < vocab and not settings.ignore_eos}) or [-1]
    return Generator(settings, drafter, limits, jnp.asarray(stop_ids, jnp.int32), {})


def collect(row: Sequence[Any], stop_ids: jax.Array) -> Generation:
    """One row's (tokens, count, accepts, rounds) as a Generation."""
    tokens, count, accepts, rounds = row
    token_ids = [int(token) for token in tokens[:count]]
    stopped = bool(token_ids) and token_ids[-1] in np.asarray(stop_ids)
    return Generation(token_ids, [int(n) for n in accepts[:rounds]], "stop" if stopped else "length")


def _fit_part(part: Any, keep: jax.Array, slots: int) -> Any:
    """A layer of a cache, or another part of what a drafter keeps."""
    if len(keep) < len(jax.tree.leaves(part)[0]):
        part = take_rows(part, keep)
    return resize(part, slots)


def _kind(sampling: RowSampling | None) -> tuple | None:
    return sampling.kind if sampling else None
