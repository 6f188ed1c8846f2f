"""train.head_from: a head's tables of tokens of a drafter for another target, trained on or left as they are."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.head import TOKEN_TABLES
from domino_jax.method.heads.markov import MarkovSettings
from domino_jax.method.optimizer import make_optimizer
from domino_jax.method.state import init_state
from domino_jax.method.step import make_train_step
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.recipe.builders import with_stored_weights
from domino_jax.runtime.errors import DataError
from domino_jax.weights.drafter import save_drafter
from tests.helpers.models import TARGET_FIELDS, random_target, random_tokens, tiny_drafter, tiny_target

HEADS = {
    "markov": {"head": "markov", "markov_head_type": "vanilla", "enable_confidence_head": True},
    "dflash2": {"head": "dflash2", "shift_label": False},
    "xpress": {"head": "xpress", "shift_label": False},
}


@functools.lru_cache
def narrow_target():
    """Another target over the same 80 tokens: two layers, 16 wide."""
    fields = {**TARGET_FIELDS, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 8}
    return random_target(Qwen3Config.from_dict({**fields, "num_key_value_heads": 1}), seed=4)


def narrow_drafter(head="markov", **choices):
    return tiny_drafter(narrow_target().config, layers=1, **HEADS[head], **choices)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By head the folder of a drafter of the wide target."""
    made = {}
    for head, choices in HEADS.items():
        made[head] = tmp_path_factory.mktemp(head)
        config, _, params = tiny_drafter(tiny_target().config, layers=1, **choices)
        save_drafter(made[head], config, params, "float32")
    return made


def start(drafter, frozen=(), ema=False):
    return jax.jit(lambda: init_state(drafter.module, make_optimizer("adamw", frozen), jax.random.key(0), ema))()


def with_token_tables(state, config, folder):
    train = types.SimpleNamespace(start_from=None, frozen_backbone=None, head_from=folder)
    return with_stored_weights(state, config, train, narrow_target())


@pytest.mark.parametrize("head", HEADS)
def test_the_tables_are_the_other_drafters_and_all_else_is_new(folders, head):
    drafter = narrow_drafter(head)
    wide = tiny_drafter(tiny_target().config, layers=1, **HEADS[head]).params["head"]
    before = start(drafter, ema=True)
    after = with_token_tables(before, drafter.config, str(folders[head]))
    for params in (after.params, after.ema):
        for name in TOKEN_TABLES:
            jax.tree.map(np.testing.assert_array_equal, params["head"][name], wide[name])
        rest = {name: part for name, part in params["head"].items() if name not in TOKEN_TABLES}
        new = {name: part for name, part in before.params["head"].items() if name not in TOKEN_TABLES}
        jax.tree.map(np.testing.assert_array_equal, (rest, params["backbone"]), (new, before.params["backbone"]))
    shapes = jax.eval_shape(lambda: init_drafter_params(drafter.module, jax.random.key(0)))
    assert jax.tree.map(jnp.shape, after.params) == jax.tree.map(lambda leaf: leaf.shape, shapes)


@pytest.mark.parametrize(
    ("head", "choices", "message"),
    [
        ("markov", {"markov_rank": 5}, "has markov_rank 6, and the recipe's drafter has 5"),
        ("markov", {"markov_head_type": "gated"}, "has markov_head_type vanilla, and the recipe's drafter has gated"),
        ("dflash2", {}, "has head markov, and the recipe's drafter has dflash2"),
    ],
)
def test_tables_of_another_kind_are_refused(folders, head, choices, message):
    fields = {**HEADS[head], **choices}
    drafter = tiny_drafter(narrow_target().config, layers=1, **fields)
    with pytest.raises(DataError, match=message) as refused:
        with_token_tables(start(drafter), drafter.config, str(folders["markov"]))
    assert str(folders["markov"]) in str(refused.value) and refused.value.exit_code == 3


@pytest.mark.slow
def test_frozen_tables_have_no_moments_and_stay_to_the_bit_while_the_rest_learns(folders):
    drafter, frozen = narrow_drafter(), tuple(f"head/{name}" for name in TOKEN_TABLES)
    optimizer = make_optimizer("adamw", frozen)
    state = with_token_tables(start(drafter, frozen), drafter.config, str(folders["markov"]))
    trained = [leaf for leaf in jax.tree.leaves(state.opt_state) if jnp.ndim(leaf) == 2 and 80 in leaf.shape]
    assert not trained
    before = jax.device_get(state.params)
    step = make_train_step(
        narrow_target().module,
        drafter.module,
        optimizer,
        num_anchors=4,
        learning_rate=lambda step: 1e-2,
        curriculum=lambda step: 0.0,
        settings=MarkovSettings(gamma=4.0, frozen_tables=True),
    )
    tokens = random_tokens((2, 16), seed=3)
    batch = {"tokens": tokens, "loss_mask": jnp.ones((2, 16)), "row_ids": jnp.arange(2)}
    for _ in range(2):
        state, metrics = step(state, narrow_target().params, batch, jax.random.key(11))
    after = jax.device_get(state.params)
    assert np.isfinite(metrics["loss"])
    for name in TOKEN_TABLES:
        jax.tree.map(np.testing.assert_array_equal, after["head"][name], before["head"][name])
    assert (after["head"]["confidence_proj"]["kernel"] != before["head"]["confidence_proj"]["kernel"]).any()
    assert (after["backbone"]["fc"]["kernel"] != before["backbone"]["fc"]["kernel"]).any()
