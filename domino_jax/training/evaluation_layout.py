"""Where an evaluation's weights are placed: a layout made for decoding, on the devices of the training mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from domino_jax.method.drafter import rows_together
from domino_jax.method.kinds import AnyDrafter
from domino_jax.models import sharding
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.weights.drafter import EXPORT_DTYPE


class EvaluationLayout:
    """Tensor parallel copies of the target and of a drafter, for the time of an evaluation.

    Args:
        mesh: the training mesh.
    """

    def __init__(self, mesh: Mesh, target: Qwen3Config, drafter: AnyDrafter):
        config = drafter.config
        self.mesh = sharding.decoding_view(mesh, (target.num_key_value_heads, config.num_key_value_heads))
        # What has no place in decoding (slices, recomputation) changes nothing there.
        self.drafter = drafter.clone(whole_head=self.mesh.size > 1) if config.has_backbone else drafter
        tied = target.tie_word_embeddings
        self._target = sharding.decode_placement(self.mesh, target.num_key_value_heads, tied)
        self._drafter = sharding.decode_placement(self.mesh, config.num_key_value_heads, tied)

    def target_params(self, params: Any) -> Any:
        """The target's parameters placed for decoding; leaves that are there already are not copied.

        Args:
            params: arrays, or shapes with their shardings, which give shapes.
        """
        return _moved(params, self._target, None)

    def drafter_params(self, params: Any) -> Any:
        """The same for the drafter's, float32, rounded as in an export; matrices in the type of their products."""
        return rows_together(_moved(params, self._drafter, np.dtype(self.drafter.dtype)))


def _moved(params: Any, place: Callable, matrices: np.dtype | None) -> Any:
    def one(path: tuple, leaf: Any) -> Any:
        # Scales of norms enter float32 sums, so they keep their type.
        dtype = leaf.dtype if matrices is None or leaf.ndim < 2 else matrices
        where = place([part.key for part in path], leaf.shape)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=where)
        rounded = matrices is not None
        if not rounded and leaf.sharding.is_equivalent_to(where, leaf.ndim):
            return leaf
        # One at a time, so that at most one gathered matrix is in memory. Programs with collectives that are in flight
        # together can also run in another order on each CPU device, and then several processes wait for each other.
        return jax.block_until_ready(mover(where, dtype, rounded)(leaf))

    return jax.tree_util.tree_map_with_path(one, params)


@functools.lru_cache(maxsize=256)
def mover(where: NamedSharding, dtype: np.dtype, rounded: bool) -> Callable[[jax.Array], jax.Array]:
    """A jitted copy of an array to another place and type; over several processes, too. rounded: to EXPORT_DTYPE."""
    bits = jnp.finfo(EXPORT_DTYPE if rounded else dtype)  # XLA may leave out a cast to bfloat16 and back
    return jax.jit(
        lambda leaf: jax.lax.reduce_precision(leaf, bits.nexp, bits.nmant).astype(dtype), out_shardings=where
    )
