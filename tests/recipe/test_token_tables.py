"""train.head_from: a head's tables of tokens of a drafter for another target."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.head import TOKEN_TABLES
from domino_jax.method.optimizer import make_optimizer
from domino_jax.method.state import init_state
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.recipe.builders import with_stored_weights
from domino_jax.runtime.errors import DataError
from domino_jax.weights.drafter import save_drafter
from tests.helpers.models import TARGET_FIELDS, random_target, tiny_drafter, tiny_target

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


def start(drafter, ema=False):
    return jax.jit(lambda: init_state(drafter.module, make_optimizer("adamw"), jax.random.key(0), ema))()


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
