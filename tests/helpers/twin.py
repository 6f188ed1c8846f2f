"""A slow second implementation of plain decoding: whole prefixes without a cache, and the verification rule in float64.

It shares the target's forward pass with the package, and nothing of the loop, the cache or the sampling.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from domino_jax.decoding.requests import Request
from domino_jax.method.pair import Pair
from domino_jax.method.settings import SamplingParams

WIDTH = 64  # tokens of every pass; the texts of the tests are no longer


def kept_tokens(logits, params: SamplingParams, order=("temperature", "top_k", "top_p", "min_p")) -> np.ndarray:
    """The kept tokens of one row, bool [V], by sorting in float64; a token tied with the last one inside is inside."""
    logits = np.asarray(logits, np.float64)
    for step in order:
        ranked = np.sort(logits)[::-1]
        if step == "temperature":
            logits = logits / params.temperature
        elif step == "top_k" and params.top_k:
            logits = np.where(logits >= ranked[min(params.top_k, logits.size) - 1], logits, -np.inf)
        elif step == "top_p" and params.top_p < 1:
            p = scipy.special.softmax(ranked)
            last = ranked[np.flatnonzero(np.cumsum(p) - p < params.top_p)[-1]]
            logits = np.where(logits >= last, logits, -np.inf)
        elif step == "min_p" and params.min_p:
            logits = np.where(logits >= ranked[0] + np.log(params.min_p), logits, -np.inf)
    return np.isfinite(logits)


def exact_law(logits, params: SamplingParams) -> np.ndarray:
    """p of one row [V]."""
    scores = np.where(kept_tokens(logits, params), np.asarray(logits, np.float64) / params.temperature, -np.inf)
    return scipy.special.softmax(scores)


def choice(logits, noise, params: SamplingParams) -> int:
    """argmax(log p + g) of one row [V]."""
    if params.greedy:
        return int(np.argmax(logits))
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(exact_law(logits, params)) + noise))


@functools.lru_cache
def noise_of(seed: int, request: int, vocab: int) -> np.ndarray:
    """g of every absolute position, [WIDTH, V]: Gumbel noise under fold_in(fold_in(key(seed), request), position)."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), request)
    draw = jax.vmap(lambda position: jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), jnp.float32))
    return np.asarray(draw(jnp.arange(WIDTH)), np.float64)


@jax.jit
def _pass(target: Pair, tokens: jax.Array) -> jax.Array:
    return target.run_target(tokens)["logits"]


def plain_texts(
    models: Pair, prompts: list[list[int]], requests: list[Request], stop_ids: tuple[int, ...] = ()
) -> list[list[int]]:
    """The new tokens of every request, which has all its values: max_new_tokens of them, also after a stop id.

    stop_ids: the first min_tokens of a request have none of them.
    """
    target = Pair(models.target, models.target_params)
    texts, vocab = [list(prompt) for prompt in prompts], models.target.config.vocab_size
    ends = [len(prompt) + request.max_new_tokens for prompt, request in zip(prompts, requests, strict=True)]
    while any(len(text) < end for text, end in zip(texts, ends, strict=True)):
        padded = np.zeros((len(texts), WIDTH), np.int32)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = text
        logits = np.asarray(_pass(target, padded), np.float64)
        for row, (text, end, request) in enumerate(zip(texts, ends, requests, strict=True)):
            if len(text) < end:
                noise, allowed = noise_of(request.seed, request.noise, vocab)[len(text)], np.ones(vocab, bool)
                allowed[list(stop_ids)] = len(text) - len(prompts[row]) >= request.min_tokens
                scores = np.where(allowed, logits[row, len(text) - 1], -np.inf)
                text.append(choice(scores, noise, request.sampling))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def cut(text: list[int], stop_ids: tuple[int, ...]) -> list[int]:
    """The text up to and with its first stop id."""
    return text[: next((place + 1 for place, token in enumerate(text) if token in stop_ids), len(text))]
