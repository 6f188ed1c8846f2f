"""Two separate rows, and the same rows in one packed row."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers.models import random_tokens

# In the packed row they start at 0 and 11, and four places of padding follow.
LENGTHS, PLACES = (11, 9), 24


def separate_rows(vocab: int = 79) -> dict[str, jax.Array]:
    """Each padded to 12 places, supervised but for its first token."""
    tokens, mask = np.zeros((2, 12), np.int32), np.zeros((2, 12), np.float32)
    for place, length in enumerate(LENGTHS):
        tokens[place, :length] = np.asarray(random_tokens((length,), seed=place, vocab=vocab))
        mask[place, 1:length] = 1.0
    return {"tokens": jnp.asarray(tokens), "loss_mask": jnp.asarray(mask)}


def packed_row(rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
    first, second = LENGTHS
    parts = {name: np.zeros((1, PLACES), np.asarray(value).dtype) for name, value in rows.items()}
    parts |= {name: np.zeros((1, PLACES), np.int32) for name in ("positions", "documents")}
    for number, (start, length) in enumerate(((0, first), (first, second))):
        span = np.s_[0, start : start + length]
        for name, value in rows.items():
            parts[name][span] = np.asarray(value)[number, :length]
        parts["positions"][span], parts["documents"][span] = np.arange(length), number + 1
    return {name: jnp.asarray(value) for name, value in parts.items()}
