"""Inputs of attention over a cache, as arrays and as shapes."""

import jax
import jax.numpy as jnp


def arrays(batch, heads, kv_heads, length, slots, width=128, mask_rows=None, dtype=jnp.bfloat16):
    """q, k, v and a random mask in which every query reads some slots."""
    keys = jax.random.split(jax.random.key(0), 4)
    made = [(batch, heads, length, width), *2 * [(batch, kv_heads, slots, width)]]
    q, k, v = (jax.random.normal(key, shape, jnp.float32).astype(dtype) for key, shape in zip(keys, made, strict=False))
    return q, k, v, jax.random.bernoulli(keys[3], 0.3, (mask_rows or batch, length, slots))


def shapes(batch, heads, kv_heads, length, slots, width=128, dtype=jnp.bfloat16):
    """The shapes of q, k, v and the mask."""
    made = [(batch, heads, length, width), *2 * [(batch, kv_heads, slots, width)]]
    return [*(jax.ShapeDtypeStruct(shape, dtype) for shape in made), jax.ShapeDtypeStruct((batch, length, slots), bool)]
