"""Losses reduced in slices of anchor blocks. Skip this file at first reading: it bounds memory and changes no number.

A slice is a few anchor blocks of every row. Its logits are made once, reduced to additive sums and to the gradient of
the loss, and dropped, so the [A·G, V] array of a batch never lives.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from domino_jax.models.slices import cut, join

Sums = dict[str, jax.Array]


class SlicedForward(NamedTuple):
    """A forward pass whose last part, from hidden states to logits, runs slice by slice.

    outputs_of: (params, *slice of inputs, slice of states) → losses.Outputs with arrays [B, n, G, ...].
    params: the trained parameters that outputs_of reads.
    inputs: tuple of trees of arrays [B, A, ...], which depend on trained parameters.
    states: a tree of arrays [B, A, ...] or None, which do not.
    in_use: params → what outputs_of gets of them, once for all slices: their matrices cast and gathered. The gradient
        by them is summed in float32 and is that by params.
    """

    outputs_of: Callable[..., Any]
    params: Any
    inputs: tuple
    states: Any = None
    in_use: Callable[[Any], Any] = lambda params: params


def sliced_loss(forward: SlicedForward, labels: Any, loss: Any) -> tuple[jax.Array, Sums]:
    """(loss, block_sums) of all blocks, `loss.blocks_at_once` of each row at a time.

    When it is differentiated, the gradient of a slice is computed beside its logits, and the backward pass only
    multiplies it by the cotangent of the loss. So the logits are made once, where a rematerialised slice makes them
    twice. The sums are figures to report: no gradient flows through them.

    Slices are cut along the anchors and never along the rows: every device works on its own rows in every slice. Zeros
    fill the last slice, as blocks without a label.

    Args:
        labels: losses.Labels.
        loss: losses.Loss, or another class with its `total`, `block_sums` and `blocks_at_once`.
    """
    blocks = labels.ids.shape[1]
    size = min(loss.blocks_at_once, blocks)

    def row_losses(params, inputs, labels, states):
        outputs = forward.outputs_of(params, *inputs, states)
        sums = jax.vmap(loss.block_sums)(outputs, labels)
        return loss.total(sums), sums

    def slices(inputs):
        return jax.tree.map(lambda x: cut(x, 1, size), (inputs, labels, forward.states))

    def over_rows(rows):
        return jax.tree.map(lambda x: x.sum(axis=0), rows)  # once, after the slices: rows are spread over devices

    @jax.custom_vjp
    def loss_of(params, inputs):
        return over_rows(scan_sum(functools.partial(row_losses, forward.in_use(params)), slices(inputs)))

    def with_gradients(params, inputs):
        params = forward.in_use(params)

        def add_slice(total, part):
            inputs, labels, states = part
            losses_of = functools.partial(row_losses, labels=labels, states=states)
            losses, pull_back, sums = jax.vjp(losses_of, params, inputs, has_aux=True)
            of_params, of_inputs = pull_back(jnp.ones_like(losses))
            return jax.tree.map(jnp.add, total, (losses, sums, of_params)), of_inputs

        parts = slices(inputs)
        first = jax.eval_shape(row_losses, params, *jax.tree.map(lambda x: x[0], parts))
        (losses, sums, of_params), of_inputs = jax.lax.scan(add_slice, zeros_of((*first, params)), parts)
        return over_rows((losses, sums)), (of_params, jax.tree.map(lambda x: join(x, 1, blocks), of_inputs))

    def backward(gradients, cotangents):
        return jax.tree.map(lambda gradient: (cotangents[0] * gradient).astype(gradient.dtype), gradients)

    loss_of.defvjp(with_gradients, backward)
    return loss_of(forward.params, forward.inputs)


def scan_sum(function: Callable[..., Any], parts: Any) -> Any:
    """The sum of function(*part), in float32, one after the other; `parts` has them along axis 0 of every array."""

    def add(total, part):
        return jax.tree.map(jnp.add, total, function(*part)), None

    first = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], parts))
    return jax.lax.scan(add, zeros_of(first), parts)[0]


def zeros_of(tree: Any) -> Any:
    """Zeros in the shapes of a tree of arrays, in float32 where their type is a smaller one."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), tree)
