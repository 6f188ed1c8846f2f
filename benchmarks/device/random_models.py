"""Models of public shapes with random weights, made on the device, and states of decoding in mid-answer.

Timings need no checkpoint: what a pass costs does not depend on what the weights are. The texts mean nothing.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.decoding.generate import Generator
from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.drafters import CONFIGS, new_drafter
from domino_jax.method.loop import DecodeState, Prompts
from domino_jax.method.pair import Pair
from domino_jax.method.sampling import request_keys
from domino_jax.models.layers import INIT_STD
from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from domino_jax.weights.loading import rows_together
from domino_jax.weights.quantization import Scheme
from domino_jax.weights.target import Sharding, read_target_config, target_shapes

QUANTIZED_STD = 32.0  # of values in eight bits, before they are scaled
ASSETS = pathlib.Path(__file__).resolve().parents[2] / "assets"
# For tests: every part is there, FP8 tiles of 128 × 128 as well, and its programs compile in a moment.
SMALL = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}


def target_config(size: str) -> Qwen3Config:
    """A public size ("0.6b" to "32b"), of assets/tiny_qwen3 ("tiny"), or three narrow layers ("small")."""
    if size == "small":
        return Qwen3Config.from_dict(SMALL)
    return read_target_config(ASSETS / ("tiny_qwen3" if size == "tiny" else f"qwen3_configs/{size}"))


def drafter_config(
    target: Qwen3Config, layers: int, block_size: int = 16, head: tuple[int, int] | None = (256, 1024)
) -> DrafterConfig:
    """A Domino drafter with ranks E and U of its head; without a head a plain DFlash drafter."""
    shape = {"pure_draft_prefix_len": 1, "emb_dim": head[0], "gru_hidden_dim": head[1]} if head else {}
    return CONFIGS["domino" if head else "none"].for_target(
        target,
        num_layers=layers,
        block_size=block_size,
        shift_label=bool(head),
        **shape,
    )


def decoding_models(size: str, dtype: str, layers: int, head: tuple[int, int], scheme: Scheme | None = None) -> Pair:
    """Random target and drafter on this process' first device. scheme: of a target in eight bits."""
    target = Qwen3(target_config(size), np.dtype(dtype))
    params = random_params(target_shapes(target.config, dtype, scheme), dtype)
    drafter = new_drafter(drafter_config(target.config, layers, head=head), target.dtype)
    shapes = jax.eval_shape(lambda: init_drafter_params(drafter, jax.random.key(0)))
    return Pair(target, params, drafter, rows_together(random_params(shapes, dtype)))


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


def state_of(models: Pair, generator: Generator, rows: int, slots: int, length: int) -> DecodeState:
    """`rows` requests with `length` committed tokens each, in random caches of `slots` slots: no prefill to compile."""
    column = jax.ShapeDtypeStruct((rows,), jnp.int32)
    keys = request_keys(0, jnp.arange(rows))
    prompts = Prompts(jax.ShapeDtypeStruct((rows, 16), jnp.int32), column, column, keys)
    shapes = jax.eval_shape(functools.partial(generator.prefill, slots=slots), models, prompts, generator.stop_ids)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.replace(target_cache=(), keys=None))
    target_cache, draft_cache = random_params((shapes.target_cache, shapes.draft_cache), models.target.dtype)
    return zeros.replace(
        target_cache=target_cache,
        draft_cache=draft_cache,
        keys=keys,
        lengths=jnp.full(rows, length, jnp.int32),
        limits=jnp.full(rows, generator.settings.max_new_tokens, jnp.int32),
    )
