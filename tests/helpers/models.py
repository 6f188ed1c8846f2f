"""Tiny random models and the golden models, built once per process and shared by the tests."""

import functools
import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from domino_jax.method import blocks
from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafter import Drafter, init_drafter_params
from domino_jax.method.drafters import CONFIGS, new_drafter
from domino_jax.method.losses import Loss
from domino_jax.method.pair import Pair
from domino_jax.method.step import Blocks, correct_logits, drafter_loss, target_pass
from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from domino_jax.weights.drafter import drafter_table, load_drafter
from domino_jax.weights.target import load_target
from tests.helpers.paths import GOLDEN

GOLDEN_SETS = ("tied_shift", "untied_noshift")  # of the Domino head
MARKOV_SETS = ("markov_vanilla", "markov_gated", "markov_rnn")

TARGET_FIELDS = {
    "model_type": "qwen3",
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # not hidden_size / num_attention_heads
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
MASK_TOKEN = 79


class Model(NamedTuple):
    """A target or a drafter: its config, its Flax module, its float32 parameters."""

    config: Any
    module: Any
    params: dict


def random_params(shapes: Any, seed: int) -> dict:
    """Parameters that make every part matter: kernels of unit gain, norms near but not at one, biases not zero."""
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        noise = rng.standard_normal(leaf.shape, dtype=np.float32)
        name = path[-1].key
        if name == "scale":
            return jnp.asarray(1.0 + 0.2 * noise)
        if name == "embedding":
            return jnp.asarray(0.5 * noise)
        return jnp.asarray(noise * (leaf.shape[0] ** -0.5 if leaf.ndim > 1 else 0.3))

    return jax.tree_util.tree_map_with_path(fill, shapes)


@functools.lru_cache
def tiny_target(tied: bool = True, attention_bias: bool = False, seed: int = 1) -> Model:
    """A random Qwen3 target: 3 layers, 32 wide, 80 tokens, head_dim 12, two query heads per key/value head."""
    fields = {**TARGET_FIELDS, "tie_word_embeddings": tied, "attention_bias": attention_bias}
    return random_target(Qwen3Config.from_dict(fields), seed)


def random_target(config: Qwen3Config, seed: int = 1) -> Model:
    """A random Qwen3 target of any config."""
    module = Qwen3(config)
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    return Model(config, module, random_params(shapes, seed))


@functools.lru_cache
def tiny_drafter(
    target_config: Qwen3Config,
    shift_label: bool = True,
    prefix: int = 1,
    *,
    head: str = "domino",
    layers: int = 2,
    **choices: Any,
) -> Model:
    """A random drafter for a tiny target. choices: of DrafterConfig.for_target."""
    sizes = {
        "none": {},
        "domino": {"pure_draft_prefix_len": prefix, "emb_dim": 6, "gru_hidden_dim": 10},
        "markov": {"markov_rank": 6, "markov_head_type": "vanilla"},
        "dflash2": {"selector_rank": 6, "selector_top_k": 5, "conv_kernel_size": 2, "conv_group_size": 8},
        "xpress": {"xpress_rank": 6, "xpress_mlp_hidden": 10, "xpress_num_passes": 2},
    }
    config = CONFIGS[head].for_target(
        target_config,
        num_layers=layers,
        mask_token_id=target_config.vocab_size - 1,
        shift_label=shift_label,
        **{"target_layer_ids": (0, 1), "block_size": 4, **sizes[head], **choices},
    )
    module = Drafter(config)
    shapes = jax.eval_shape(lambda: init_drafter_params(module, jax.random.key(0)))
    return Model(config, module, random_params(shapes, seed=2))


def by_stored_name(config: DrafterConfig, tree: dict) -> dict[str, np.ndarray]:
    """A drafter's gradients (or parameters) by the names and in the layout of its file."""
    stored = {}
    for entry in drafter_table(config):
        leaf = tree
        for part in entry.path:
            leaf = leaf[part]
        stored[entry.name] = leaf.T if entry.transpose else leaf
    return stored


def random_tokens(shape: tuple[int, ...], seed: int = 0, vocab: int = MASK_TOKEN) -> jax.Array:
    """int32 tokens below the mask token."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab, shape), jnp.int32)


class _ById:
    """A model as a key of lru_cache: equal only to itself."""

    def __init__(self, model: Model):
        self.model = model

    def __hash__(self):
        return id(self.model.params)

    def __eq__(self, other):
        return self.model.params is other.model.params


@functools.lru_cache
def _features(target: _ById, layer_ids: tuple[int, ...]):
    """Jitted tokens → features of the tapped layers."""
    module, params = target.model.module, target.model.params
    return jax.jit(lambda tokens: target_pass(module, params, {"tokens": tokens}, layer_ids)[0])


@functools.lru_cache
def _teacher_forced(target: _ById, drafter: _ById):
    """Jitted (drafter params, features, tokens, anchors, keep) → {"z", "base", "final"} of the training path."""
    target, drafter = target.model, drafter.model
    c = drafter.config

    def run_target(*args, method):
        return target.module.apply({"params": target.params}, *args, method=method)

    @jax.jit
    def forward(params, features, tokens, anchors, keep):
        x = run_target(blocks.block_tokens(tokens, anchors, keep, c.block_size, c.mask_token_id), method="embed")
        inputs = blocks.head_tokens(tokens, anchors, c.num_drafts, c.extra_slots)
        if c.reads_embeddings:
            inputs = run_target(inputs, method="embed")
        z, codes = drafter.module.apply({"params": params}, features, x, anchors, keep, inputs)
        base = run_target(z, method="unembed")
        return {"z": z, "base": base, "final": correct_logits(drafter.module, params, base, codes)}

    return forward


def run_blocks(target: Model, drafter: Model, tokens, anchors, keep=None, params=None) -> dict[str, np.ndarray]:
    """The teacher-forced forward of the training path, as numpy arrays: features, z, base, final.

    Compiled once per pair of models and shape, so tests share shapes where they can.
    """
    tokens, anchors = jnp.asarray(tokens, jnp.int32), jnp.asarray(anchors, jnp.int32)
    keep = jnp.ones(anchors.shape, bool) if keep is None else jnp.asarray(keep, bool)
    features = _features(_ById(target), drafter.config.target_layer_ids)(tokens)
    forward = _teacher_forced(_ById(target), _ById(drafter))
    out = forward(drafter.params if params is None else params, features, tokens, anchors, keep)
    return jax.device_get(out | {"features": features})


def loss_and_metrics(models: Pair, features, batch, drawn: Blocks, loss: Loss, share):
    """(loss, metrics) of a whole batch, as jax.value_and_grad(has_aux=True) wants them."""
    loss = loss.at(share, drawn.labels)
    value, sums = drafter_loss(models.drafter_params, models, features, batch, drawn, loss)
    return value, loss.metrics(sums)


class Golden(NamedTuple):
    """One golden set: the models, the arrays of golden.safetensors, the figures of golden.json."""

    target: Model
    drafter: Model
    arrays: dict[str, np.ndarray]
    figures: dict[str, Any]


def reference_accept_lengths(row: dict[str, Any]) -> list[int]:
    """The lengths of a generation in golden.json, the last one cut to the tokens that remain, as ours is."""
    *earlier, last = row["accept_lengths"]
    return [*earlier, min(last, row["max_new_tokens"] - 1 - sum(earlier))]


@functools.lru_cache
def load_golden(name: str) -> Golden:
    """Reads tests/golden/<name>; a missing file is an error."""
    folder = GOLDEN / name
    figures = json.loads((folder / "golden.json").read_text())
    own = figures["target"] if "target" in figures else "target"  # the sets of one target share its folder
    target_config, target_params = load_target((folder / own).resolve(), jnp.float32)
    drafter_config, drafter_params = load_drafter(folder / "drafter", target_config, jnp.float32)
    return Golden(
        Model(target_config, Qwen3(target_config), target_params),
        Model(drafter_config, new_drafter(drafter_config), drafter_params),
        load_file(folder / "golden.safetensors"),
        figures,
    )


def rewrite_tensors(folder: pathlib.Path, changes: dict) -> None:
    """Applies {name: array → array} to tensors of a folder's model.safetensors."""
    path = pathlib.Path(folder) / "model.safetensors"
    tensors = load_file(path)
    for name, change in changes.items():
        tensors[name] = np.asarray(change(tensors[name]), order="C")
    save_file(tensors, path, {"format": "pt"})
