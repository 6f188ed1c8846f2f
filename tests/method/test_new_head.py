"""A new head is one file and one line of kinds.KINDS: here a bias on the logits, the same at every slot."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import qwen3
from domino_jax.method import kinds
from domino_jax.method.config import DrafterConfig
from domino_jax.method.head import Head
from domino_jax.method.losses import LossSettings
from domino_jax.method.optimizer import learning_rate, make_optimizer
from domino_jax.method.pair import Models
from domino_jax.method.settings import TreeSettings
from domino_jax.method.state import init_state
from domino_jax.method.step import make_train_step
from domino_jax.recipe import rules
from domino_jax.recipe.builders import drafter_config_of
from domino_jax.runtime.keys import Key
from domino_jax.weights.drafter import load_drafter, save_drafter, stored_head
from tests.helpers.decoding_models import make_generator, random_prompts, random_target, texts
from tests.helpers.models import random_tokens


@dataclasses.dataclass(frozen=True)
class BiasConfig(DrafterConfig):
    """bias_rank: the bias is the sum of this many rows."""

    bias_rank: int = 1

    head, title, architecture = "bias", "Bias", "BiasDraftModel"
    has_head, rank_key = True, "bias_rank"
    tensor_names = {"backbone.": "", "head.up": "bias"}
    recipe_keys = {"bias_rank": Key(1, least=1, shape=True)}

    @classmethod
    def matches(cls, raw, tensors):
        return cls.architecture in str(raw.get("architectures"))

    def head_module(self, dtype, whole):
        return BiasHead(self, dtype, whole)


class BiasHead(Head):
    def setup(self):
        self.up = self.last_matrix()

    def hidden_half(self, z):
        return jnp.ones((*z.shape[:-1], self.config.bias_rank), self.dtype)

    def step(self, state, x, half):
        return (), jnp.broadcast_to(half, (*x.shape, self.config.bias_rank))

    def codes_after(self, half, x):
        return half


@pytest.fixture
def bias_head(monkeypatch):
    monkeypatch.setitem(kinds.KINDS, "bias", BiasConfig)


def test_a_new_head_trains_decodes_losslessly_and_is_saved_and_loaded(bias_head, tmp_path):
    target, target_params = random_target()
    recipe = qwen3.get_config("target")
    recipe.drafter.update({"head": "bias", "num_layers": 1, "target_layer_ids": (0,), "block_size": 4})
    recipe.drafter.shift_label = True
    rules.check(recipe, "dry_run", {"drafter.head", "drafter.bias.bias_rank"})
    config = drafter_config_of(recipe, target.config)
    assert config.bias_rank == recipe.drafter.bias.bias_rank == 1
    drafter = kinds.new_drafter(config)
    optimizer = make_optimizer("adamw")
    state = jax.jit(lambda key: init_state(drafter, optimizer, key))(jax.random.key(0))
    before = np.asarray(state.params["head"]["up"]["kernel"])
    step = make_train_step(
        target,
        drafter,
        optimizer,
        num_anchors=4,
        learning_rate=learning_rate(1e-2, 3, 0.0),
        curriculum=lambda step: 0.0,
        settings=LossSettings(),
    )
    tokens = random_tokens((2, 16), vocab=target.config.vocab_size - 1)
    batch = {"tokens": tokens, "loss_mask": jnp.ones(tokens.shape), "row_ids": jnp.arange(2, dtype=jnp.int32)}
    losses = []
    for _ in range(3):
        state, metrics = step(state, target_params, batch, jax.random.key(1))
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0] and abs(np.asarray(state.params["head"]["up"]["kernel"]) - before).max() > 0

    models = Models(target, target_params, drafter, state.params)
    generator = make_generator(models, tree=TreeSettings(nodes=6, lanes=2, candidates=4))
    prompts = random_prompts(2)
    plain = texts(generator.generate(prompts, "autoregressive"))
    assert [texts(generator.generate(prompts, mode)) for mode in ("draft", "tree")] == [plain, plain]

    save_drafter(tmp_path, config, jax.device_get(state.params), "float32")
    assert stored_head(tmp_path) == "bias"
    again, params = load_drafter(tmp_path, target.config, np.float32)
    assert again.to_dict() == config.to_dict() and isinstance(again, BiasConfig)
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(state.params))
