"""A new head is one file and one line of drafters.py: here one that attends to the tokens of its block, with keys and
values as its state and a parameter beside its modules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from configs import qwen3
from domino_jax.method import drafters
from domino_jax.method.config import LAMBDA_KEYS, DrafterConfig
from domino_jax.method.fields import field
from domino_jax.method.head import Head
from domino_jax.method.pair import Pair
from domino_jax.method.settings import TreeSettings
from domino_jax.models.layers import Linear
from domino_jax.recipe import rules
from domino_jax.weights.drafter import load_drafter, save_drafter, stored_head
from tests.helpers.decoding_models import make_generator, random_prompts, random_target, texts
from tests.helpers.recipes import train_recipe

pytestmark = pytest.mark.long


class MemoryHead(Head):
    def setup(self):
        rank = self.config.rank
        self.predecessor, self.up = self.token_table(rank), self.last_matrix()
        self.query = Linear(rank, dtype=self.dtype)
        self.factors = self.param("factors", nn.initializers.ones, (2, rank))  # of keys and of values

    def initial_state(self, *batch):
        """Keys and values [*batch, 2, G, E], and how many there are [*batch]."""
        return jnp.zeros((*batch, 2, self.config.block_size, self.config.rank)), jnp.zeros(batch)

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
class MemoryConfig(DrafterConfig):
    rank: int = field(least=1, recipe=1, shape=True)

    head, title, architecture = "memory", "Memory", "MemoryDraftModel"
    known_by, module = ("MemoryDraftModel",), MemoryHead
    tensor_names = {"backbone.": "", "head.": "memory."}
    reads = (*DrafterConfig.reads, *LAMBDA_KEYS)


def test_a_new_head_trains_decodes_losslessly_and_is_saved_and_loaded(monkeypatch, tmp_path):
    monkeypatch.setitem(drafters.CONFIGS, "memory", MemoryConfig)
    target, target_params = random_target()
    recipe = qwen3.get_config("target")
    recipe.drafter.update({"head": "memory", "num_layers": 1, "target_layer_ids": (0,), "block_size": 4})
    recipe.drafter.shift_label, recipe.drafter.memory.rank, recipe.train.num_anchors = True, 6, 4
    rules.check(recipe, "dry_run", {"drafter.head", "drafter.memory.rank"})
    drafter, before, state, losses = train_recipe(recipe, target, target_params, steps=3)
    assert drafter.config.rank == 6 and losses[2] < losses[0]
    changes = jax.tree.map(lambda old, new: abs(old - new).max(), before["head"], jax.device_get(state.params["head"]))
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

    save_drafter(tmp_path, drafter.config, jax.device_get(state.params), "float32")
    assert stored_head(tmp_path) == "memory"
    again, params = load_drafter(tmp_path, target.config, np.float32)
    assert again.to_dict() == drafter.config.to_dict() and type(again) is MemoryConfig
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(state.params))
