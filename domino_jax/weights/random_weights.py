"""Models without weights: the speed of a shape on a device where no checkpoint is (decode.simulate_tau).

A folder with config.json alone is enough for the target. Its weights are drawn at random, so the text means nothing;
the time of a pass does not depend on what the weights are.
"""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.method.drafter import init_drafter_params, rows_together
from domino_jax.method.kinds import AnyConfig, new_drafter
from domino_jax.method.pair import Models
from domino_jax.models.layers import INIT_STD
from domino_jax.models.qwen3 import Qwen3
from domino_jax.weights import hf
from domino_jax.weights.loading import LoadedTarget, load_target
from domino_jax.weights.target import Sharding, read_target_config

PROMPT_TOKENS = 128  # of a made-up prompt, where none are given

log = logging.getLogger(__name__)


def target_or_random(path: str, dtype: str, sharding: Sharding = None, allowed: bool = True) -> LoadedTarget:
    """The target of a folder or hub id; with random weights when the folder holds none and that is `allowed`."""
    folder = hf.resolve_folder(path)
    if not allowed or any(folder.glob("*.safetensors")):
        return load_target(path, dtype, sharding)
    model = Qwen3(read_target_config(folder), np.dtype(dtype))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    log.warning("%s holds no weights: they are drawn at random, for timing alone.", path)
    return LoadedTarget(str(path), model, random_params(shapes, dtype, sharding), hf.load_tokenizer(folder), ())


def random_drafter(loaded: LoadedTarget, config: AnyConfig, sharding: Sharding = None) -> Models:
    """The target with a drafter of `config` and random weights."""
    drafter = new_drafter(config, np.dtype(loaded.model.dtype), whole_head=sharding is not None)
    shapes = jax.eval_shape(lambda: init_drafter_params(drafter, jax.random.key(0)))
    params = random_params(shapes, loaded.model.dtype, sharding)
    return Models(loaded.model, loaded.params, drafter, rows_together(params))


def random_params(shapes: Any, dtype: Any, sharding: Sharding = None) -> Any:
    """Normal matrices at the scale of an untrained model, ones for vectors, each drawn on its own device.

    Args:
        shapes: a parameter tree whose leaves have a .shape.
    """
    dtype = np.dtype(dtype)
    # One program for all leaves of a shape: a tree of layers repeats a dozen shapes.
    programs = {}

    def draw(number: int, path: tuple, shape: tuple[int, ...]) -> jax.Array:
        place = sharding([part.key for part in path], shape) if sharding else None
        if (shape, place) not in programs:
            programs[shape, place] = jax.jit(functools.partial(_drawn, shape, dtype), out_shardings=place)
        return programs[shape, place](jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), number))

    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    return jax.tree.unflatten(tree, [draw(number, path, leaf.shape) for number, (path, leaf) in enumerate(leaves)])


def _drawn(shape: tuple[int, ...], dtype: np.dtype, key: jax.Array) -> jax.Array:
    return jnp.ones(shape, dtype) if len(shape) == 1 else (INIT_STD * jax.random.normal(key, shape)).astype(dtype)


def made_up_prompts(count: int, vocab: int, length: int = PROMPT_TOKENS) -> list[dict[str, Any]]:
    """Prompt rows of random token ids, the same in every run."""
    draw = np.random.default_rng(0)
    return [{"id": str(row), "token_ids": draw.integers(0, vocab, length).tolist()} for row in range(count)]
