"""Prompts in, generations out: buckets, compiled programs kept by shape, a queue over the rows of a batch, clocks."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.decoding.autoregressive import autoregressive_round
from domino_jax.decoding.limits import Limits
from domino_jax.decoding.loop import DecodeState, prefill, put_row, run_rounds
from domino_jax.decoding.propose import DraftSettings
from domino_jax.decoding.sampling import RowSampling, SamplingKind, SamplingParams, request_keys
from domino_jax.decoding.speculative import speculative_round
from domino_jax.decoding.tree import check_tree
from domino_jax.drafters.pair import Models
from domino_jax.models import sharding
from domino_jax.runtime.errors import DominoError

BASELINE = "autoregressive"
TREE = "tree"
MODES = (BASELINE, "backbone", "domino", TREE)
SMALLEST_BUCKET = 16
POLLED_ROUNDS = 32  # rounds of a dispatch when the caller polls between dispatches: seconds of work at most


@dataclasses.dataclass(frozen=True)
class Request:
    """What one prompt asks for besides its tokens; None: what the generator was given.

    noise: keys the noise together with the seed, and nothing else does (DESIGN §4); not the place in a batch.
    """

    noise: int
    seed: int | None = None
    max_new_tokens: int | None = None
    sampling: SamplingParams | None = None


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
    """What a chunk of rounds added to one answer; finish_reason is None until the last piece."""

    token_ids: list[int]
    accept_lengths: list[int]
    finish_reason: str | None


@dataclasses.dataclass
class Clock:
    """Wall seconds of a run, compilation apart; decode_tokens leaves out each row's first token, the prefill's."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    decode_tokens: int = 0


