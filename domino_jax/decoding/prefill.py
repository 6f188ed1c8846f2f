"""The program that starts requests: how far it pads prompts, which sampling it serves, which caches it starts from."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from domino_jax.decoding.prefixes import SHORTEST, CachedText
from domino_jax.decoding.programs import Program
from domino_jax.decoding.requests import Request
from domino_jax.method.loop import Prompts
from domino_jax.method.pair import Pair
from domino_jax.method.sampling import RowSampling, request_keys
from domino_jax.method.settings import SamplingKind
from domino_jax.models.cache import slots_of

if TYPE_CHECKING:
    from domino_jax.decoding.queue import Queue, QueuedRequest

LEAST_PART = 64  # tokens that are read after a prefix or in an open queue, padding included: few sizes, few programs
LEAST_POOL = 64  # of top-k, in programs for any requests; larger ones double it
# But for a larger top-k.
ANY_SAMPLING = SamplingKind(greedy=False, pool=LEAST_POOL, nucleus=True, searched=True, delayed=True)
_request_keys = jax.jit(request_keys)


def open_kind(requests: Sequence[Request], cheapest: bool = False) -> SamplingKind:
    """One of the few kinds that serve any requests: ANY_SAMPLING, for a larger top-k with a larger pool.

    cheapest: or the one that serves these with the least work.
    """
    params = [request.sampling for request in requests]
    pool = max(sampling.top_k for sampling in params)
    if cheapest and all(sampling.greedy for sampling in params) and not any(request.min_tokens for request in requests):
        return SamplingKind(True, 0, False, False)
    pool = max(LEAST_POOL, 1 << (pool - 1).bit_length()) if pool or not cheapest else 0
    return dataclasses.replace(ANY_SAMPLING, pool=pool)


def prefill_program(
    queue: "Queue", queued: Sequence["QueuedRequest"], rows: int, earlier: CachedText | None = None
) -> Program:
    """The prefill of a batch of `rows` (Queue.prefill). earlier: the text whose caches the only request starts from."""
    first, missing = queued[0], rows - len(queued)
    tokens = [*(entry.prompt for entry in queued), *[first.prompt] * missing]
    requests = [entry.request for entry in queued]
    requests += [dataclasses.replace(first.request, max_new_tokens=1)] * missing
    lengths = np.array([len(row) for row in tokens], np.int32)
    bucket, slots = prompt_sizes(queue, int(lengths.max()))
    if earlier:
        tokens, bucket = [first.prompt[first.cached :]], _part(queue, first, slots)
    padded = np.zeros((rows, bucket), np.int32)
    for row, prompt in zip(padded, tokens, strict=True):
        row[: len(prompt)] = prompt
    limits = np.array([request.max_new_tokens for request in requests], np.int32)
    seeds = np.array([request.seed for request in requests], np.int32)
    keys = _request_keys(seeds, np.array([request.noise for request in requests], np.int32))
    kind = open_kind(requests) if queue.open else queue.kind
    first_stop = lengths + np.minimum([request.min_tokens for request in requests], limits).astype(np.int32)
    sampling = kind and RowSampling.of([request.sampling for request in requests], kind, first_stop)
    endless = np.array([request.ignore_eos for request in requests])
    models = Pair(queue.models.target, queue.models.target_params) if queue.plain else queue.models
    arguments = (models, Prompts(padded, lengths, limits, keys, sampling, endless), queue.generator.stop_ids)
    key = ("prefill", rows, bucket, slots, queue.plain, kind)
    if earlier:
        caches = earlier.target_cache, () if queue.plain else earlier.draft_cache
        arguments = (*arguments, caches, np.int32(first.cached))
        key = (*key, slots_of(earlier.target_cache))
    return Program(key, functools.partial(queue.generator.prefill, slots=slots), arguments)


def earlier_text(queue: "Queue", request: "QueuedRequest") -> tuple[CachedText | None, int]:
    """The text whose caches the prompt starts from, and how many of their rows; (None, 0) without one."""
    earlier, request.cached = queue.prefixes.longest(request.prompt, queue.plain)
    # Padding to the bucket must not need more slots than the whole prompt does.
    _, slots = prompt_sizes(queue, len(request.prompt))
    cached = min(request.cached, slots - _part(queue, request, slots))
    return (earlier, cached) if cached >= SHORTEST else (None, 0)


def prompt_sizes(queue: "Queue", length: int) -> tuple[int, int]:
    """The tokens that a prompt is padded to, and the slots of its caches."""
    bucket = queue.generator.bucket(max(length, LEAST_PART) if queue.open else length)
    return bucket, queue.slots(queue.generator.slots(bucket))


def _part(queue: "Queue", request: "QueuedRequest", slots: int) -> int:
    """The tokens, padding included, that a prompt reads after those of an earlier text."""
    return min(max(queue.generator.bucket(len(request.prompt) - request.cached), LEAST_PART), slots)
