"""Prompts in, answers out: compiled programs by shape, and a queue of prompts over the rows of a batch."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.decoding.limits import Limits
from domino_jax.decoding.loop import DecodeState, prefill, put_row, run_rounds
from domino_jax.decoding.requests import Request
from domino_jax.decoding.rounds import autoregressive_round, speculative_round
from domino_jax.decoding.sampling import RowSampling, SamplingKind, request_keys
from domino_jax.decoding.settings import (
    BACKBONE,
    BASELINE,
    DOMINO,
    MODES,
    TREE,
    DraftSettings,
    GeneratorSettings,
    canonical_mode,
)
from domino_jax.drafters.config import DrafterConfig
from domino_jax.drafters.pair import Models
from domino_jax.models import sharding
from domino_jax.runtime.errors import DominoError

SMALLEST_BUCKET = 16
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


@dataclasses.dataclass
class Clock:
    """Wall seconds of a run, compilation separate; decode_tokens leaves out each row's first token, the prefill's."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    decode_tokens: int = 0


class Generated(NamedTuple):
    answers: list[Generation]
    clock: Clock


@dataclasses.dataclass(frozen=True)
class _Batch:
    """What all dispatches of one call share. kind: of all its requests, so that one program serves them."""

    models: Models
    mode: str
    plain: bool
    kind: SamplingKind | None
    clock: Clock


