"""Weights drawn at random, to time a shape on a device where no checkpoint is (benchmarks/device).

The texts mean nothing; the time of a pass does not depend on what the weights are.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.method.drafter import init_drafter_params, rows_together
from domino_jax.method.drafters import AnyConfig, new_drafter
from domino_jax.method.pair import Pair
from domino_jax.method.settings import DraftSettings
from domino_jax.models.layers import INIT_STD
from domino_jax.weights.loading import LoadedTarget, in_draft_type
from domino_jax.weights.target import Sharding

QUANTIZED_STD = 32.0  # of values in eight bits, before they are scaled


def random_drafter(
    loaded: LoadedTarget, config: AnyConfig, sharding: Sharding = None, drafting: DraftSettings | None = None
) -> Pair:
    """The target with a drafter of `config` and random weights. drafting: for draft_weights; None: the default."""
    drafter = new_drafter(config, np.dtype(loaded.model.dtype), whole_head=sharding is not None)
    shapes = jax.eval_shape(lambda: init_drafter_params(drafter, jax.random.key(0)))
    params = random_params(shapes, loaded.model.dtype, sharding)
    params = in_draft_type(config, params, loaded.model.config, loaded.params, drafting)
    return Pair(loaded.model, loaded.params, drafter, rows_together(params))


def random_params(shapes: Any, dtype: Any, sharding: Sharding = None) -> Any:
    """Normal matrices at the scale of an untrained model, ones for vectors, each drawn on its own device.

    shapes: a parameter tree whose leaves have a .shape, and a .dtype where matrices are in eight bits.
    """

    @functools.cache  # one program for all leaves of a shape: a tree of layers repeats a dozen shapes
    def program(shape: tuple[int, ...], dtype: np.dtype, kind: str, place: Any) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(functools.partial(_draw, shape, dtype, kind), out_shardings=place)

    def draw(number: int, path: tuple, leaf: Any) -> jax.Array:
        names, shape = [part.key if isinstance(part, jax.tree_util.DictKey) else None for part in path], leaf.shape
        kind = names[-1] if names[-1] in ("q", "scale") and len(shape) > 1 else "floating"
        leaf_dtype = np.dtype(dtype) if kind == "floating" else leaf.dtype
        place = sharding(names, shape) if sharding else None
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), number)
        return program(shape, leaf_dtype, kind, place)(key)

    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    return jax.tree.unflatten(tree, [draw(number, path, leaf) for number, (path, leaf) in enumerate(leaves)])


def _draw(shape: tuple[int, ...], dtype: np.dtype, kind: str, key: jax.Array) -> jax.Array:
    if kind == "scale":
        return jnp.full(shape, INIT_STD / QUANTIZED_STD, dtype)
    std = QUANTIZED_STD if kind == "q" else INIT_STD
    return jnp.ones(shape, dtype) if len(shape) == 1 else (std * jax.random.normal(key, shape)).astype(dtype)
