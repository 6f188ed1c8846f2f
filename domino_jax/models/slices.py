"""Cutting an axis into equal slices, so that a loop makes and drops one slice of a large array at a time."""

import jax
import jax.numpy as jnp

BLOCKS = 32  # draft blocks of a row whose attention scores, and by default logits, are in memory at once in training


def cut(x: jax.Array, axis: int, size: int) -> jax.Array:
    """x with `axis` in slices of `size`, the slices in front: [.., A, ..] → [ceil(A/size), .., size, ..].

    Zeros (False) fill the last slice.
    """
    slices = -(-x.shape[axis] // size)
    x = jnp.pad(x, [(0, slices * size - x.shape[axis] if place == axis else 0) for place in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:axis], slices, size, *x.shape[axis + 1 :]), axis, 0)


def join(slices: jax.Array, axis: int, length: int) -> jax.Array:
    """Joins the slices of `cut` to an array that is `length` long along `axis`."""
    x = jnp.moveaxis(slices, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)
