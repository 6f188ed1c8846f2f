"""The program that starts requests: how far it pads prompts, which sampling it serves, which caches it starts from."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from domino_jax.decoding.prefixes import CachedText
from domino_jax.decoding.programs import Program, Programs
from domino_jax.decoding.requests import QueuedRequest, Request
from domino_jax.method.loop import Prompts
from domino_jax.method.pair import Pair
from domino_jax.method.sampling import RowSampling, request_keys
from domino_jax.method.settings import SamplingKind
from domino_jax.models.cache import slots_of

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
    generator: Programs,
    models: Pair,
    queued: Sequence[QueuedRequest],
    rows: int,
    sizes: tuple[int, int],
    kind: SamplingKind | None,
    earlier: CachedText | None = None,
) -> Program:
    """The prefill of a batch of `rows`; those without a request are done once they have a single token.

    Args:
        models: without a drafter for plain decoding.
        sizes: tokens to which the prompts are padded, and slots of their caches.
        kind: of all requests; None where all sample as the generator does.
        earlier: the text from whose caches the only request takes the first `cached` rows; sizes are of what is read.
    """
    first, missing = queued[0], rows - len(queued)
    tokens = [*(entry.prompt for entry in queued), *[first.prompt] * missing]
    requests = [entry.request for entry in queued]
    requests += [dataclasses.replace(first.request, max_new_tokens=1)] * missing
    lengths = np.array([len(row) for row in tokens], np.int32)
    padded = np.zeros((rows, sizes[0]), np.int32)
    for row, prompt in zip(padded, [first.prompt[first.cached :]] if earlier else tokens, strict=True):
        row[: len(prompt)] = prompt
    limits = np.array([request.max_new_tokens for request in requests], np.int32)
    seeds = np.array([request.seed for request in requests], np.int32)
    keys = _request_keys(seeds, np.array([request.noise for request in requests], np.int32))
    first_stop = lengths + np.minimum([request.min_tokens for request in requests], limits).astype(np.int32)
    sampling = kind and RowSampling.of([request.sampling for request in requests], kind, first_stop)
    endless = np.array([request.ignore_eos for request in requests])
    arguments = (models, Prompts(padded, lengths, limits, keys, sampling, endless), generator.stop_ids)
    key = ("prefill", rows, *sizes, not models.drafter, kind)
    if earlier:
        caches = earlier.target_cache, earlier.draft_cache if models.drafter else ()
        arguments = (*arguments, caches, np.int32(first.cached))
        key = (*key, slots_of(earlier.target_cache))
    return Program(key, functools.partial(generator.prefill, slots=sizes[1]), arguments)
