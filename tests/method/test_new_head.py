"""A new head is one file and one line of drafters.py: here a bias on the logits, the same at every slot, and a head
that attends to the tokens of its block, with keys and values as its state and a parameter beside its modules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from configs import qwen3
from domino_jax.method import drafters
from domino_jax.method.config import CURRICULUM, DrafterConfig
from domino_jax.method.fields import field
from domino_jax.method.head import Head
from domino_jax.method.losses import Loss
from domino_jax.method.optimizer import learning_rate, make_optimizer
from domino_jax.method.pair import Pair
from domino_jax.method.settings import TreeSettings
from domino_jax.method.state import init_state
from domino_jax.method.step import make_train_step
from domino_jax.models.layers import Linear
from domino_jax.recipe import rules
from domino_jax.recipe.builders import drafter_config_of
from domino_jax.weights.drafter import load_drafter, save_drafter, stored_head
from tests.helpers.decoding_models import make_generator, random_prompts, random_target, texts
from tests.helpers.models import random_tokens

pytestmark = pytest.mark.long


class BiasHead(Head):
    def setup(self):
        self.up = self.last_matrix()

    def z_terms(self, z):
        return jnp.ones((*z.shape[:-1], self.config.bias_rank), self.dtype)

    def step(self, state, x, z_terms):
        return (), jnp.broadcast_to(z_terms, (*x.shape, self.config.bias_rank))

    def codes(self, z_terms, x):
        return z_terms


@dataclasses.dataclass(frozen=True)
class BiasConfig(DrafterConfig):
    """bias_rank: the bias is the sum of this many rows."""

    bias_rank: int = field(least=1, recipe=1, shape=True)

    head, title, architecture = "bias", "Bias", "BiasDraftModel"
    known_by, module = ("BiasDraftModel",), BiasHead
    tensor_names = {"backbone.": "", "head.up": "bias"}
    reads = (*DrafterConfig.reads, *CURRICULUM)


class MemoryHead(Head):
    def setup(self):
        rank = self.config.bias_rank
        self.predecessor, self.up = self.token_table(rank), self.last_matrix()
        self.query = Linear(rank, dtype=self.dtype)
        self.factors = self.param("factors", nn.initializers.ones, (2, rank))  # of keys and of values

    def initial_state(self, *batch):
        """Keys and values [*batch, 2, G, E], and how many there are [*batch]."""
        return jnp.zeros((*batch, 2, self.config.block_size, self.config.bias_rank)), jnp.zeros(batch)

    def z_terms(self, z):
        return self.query(z)

    def step(self, state, x, z_terms):
        (memory, count), places = state, jnp.arange(self.config.block_size)
        placed = (places == count[..., None])[..., None, :, None]
        memory += placed * self._pairs(x)[..., :, None, :]
        return (memory, count + 1), self._attend(z_terms, memory, places <= count[..., None])

    def codes(self, z_terms, x):
        memory = self._pairs(x).swapaxes(1, 2)[:, None]
        return self._attend(z_terms, memory, jnp.tri(x.shape[1], dtype=bool))

    def _pairs(self, x):
        return self.look_up(x)[..., None, :] * self.factors

    def _attend(self, query, memory, readable):
        keys, values = memory[..., 0, :, :], memory[..., 1, :, :]
        scores = jnp.where(readable, jnp.einsum("...e,...se->...s", query, keys), -jnp.inf)
        return jnp.einsum("...s,...se->...e", jax.nn.softmax(scores), values)


@dataclasses.dataclass(frozen=True)
class MemoryConfig(BiasConfig):
    head, title, architecture = "memory", "Memory", "MemoryDraftModel"
    known_by, module = ("MemoryDraftModel",), MemoryHead
    tensor_names = {"backbone.": "", "head.": "memory."}


@pytest.mark.parametrize("kind", [BiasConfig, MemoryConfig], ids=lambda kind: kind.head)
def test_a_new_head_trains_decodes_losslessly_and_is_saved_and_loaded(kind, monkeypatch, tmp_path):
    monkeypatch.setitem(drafters.CONFIGS, kind.head, kind)
    target, target_params = random_target()
    recipe = qwen3.get_config("target")
    recipe.drafter.update({"head": kind.head, "num_layers": 1, "target_layer_ids": (0,), "block_size": 4})
    recipe.drafter.shift_label = True
    recipe.drafter[kind.head].bias_rank = 6
    rules.check(recipe, "dry_run", {"drafter.head", f"drafter.{kind.head}.bias_rank"})
    config = drafter_config_of(recipe, target.config)
    assert config.bias_rank == 6
    drafter = drafters.new_drafter(config)
    optimizer = make_optimizer("adamw")
    state = jax.jit(lambda key: init_state(drafter, optimizer, key))(jax.random.key(0))
    before = jax.device_get(state.params["head"])
    step = make_train_step(
        target,
        drafter,
        optimizer,
        num_anchors=4,
        learning_rate=learning_rate(1e-2, 3, 0.0),
        curriculum=lambda step: 0.0,
        loss=Loss(),
    )
    tokens = random_tokens((2, 16), vocab=target.config.vocab_size - 1)
    batch = {"tokens": tokens, "loss_mask": jnp.ones(tokens.shape), "row_ids": jnp.arange(2, dtype=jnp.int32)}
    losses = []
    for _ in range(3):
        state, metrics = step(state, target_params, batch, jax.random.key(1))
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]
    changes = jax.tree.map(lambda old, new: abs(old - new).max(), before, jax.device_get(state.params["head"]))
    assert min(jax.tree.leaves(changes)) > 0

    models = Pair(target, target_params, drafter, state.params)
    generator = make_generator(models, tree=TreeSettings(nodes=6, lanes=2, candidates=4))
    prompts = random_prompts(2)
    plain = texts(generator.generate(prompts, "autoregressive"))
    assert [texts(generator.generate(prompts, mode)) for mode in ("draft", "tree")] == [plain, plain]

    block, known = jax.random.normal(jax.random.key(2), (2, 4, 32)), jnp.arange(8).reshape(2, 4)
    z_terms, head, codes = models.head.z_terms(block), models.head.initial_state(2), []
    for slot in range(4):
        head, code = models.head.step(head, known[:, slot], z_terms[:, slot])
        codes.append(code)
    np.testing.assert_allclose(jnp.stack(codes, 1), models.head.codes(z_terms, known), rtol=1e-5, atol=1e-6)

    save_drafter(tmp_path, config, jax.device_get(state.params), "float32")
    assert stored_head(tmp_path) == kind.head
    again, params = load_drafter(tmp_path, target.config, np.float32)
    assert again.to_dict() == config.to_dict() and type(again) is kind
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(state.params))
