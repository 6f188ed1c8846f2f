"""Prompts in, generations out: buckets, compiled programs kept by shape, batches, clocks."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax import sharding
from domino_jax.decoding.autoregressive import autoregressive_round
from domino_jax.decoding.loop import DecodeState, prefill, run_rounds
from domino_jax.decoding.models import Models
from domino_jax.decoding.propose import DraftSettings
from domino_jax.decoding.sampling import SamplingParams, request_keys
from domino_jax.decoding.speculative import speculative_round
from domino_jax.errors import DataError, DominoError

BASELINE = "autoregressive"
MODES = (BASELINE, "backbone", "domino")
SMALLEST_BUCKET = 16


@dataclasses.dataclass(frozen=True)
class Generation:
    """One answer.

    token_ids: new tokens only, a stop id included.  accept_lengths: tokens emitted per round, [] when plain.
    """

    token_ids: list[int]
    accept_lengths: list[int]
    finish_reason: str  # "stop" | "length"


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
        batch_size: rows decoded together.
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
        draft_scale: float = 1.0,
    ):
        self.models = models
        self.cache_slots = cache_slots
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        self.sampling = sampling or SamplingParams()
        self.seed = seed
        self.draft_scale = draft_scale
        # An id that no token has keeps the array non-empty without ever stopping a row.
        self.stop_ids = jnp.asarray(sorted(set(stop_ids)) or [-1], jnp.int32)
        self.compiled: dict[tuple, jax.stages.Compiled] = {}
        self.clock = Clock()

    def block_rows(self) -> int:
        """Cache rows that a round writes behind the committed length: the anchor and M drafts."""
        return self.models.drafter.config.num_drafts + 1 if self.models.drafter else 1

    def generate(
        self, prompts: Sequence[Sequence[int]], mode: str, requests: Sequence[int] | None = None
    ) -> list[Generation]:
        """Answers in the order of the prompts. requests: noise ids per prompt, its index when absent (DESIGN §4).

        Raises DataError for an empty prompt or one that does not fit, before anything runs.
        """
        self._check_mode(mode)
        for index, prompt in enumerate(prompts):
            self.check_prompt(prompt, f"prompt {index}")
        requests = list(range(len(prompts))) if requests is None else list(requests)
        answers: list[Generation] = []
        for start in range(0, len(prompts), self.batch_size):
            end = start + self.batch_size
            answers += self._generate_batch(prompts[start:end], requests[start:end], mode)
        return answers

    def check_prompt(self, prompt: Sequence[int], name: str) -> None:
        """Raises DataError when the prompt is empty, holds an id outside the vocabulary, or does not fit the cache."""
        if not len(prompt):
            raise DataError(f"{name} is empty; give it at least one token.")
        vocab = self.models.target.config.vocab_size
        wrong = [token for token in prompt if not 0 <= token < vocab]
        if wrong:
            raise DataError(f"{name} holds token id {wrong[0]}, but the target has {vocab} embedding rows.")
        needed = len(prompt) + self.max_new_tokens + self.block_rows()
        if needed > self.cache_slots:
            raise DataError(
                f"{name} needs {needed} cache rows ({len(prompt)} prompt + {self.max_new_tokens} new + "
                f"{self.block_rows()} block),"
                f" but decode.cache_length is {self.cache_slots}; raise it, or shorten the prompt or max_new_tokens."
            )

    def start(self, prompts: Sequence[Sequence[int]], requests: Sequence[int], plain: bool = False) -> DecodeState:
        """Prefills one batch; short batches are filled up with copies of the first row that may emit a single token.

        plain: leave the drafter's context out, which autoregressive decoding has no use for.
        """
        models = Models(self.models.target, self.models.target_params) if plain else self.models
        missing = self.batch_size - len(prompts)
        rows = [*prompts, *[prompts[0]] * missing]
        limits = [self.max_new_tokens] * len(prompts) + [1] * missing
        lengths = np.array([len(row) for row in rows], np.int32)
        bucket = self.bucket(int(lengths.max()))
        padded = np.zeros((len(rows), bucket), np.int32)
        for row, prompt in zip(padded, rows, strict=True):
            row[: len(prompt)] = prompt
        keys = request_keys(self.seed, jnp.asarray([*requests, *[requests[0]] * missing], jnp.int32))
        arguments = (models, padded, lengths, np.array(limits, np.int32), keys, self.stop_ids)
        return self._timed("prefill_seconds", ("prefill", bucket, plain), self._prefill, arguments)

    def advance(self, state: DecodeState, mode: str, max_rounds: int) -> DecodeState:
        """Runs up to max_rounds rounds in one dispatch; the state passed in is donated."""
        arguments = (self.models, state, self.stop_ids, np.int32(max_rounds))
        return self._timed("decode_seconds", (mode,), self.rounds(mode), arguments, donate=(1,))

    def _generate_batch(self, prompts, requests, mode: str) -> list[Generation]:
        state = self.start(prompts, requests, plain=mode == BASELINE)
        # A round emits at least one token per unfinished row, so this many rounds always suffice.
        state = self.advance(state, mode, self.max_new_tokens)
        read = jax.device_get((state.tokens, state.counts, state.accepts, state.rounds))
        answers = [collect(row, self.stop_ids) for row in zip(*read, strict=True)][: len(prompts)]
        self.clock.decode_tokens += sum(len(answer.token_ids) - 1 for answer in answers)
        return answers

    def _prefill(self, models, prompts, lengths, limits, keys, stop_ids):
        return prefill(
            models,
            prompts,
            lengths,
            limits,
            keys,
            stop_ids,
            cache_slots=self.cache_slots,
            buffer=self.max_new_tokens,
            sampling=self.sampling,
        )

    def rounds(self, mode: str):
        """The unjitted program of a mode: (models, state, stop_ids, max_rounds) → state after that many."""
        settings = DraftSettings(use_head=mode == "domino", scale=self.draft_scale)

        def rounds(models, state, stop_ids, max_rounds):
            def one(state):
                if mode == BASELINE:
                    return autoregressive_round(models, state, stop_ids, self.sampling)
                return speculative_round(models, state, stop_ids, self.sampling, settings)

            return run_rounds(one, state, max_rounds)

        return rounds

    def _timed(self, span: str, key: tuple, function, arguments: tuple, donate: tuple[int, ...] = ()):
        """Runs the program kept under `key`, compiled first if need be; adds to the clock's span."""
        # On a mesh every array the host reads or writes lies whole on every device.
        mesh = jax.sharding.get_mesh()
        everywhere = None if mesh.empty else sharding.replicated(mesh)
        if everywhere is not None:
            arguments = (arguments[0], *sharding.replicate(mesh, arguments[1:]))
        if key not in self.compiled:
            begin = time.perf_counter()
            program = jax.jit(function, donate_argnums=donate, out_shardings=everywhere)
            self.compiled[key] = program.lower(*arguments).compile()
            self.clock.compile_seconds += time.perf_counter() - begin
        begin = time.perf_counter()
        result = jax.block_until_ready(self.compiled[key](*arguments))
        setattr(self.clock, span, getattr(self.clock, span) + time.perf_counter() - begin)
        return result

    def bucket(self, length: int) -> int:
        """The next power of two, at most the cache."""
        return min(max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()), self.cache_slots)

    def _check_mode(self, mode: str) -> None:
        if mode not in MODES:
            raise DominoError(f"mode {mode!r} is not one of {', '.join(MODES)}.")
        drafter = self.models.drafter
        if mode != BASELINE and drafter is None:
            raise DominoError(f"mode {mode!r} needs a drafter, and none was given; set config.drafter.path.")
        if mode == "domino" and not drafter.config.has_head:
            raise DominoError(
                "mode 'domino' needs a drafter with a Domino head, but this one is plain DFlash; use mode 'backbone'."
            )


def collect(row: tuple, stop_ids: jax.Array) -> Generation:
    """One row's (tokens, count, accepts, rounds) as a Generation."""
    tokens, count, accepts, rounds = row
    token_ids = [int(token) for token in tokens[:count]]
    stopped = bool(token_ids) and token_ids[-1] in np.asarray(stop_ids)
    return Generation(token_ids, [int(n) for n in accepts[:rounds]], "stop" if stopped else "length")