@dataclasses.dataclass(frozen=True, eq=False)
class Generator:
    """Generates for any number of prompts with fixed shapes: one compiled program per prompt-length bucket and mode.

    Made by `new_generator`. It holds no parameters: every call gets the models, whose shapes and dtypes never change.

    drafter: of the models' drafter, None for plain decoding.  stop_ids: int32, never empty.
    compiled: programs by what they differ in, filled as they are needed.
    """

    settings: GeneratorSettings
    drafter: DrafterConfig | None
    limits: Limits
    stop_ids: jax.Array
    compiled: dict[tuple, jax.stages.Compiled]

    # ------------------------------------------------------------------------------------------- whole answers

    def generate(
        self,
        models: Models,
        prompts: Sequence[Sequence[int]],
        mode: str,
        requests: Sequence[int | Request] | None = None,
        between: Callable[[int], None] | None = None,
    ) -> Generated:
        """Answers in the order of the prompts, `batch_size` of them in flight at a time, and the time they took.

        Args:
            requests: for each prompt a Request, or only the id of its noise; the prompt's index when None.
            between: called after every few rounds with the answers finished; an exception from it ends the call.

        Raises:
            DataError: an empty prompt or one that does not fit, before anything runs.
        """
        self.check_mode(mode)
        requests = self._requests(prompts, requests)
        batch = _Batch(models, mode, self._plain(mode), self._sampling_kind(requests), Clock())
        answers: list[Generation | None] = [None] * len(prompts)
        waiting = deque(range(len(prompts)))
        first = [waiting.popleft() for _ in range(min(self.settings.batch_size, len(waiting)))]
        rows: list[int | None] = [*first, *[None] * (self.settings.batch_size - len(first))]
        if first:
            state = self._start(batch, [prompts[index] for index in first], [requests[index] for index in first])
        while any(index is not None for index in rows):
            idle = sum(index is None for index in rows) if waiting else len(rows) - 1
            # A round emits at least one token per unfinished row, so this many rounds always suffice.
            most = POLLED_ROUNDS if between else self.settings.max_new_tokens
            state = self.advance(models, state, mode, most, idle, batch.clock)
            if between:
                between(sum(answer is not None for answer in answers))
            done, columns = jax.device_get((state.done, (state.tokens, state.counts, state.accepts, state.rounds)))
            for slot, index in enumerate(rows):
                if index is None or not done[slot]:
                    continue
                answers[index] = collect([column[slot] for column in columns], self.stop_ids)
                batch.clock.decode_tokens += len(answers[index].token_ids) - 1
                rows[slot] = waiting.popleft() if waiting else None
                if rows[slot] is not None:
                    state = self._admit(batch, state, slot, prompts[rows[slot]], requests[rows[slot]])
        return Generated(answers, batch.clock)

    def stream(
        self, models: Models, prompt: Sequence[int], mode: str, chunk_rounds: int = 1, request: int | Request = 0
    ) -> Iterator[Piece]:
        """One answer piece by piece: the same compiled round, `chunk_rounds` of it per dispatch and host read."""
        self.check_mode(mode)
        requests = self._requests([prompt], [request])
        state = self.start(models, [prompt], requests, self._plain(mode), rows=1)
        tokens, rounds = 0, 0
        while True:
            columns = (state.tokens, state.counts, state.accepts, state.rounds, state.done)
            *row, done = (column[0] for column in jax.device_get(columns))
            whole = collect(row, self.stop_ids)
            reason = whole.finish_reason if done else None
            yield Piece(whole.token_ids[tokens:], whole.accept_lengths[rounds:], reason)
            if done:
                return
            tokens, rounds = len(whole.token_ids), len(whole.accept_lengths)
            state = self.advance(models, state, mode, chunk_rounds)

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

        plain: leave out the drafter's context, which autoregressive decoding does not need.
        """
        requests = [self.request(request) for request in requests]
        batch = _Batch(models, "", plain, self._sampling_kind(requests), Clock())
        return self._start(batch, prompts, requests, rows)

    def advance(
        self,
        models: Models,
        state: DecodeState,
        mode: str,
        max_rounds: int,
        idle: int | None = None,
        clock: Clock | None = None,
    ) -> DecodeState:
        """Runs up to max_rounds rounds in one dispatch (loop.run_rounds); the state passed in is donated."""
        rows = state.done.shape[0]
        idle = rows - 1 if idle is None else idle
        arguments = (models, state, self.stop_ids, np.int32(max_rounds), np.int32(idle))
        key = (canonical_mode(mode), rows, _kind(state.sampling))
        result, seconds = self._run(clock or Clock(), key, self.rounds(mode), arguments, donate=(1,))
        if clock:
            clock.decode_seconds += seconds
        return result

    def rounds(self, mode: str) -> Callable[..., DecodeState]:
        """The unjitted program of a mode: (models, state, stop_ids, max_rounds, idle) → state after them."""
        drafting, settings = self.drafting(mode), self.settings

        def rounds(models, state, stop_ids, max_rounds, idle=None):
            def one_round(state):
                if mode == BASELINE:
                    width = drafting.width(models.drafter.config) + 1 if settings.fixed_shape else None
                    return autoregressive_round(models, state, stop_ids, settings.sampling, width)
                choices = {"isolated": settings.fixed_shape, "simulated_tau": settings.simulated_tau}
                return speculative_round(models, state, stop_ids, settings.sampling, drafting, **choices)

            return run_rounds(one_round, state, max_rounds, idle)

        return rounds

    def drafting(self, mode: str) -> DraftSettings:
        """How rounds of a mode draft."""
        has_head = self.drafter is not None and self.drafter.has_head
        tree = self.settings.drafting.tree if mode == TREE else None
        return dataclasses.replace(self.settings.drafting, use_head=has_head and mode != BACKBONE, tree=tree)

    def prefill(self, models, prompts, lengths, limits, keys, stop_ids, sampling=None) -> DecodeState:
        """The unjitted program that starts a batch (loop.prefill)."""
        settings = self.settings
        shape = {"cache_slots": settings.cache_slots, "buffer": settings.max_new_tokens}
        sampling = sampling or settings.sampling
        return prefill(models, prompts, lengths, limits, keys, stop_ids, sampling=sampling, **shape)

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
        arguments = (models, padded, lengths, limits, keys, self.stop_ids, sampling)
        key = ("prefill", len(tokens), bucket, batch.plain, _kind(sampling))
        state, seconds = self._run(batch.clock, key, self.prefill, arguments)
        batch.clock.prefill_seconds += seconds
        return state

    def _admit(
        self, batch: _Batch, state: DecodeState, slot: int, prompt: Sequence[int], request: Request
    ) -> DecodeState:
        """The state with a new prompt in place of the row `slot`, which is done; the state passed in is donated."""
        row = self._start(batch, [prompt], [request], rows=1)
        key = ("admit", batch.plain, _kind(row.sampling))
        state, seconds = self._run(batch.clock, key, put_row, (state, row, np.int32(slot)), donate=(0,))
        batch.clock.prefill_seconds += seconds
        return state

    def _run(self, clock: Clock, key: tuple, function, arguments: tuple, donate: tuple[int, ...] = ()):
        """(result, seconds) of the program stored under `key`, which is compiled first if need be."""
        mesh = jax.sharding.get_mesh()
        if not mesh.empty:
            arguments = (arguments[0], *sharding.replicate(mesh, arguments[1:]))
        if key not in self.compiled:
            begin = time.perf_counter()
            layout = None if mesh.empty else sharding.decode_layout(mesh, jax.eval_shape(function, *arguments))
            program = jax.jit(function, donate_argnums=donate, out_shardings=layout)
            self.compiled[key] = program.lower(*arguments).compile()
            clock.compile_seconds += time.perf_counter() - begin
        begin = time.perf_counter()
        result = jax.block_until_ready(self.compiled[key](*arguments))
        return result, time.perf_counter() - begin

    def bucket(self, length: int) -> int:
        """The next power of two, at most the cache."""
        return min(max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()), self.settings.cache_slots)

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

    def check_mode(self, mode: str) -> None:
        """Raises DominoError for a mode that does not exist, or that this drafter or these settings do not have."""
        if mode not in MODES:
            raise DominoError(f"mode {mode!r} is not one of {', '.join(MODES)}.")
        if mode == TREE and self.settings.drafting.tree is None:
            raise DominoError(
                "mode 'tree' needs the tree's shape, and none was given; load the drafter with tree=TreeSettings(…)."
            )
        if mode != BASELINE and self.drafter is None:
            raise DominoError(f"mode {mode!r} needs a drafter, and none was given; set config.drafter.path.")
        if mode == DOMINO and not self.drafter.has_head:
            raise DominoError(
                "mode 'domino' needs a drafter with a Domino head, but this one is plain DFlash; use mode 'draft'."
            )

    def _plain(self, mode: str) -> bool:
        # In fixed shape plain decoding starts from the very cache that a round would start from.
        return mode == BASELINE and not self.settings.fixed_shape


def new_generator(models: Models, settings: GeneratorSettings) -> Generator:
    """The generator of these models, of which only the shapes are read.

    Stop ids outside the vocabulary are dropped, because no token has them.

    Raises:
        DominoError: settings that do not fit the models.
    """
    vocab, drafter = models.target.config.vocab_size, models.drafter and models.drafter.config
    settings.check(vocab, drafter)
    limits = Limits.of(models, settings.max_new_tokens, settings.cache_slots, settings.block_rows(drafter))
    # An id that no token has keeps the array non-empty without ever stopping a row.
    stop_ids = sorted({token for token in settings.stop_ids if token < vocab}) or [-1]
    return Generator(settings, drafter, limits, jnp.asarray(stop_ids, jnp.int32), {})


def collect(row: Sequence[Any], stop_ids: jax.Array) -> Generation:
    """One row's (tokens, count, accepts, rounds) as a Generation."""
    tokens, count, accepts, rounds = row
    token_ids = [int(token) for token in tokens[:count]]
    stopped = bool(token_ids) and token_ids[-1] in np.asarray(stop_ids)
    return Generation(token_ids, [int(n) for n in accepts[:rounds]], "stop" if stopped else "length")


def _kind(sampling: RowSampling | None) -> tuple | None:
    return sampling.kind if sampling else None