class Generator:
    """Generates for any number of prompts with fixed shapes: one compiled program per prompt-length bucket and mode.

    Args:
        models: target and drafter (the drafter may be None for autoregressive mode).
        stop_ids: token ids that end an answer.
        cache_slots: rows of the key/value caches: prompt + answer + one block must fit.
        max_new_tokens: size of the token buffer, the most an answer may have.
        batch_size: rows decoded together; when one ends, the next prompt takes its place.
        sampling, seed: of requests that have none of their own.
        drafting: how to draft; whether by the head, and whether the tree in it, is the mode's to say.
        fixed_shape: plain decoding runs through a pass as wide as a round's, which makes its text the round's to the
            last bit in every dtype; else texts may part at near ties.
        simulated_tau: force this acceptance length (speculative.simulated_accepts).
    """

    def __init__(
        self,
        models: Models,
        *,
        stop_ids: Sequence[int],
        cache_slots: int,
        max_new_tokens: int,
        batch_size: int = 1,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        drafting: DraftSettings | None = None,
        fixed_shape: bool = False,
        simulated_tau: float | None = None,
    ):
        self.models = models
        self.cache_slots = cache_slots
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        self.sampling = sampling or SamplingParams()
        self.seed = seed
        self.drafting = drafting or DraftSettings()
        self.fixed_shape = fixed_shape
        self.between: Callable[[], None] | None = None  # called after each dispatch; may raise to end generate()
        self.simulated_tau = simulated_tau
        # An id that no token has keeps the array non-empty without ever stopping a row.
        self.stop_ids = jnp.asarray(sorted(set(stop_ids)) or [-1], jnp.int32)
        self.compiled: dict[tuple, jax.stages.Compiled] = {}
        self.clock = Clock()
        self._check_width()
        self.limits = Limits.of(models, max_new_tokens, cache_slots, self.block_rows())

    def block_rows(self) -> int:
        """Cache rows that a round writes behind the committed length: the block, or the anchor and the drafts."""
        if not self.models.drafter:
            return 1
        config = self.models.drafter.config
        nodes = self.drafting.tree.nodes if self.drafting.tree else 0
        chain = dataclasses.replace(self.drafting, tree=None).width(config) + 1  # a tree may be shallower than it
        return max(config.block_size, chain, self.drafting.width(config) + 1, nodes)

    # ------------------------------------------------------------------------------------------- whole answers

    def generate(
        self, prompts: Sequence[Sequence[int]], mode: str, requests: Sequence[int | Request] | None = None
    ) -> list[Generation]:
        """Answers in the order of the prompts, `batch_size` of them in flight at a time.

        Args:
            requests: per prompt a Request, or the id of its noise alone; the prompt's index when absent (DESIGN §4).

        Raises:
            DataError: an empty prompt or one that does not fit, before anything runs.
        """
        self._check_mode(mode)
        asked = self._requests(prompts, requests)
        answers: list[Generation | None] = [None] * len(prompts)
        waiting = deque(range(len(prompts)))
        first = [waiting.popleft() for _ in range(min(self.batch_size, len(waiting)))]
        if first:
            self._serve(prompts, asked, mode, first, waiting, answers)
        return answers

    def _serve(self, prompts, asked: list[Request], mode: str, first: list[int], waiting: deque, answers: list) -> None:
        """Answers the prompts `first`, and those that wait as rows become free; until no row has anything to do."""
        plain, kind = self._plain(mode), self._sampling_kind(asked)
        rows: list[int | None] = [*first, *[None] * (self.batch_size - len(first))]
        state = self._start([prompts[index] for index in first], [asked[index] for index in first], plain, kind)
        while any(index is not None for index in rows):
            idle = sum(index is None for index in rows) if waiting else len(rows) - 1
            # A round emits at least one token per unfinished row, so this many rounds always suffice.
            state = self.advance(state, mode, POLLED_ROUNDS if self.between else self.max_new_tokens, idle)
            if self.between:
                self.between()
            read = jax.device_get((state.done, (state.tokens, state.counts, state.accepts, state.rounds)))
            for slot, index in enumerate(rows):
                if index is None or not read[0][slot]:
                    continue
                answers[index] = collect([column[slot] for column in read[1]], self.stop_ids)
                self.clock.decode_tokens += len(answers[index].token_ids) - 1
                rows[slot] = waiting.popleft() if waiting else None
                if rows[slot] is not None:
                    state = self.admit(state, slot, prompts[rows[slot]], asked[rows[slot]], plain, kind)

    def stream(
        self, prompt: Sequence[int], mode: str, chunk_rounds: int = 1, request: int | Request = 0
    ) -> Iterator[Piece]:
        """One answer as it comes: the same compiled round, `chunk_rounds` of it per dispatch and host read."""
        self._check_mode(mode)
        [asked] = self._requests([prompt], [request])
        state = self.start([prompt], [asked], self._plain(mode), rows=1)
        seen, rounds = 0, 0
        while True:
            tokens, count, accepts, made, done = (
                column[0]
                for column in jax.device_get((state.tokens, state.counts, state.accepts, state.rounds, state.done))
            )
            whole = collect((tokens, count, accepts, made), self.stop_ids)
            self.clock.decode_tokens += len(whole.token_ids) - max(seen, 1)
            yield Piece(whole.token_ids[seen:], whole.accept_lengths[rounds:], whole.finish_reason if done else None)
            if done:
                return
            seen, rounds = len(whole.token_ids), len(whole.accept_lengths)
            state = self.advance(state, mode, chunk_rounds)

    # --------------------------------------------------------------------------------------------- one dispatch

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        requests: Sequence[int | Request],
        plain: bool = False,
        rows: int | None = None,
    ) -> DecodeState:
        """Prefills one batch of `rows` (batch_size); rows without a prompt are done once they have a single token.

        plain: leave the drafter's context out, which autoregressive decoding has no use for.
        """
        asked = [self.request(request) for request in requests]
        return self._start(prompts, asked, plain, self._sampling_kind(asked), rows)

    def _start(
        self, prompts, asked: list[Request], plain: bool, kind: SamplingKind | None, rows: int | None = None
    ) -> DecodeState:
        """kind: that of all requests which the batch will serve, so that one program serves them."""
        missing = (rows or self.batch_size) - len(prompts)
        tokens = [*prompts, *[prompts[0]] * missing]
        asked = [*asked, *[dataclasses.replace(asked[0], max_new_tokens=1)] * missing]
        lengths = np.array([len(row) for row in tokens], np.int32)
        bucket = self.bucket(int(lengths.max()))
        padded = np.zeros((len(tokens), bucket), np.int32)
        for row, prompt in zip(padded, tokens, strict=True):
            row[: len(prompt)] = prompt
        limits = np.array([request.max_new_tokens for request in asked], np.int32)
        seeds = np.array([request.seed for request in asked], np.int32)
        keys = request_keys(seeds, jnp.asarray([request.noise for request in asked], jnp.int32))
        sampling = kind and RowSampling.of([request.sampling for request in asked], kind)
        arguments = (self.models, padded, lengths, limits, keys, self.stop_ids, sampling)
        if plain:
            arguments = (Models(self.models.target, self.models.target_params), *arguments[1:])
        key = ("prefill", len(tokens), bucket, plain, _kind(sampling))
        return self._timed("prefill_seconds", key, self._prefill, arguments)

    def admit(
        self,
        state: DecodeState,
        slot: int,
        prompt: Sequence[int],
        request: Request,
        plain: bool,
        kind: SamplingKind | None,
    ) -> DecodeState:
        """The state with a new prompt in place of the row `slot`, which is done; the state passed in is donated."""
        row = self._start([prompt], [request], plain, kind, rows=1)
        key = ("admit", plain, _kind(row.sampling))
        return self._timed("prefill_seconds", key, put_row, (state, row, np.int32(slot)), donate=(0,))

    def advance(self, state: DecodeState, mode: str, max_rounds: int, idle: int | None = None) -> DecodeState:
        """Runs up to max_rounds rounds in one dispatch (loop.run_rounds); the state passed in is donated."""
        rows = state.done.shape[0]
        idle = rows - 1 if idle is None else idle
        arguments = (self.models, state, self.stop_ids, np.int32(max_rounds), np.int32(idle))
        key = (mode, rows, _kind(state.sampling))
        return self._timed("decode_seconds", key, self.rounds(mode), arguments, donate=(1,))

    def rounds(self, mode: str) -> Callable[..., DecodeState]:
        """The unjitted program of a mode: (models, state, stop_ids, max_rounds, idle) → state after them."""
        settings = self.settings(mode)

        def rounds(models, state, stop_ids, max_rounds, idle=None):
            def one(state):
                if mode == BASELINE:
                    width = settings.width(models.drafter.config) + 1 if self.fixed_shape else None
                    return autoregressive_round(models, state, stop_ids, self.sampling, width)
                choices = {"isolated": self.fixed_shape, "simulated_tau": self.simulated_tau}
                return speculative_round(models, state, stop_ids, self.sampling, settings, **choices)

            return run_rounds(one, state, max_rounds, idle)

        return rounds

    def settings(self, mode: str) -> DraftSettings:
        """How rounds of a mode draft."""
        if mode == TREE:
            return dataclasses.replace(self.drafting, use_head=self.models.drafter.config.has_head)
        return dataclasses.replace(self.drafting, use_head=mode == "domino", tree=None)

    def _prefill(self, models, prompts, lengths, limits, keys, stop_ids, sampling):
        shape = {"cache_slots": self.cache_slots, "buffer": self.max_new_tokens}
        return prefill(models, prompts, lengths, limits, keys, stop_ids, sampling=sampling or self.sampling, **shape)

    def _timed(self, span: str, key: tuple, function, arguments: tuple, donate: tuple[int, ...] = ()):
        """Runs the program kept under `key`, compiled first if need be; adds to the clock's span."""
        mesh = jax.sharding.get_mesh()
        if not mesh.empty:
            arguments = (arguments[0], *sharding.replicate(mesh, arguments[1:]))
        if key not in self.compiled:
            begin = time.perf_counter()
            layout = None if mesh.empty else sharding.decode_layout(mesh, jax.eval_shape(function, *arguments))
            program = jax.jit(function, donate_argnums=donate, out_shardings=layout)
            self.compiled[key] = program.lower(*arguments).compile()
            self.clock.compile_seconds += time.perf_counter() - begin
        begin = time.perf_counter()
        result = jax.block_until_ready(self.compiled[key](*arguments))
        setattr(self.clock, span, getattr(self.clock, span) + time.perf_counter() - begin)
        return result

    def bucket(self, length: int) -> int:
        """The next power of two, at most the cache."""
        return min(max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()), self.cache_slots)

    # ------------------------------------------------------------------------------------------------- requests

    def _requests(self, prompts, requests: Sequence[int | Request] | None) -> list[Request]:
        asked = [self.request(request) for request in (range(len(prompts)) if requests is None else requests)]
        for index, (prompt, request) in enumerate(zip(prompts, asked, strict=True)):
            self.check_prompt(prompt, f"prompt {index}", request)
        return asked

    def request(self, request: int | Request) -> Request:
        """A prompt's request (or the id of its noise alone) with the generator's own values where it has none."""
        request = request if isinstance(request, Request) else Request(request)
        own = {"seed": self.seed, "max_new_tokens": self.max_new_tokens, "sampling": self.sampling}
        missing = {name: value for name, value in own.items() if getattr(request, name) is None}
        return dataclasses.replace(request, **missing)

    def _sampling_kind(self, asked: Sequence[Request]) -> SamplingKind | None:
        """None where all requests sample as the generator does, which is then a constant of the program."""
        if all(request.sampling == self.sampling for request in asked):
            return None
        return SamplingKind.of([request.sampling for request in asked])

    def check_prompt(self, prompt: Sequence[int], name: str, request: int | Request = 0) -> None:
        """Raises DataError for a prompt that cannot be answered (limits.py)."""
        self.limits.check_prompt(prompt, self.request(request).max_new_tokens, name)

    def _plain(self, mode: str) -> bool:
        # In fixed shape plain decoding starts from the very cache that a round would start from.
        return mode == BASELINE and not self.fixed_shape

    def _check_width(self) -> None:
        drafter, drafts = self.models.drafter, self.drafting.num_drafts
        if drafter and drafts and drafts > drafter.config.num_drafts:
            raise DominoError(
                f"decode.num_drafts is {drafts}, but a block of {drafter.config.block_size} slots gives"
                f" {drafter.config.num_drafts} drafts; lower it."
            )
        if self.fixed_shape and not drafter:
            raise DominoError(
                "decode.parity=fixed_shape runs plain decoding in a round's width, which is the drafter's, and there"
                " is none; set config.drafter.path or decode.parity=near_tie."
            )
        if self.drafting.tree and drafter:
            if self.drafting.tree.depth > drafter.config.num_drafts:
                raise DominoError(
                    f"decode.tree.depth is {self.drafting.tree.depth}, but a block of {drafter.config.block_size} slots"
                    f" gives {drafter.config.num_drafts} drafts; lower it, or set 0."
                )
            drafts, vocab = self.drafting.width(drafter.config), self.models.target.config.vocab_size
            check_tree(self.drafting.tree, drafts, vocab, self.cache_slots, self.fixed_shape)

    def _check_mode(self, mode: str) -> None:
        if mode not in MODES:
            raise DominoError(f"mode {mode!r} is not one of {', '.join(MODES)}.")
        drafter = self.models.drafter
        if mode == TREE and self.drafting.tree is None:
            raise DominoError(
                "mode 'tree' needs the tree's shape, and none was given; load the drafter with tree=TreeSettings(…)."
            )
        if mode != BASELINE and drafter is None:
            raise DominoError(f"mode {mode!r} needs a drafter, and none was given; set config.drafter.path.")
        if mode == "domino" and not drafter.config.has_head:
            raise DominoError(
                "mode 'domino' needs a drafter with a Domino head, but this one is plain DFlash; use mode 'backbone'."
            )


def collect(row: Sequence[Any], stop_ids: jax.Array) -> Generation:
    """One row's (tokens, count, accepts, rounds) as a Generation."""
    tokens, count, accepts, rounds = row
    token_ids = [int(token) for token in tokens[:count]]
    stopped = bool(token_ids) and token_ids[-1] in np.asarray(stop_ids)
    return Generation(token_ids, [int(n) for n in accepts[:rounds]], "stop" if stopped else "length")


def _kind(sampling: RowSampling | None) -> tuple | None:
    return sampling.kind if sampling else None
