"""The rank of a head's correction: blocks of a training that are cut to smaller ranks, and a head cut for good.

A head that was trained with nested ranks (train.rank_scales) is a drafter at each of them: the first r numbers of every
code and the first r rows of its last matrix are the head of rank r. docs/heads.md has the method and its sources.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.method.config import DrafterConfig
from domino_jax.runtime.errors import DominoError

NO_ROW = 2**32 - 1  # folded into the key before a row's id: no row has it, so the draw is not that of the anchors
NO_RANK = -1


def sample_ranks(key: jax.Array, row_ids: jax.Array, blocks: int, ranks: tuple[int, ...]) -> jax.Array:
    """int32 [B, A]: for each of A blocks of a row one of `ranks`, all equally likely.

    The key is folded with the row's id, as for anchors, so a row gets the same ranks whatever the batch or mesh is.

    Args:
        key: the step's key.  row_ids: int32 [B].  blocks: A.
    """
    key = jax.random.fold_in(key, jnp.uint32(NO_ROW))
    drawn = jax.vmap(lambda row: jax.random.randint(jax.random.fold_in(key, row), (blocks,), 0, len(ranks)))(row_ids)
    return jnp.asarray(ranks, jnp.int32)[drawn]


def kept_ranks(ranks: jax.Array, rank: int) -> jax.Array:
    """bool [..., E]: which of the E = rank numbers of a code remain of blocks cut to `ranks` int32 [...]."""
    return jnp.arange(rank) < ranks[..., None]


def with_head_rank(config: Any, rank: int, name: str = "decode.head_rank") -> Any:
    """The config of a drafter of any kind with its head cut to `rank`; 0: as it is.

    name: of the value, for the message.

    Raises:
        DominoError: a rank that the head does not have.
    """
    largest = config.head_rank if config.has_backbone else 0
    if rank and not largest:
        raise DominoError(f"{name} is {rank}, but this drafter ({config.head}) has no head with a rank; set it to 0.")
    if not 0 <= rank <= largest:
        raise DominoError(
            f"{name} is {rank}, but this drafter's head has rank {largest}; give at most that, or 0 for all of it."
        )
    return dataclasses.replace(config, **{config.rank_key: rank}) if rank else config


def cut_head(config: Any, params: dict, rank: int, name: str = "decode.head_rank") -> tuple[Any, dict]:
    """A drafter with its head cut to `rank` (0: as it is): the smaller config, and the parameters without the rest.

    Args:
        params: of any type that numpy indexes.  name: as for with_head_rank, which also says what is raised.
    """
    smaller = with_head_rank(config, rank, name)
    if smaller == config:
        return config, params
    axes = rank_axes(config)

    def cut(path: tuple, leaf: Any) -> Any:
        for axis, ranks in enumerate(axes.get(tuple(key.key for key in path), ())):
            if ranks is not None:
                leaf = leaf[(slice(None),) * axis + (_places(ranks, rank),)]
        return leaf

    return smaller, {**params, "head": jax.tree_util.tree_map_with_path(cut, params["head"])}


def _places(ranks: np.ndarray, rank: int) -> np.ndarray | slice:
    """The places below `rank`; a slice, which copies less, where they are the first ones."""
    places = np.flatnonzero(ranks < rank)
    return slice(len(places)) if places[-1] + 1 == len(places) else places


def rank_axes(config: DrafterConfig) -> dict[tuple[str, str], tuple[np.ndarray | None, ...]]:
    """For each parameter of the head that has ranks, by axis the rank of each place: NO_RANK where a place belongs to
    another input, None for an axis without ranks."""
    ranks, width = np.arange(config.head_rank), np.full(config.hidden_size, NO_RANK)
    return {("up", "kernel"): (ranks, None), **config.head_ranks(ranks, width)}
