"""How probable the target finds the answers that it is to be imitated on."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from domino_jax.data.chat import Row
from domino_jax.models.qwen3 import Qwen3
from domino_jax.models.sharding import batch_sharding, replicated, row_shards
from domino_jax.training.losses import cross_entropy

SCORED_TOKENS = 4_096  # of a device at a time
SLICE_TOKENS = 128  # of a row whose logits live at once


def mean_logprobs(target: Qwen3, params: dict, rows: Sequence[Row], length: int, mesh: Mesh | None) -> np.ndarray:
    """Each row's mean log-probability of its supervised tokens under the target, float64 [rows], nats.

    Rows are padded to `length` and go through in batches that lie over the mesh; all processes get all figures.
    """
    batch = (row_shards(mesh) if mesh else 1) * max(1, SCORED_TOKENS // length)
    batch = min(batch, -(-len(rows) // row_shards(mesh)) * row_shards(mesh) if mesh else len(rows))
    score = jax.jit(
        lambda params, tokens, mask: supervised_logprob(target, params, tokens, mask),
        out_shardings=replicated(mesh) if mesh else None,
    )
    means = []
    for start in range(0, len(rows), batch):
        tokens, mask = np.zeros((batch, length), np.int32), np.zeros((batch, length), np.float32)
        part = rows[start : start + batch]
        for place, row in enumerate(part):
            tokens[place, : len(row.token_ids)] = row.token_ids
            mask[place, : len(row.loss_mask)] = row.loss_mask
        if mesh is None:
            total, count = score(params, tokens, mask)
        else:
            with jax.set_mesh(mesh):
                total, count = score(params, _spread(mesh, tokens), _spread(mesh, mask))
        total, count = (np.asarray(jax.device_get(array), np.float64) for array in (total, count))
        means.append((total / np.maximum(count, 1))[: len(part)])
    return np.concatenate(means)


def _spread(mesh: Mesh, rows: np.ndarray) -> jax.Array:
    """The same rows of every process as one array over the mesh."""
    return jax.make_array_from_callback(rows.shape, batch_sharding(mesh), lambda index: rows[index])


def supervised_logprob(
    target: Qwen3, params: dict, tokens: jax.Array, mask: jax.Array, size: int = SLICE_TOKENS
) -> tuple[jax.Array, jax.Array]:
    """Sum of log p(token | those before it) over the supervised tokens of each row, and how many they are: float32 [B].

    tokens int32, mask float32 [B, S]. The first token of a row has nothing before it and does not count. Logits live
    for `size` positions at a time.
    """
    hidden = target.apply({"params": params}, tokens, with_logits=False)["hidden"][:, :-1]
    labels, weights = tokens[:, 1:], mask[:, 1:]
    length = labels.shape[1]
    slices = -(-length // size)

    def cut(x):
        x = jnp.pad(x, [(0, 0), (0, slices * size - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], slices, size, *x.shape[2:]), 1, 0)

    def one(total, part):
        hidden, labels, weights = part
        logits = target.apply({"params": params}, hidden, method="unembed")
        return total - jnp.sum(weights * cross_entropy(logits, labels), axis=1), None

    start = jnp.zeros(tokens.shape[:1], jnp.float32)
    total, _ = jax.lax.scan(one, start, (cut(hidden), cut(labels), cut(weights)))
    return total, weights.sum(axis=1)
