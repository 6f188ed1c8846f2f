"""From a recipe's values to a drafter and its loss."""

import json
import types

import pytest

from domino_jax.method.heads.dflash2 import SelectorLoss
from domino_jax.method.heads.markov import MarkovLoss
from domino_jax.method.losses import Loss
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.recipe import loading, rules
from domino_jax.recipe.builders import drafter_config_of, find_mask_token, loss_of
from domino_jax.runtime.errors import DominoError
from tests.helpers.paths import ROOT
from tests.helpers.recipes import recipe, set_value

TARGET = Qwen3Config.from_dict(json.loads((ROOT / "assets/qwen3_configs/8b/config.json").read_text()))


def changed(**changes):
    """A recipe with these values; __ stands for a dot."""
    config = recipe()
    for key, value in changes.items():
        set_value(config, key.replace("__", "."), value)
    return config


@pytest.mark.parametrize(
    ("changes", "shifted"),
    [
        ({}, True),
        ({"drafter__shift_label": False}, False),
        ({"drafter__head": "none"}, False),
        ({"drafter__head": "none", "drafter__shift_label": True}, True),
        ({"drafter__head": "dflash2"}, False),
    ],
)
def test_labels_are_shifted_as_in_public_drafters_unless_the_recipe_says_otherwise(changes, shifted):
    config = changed(**changes)
    assert loading.resolved(config)["drafter"]["shift_label"] is shifted
    assert drafter_config_of(config, TARGET, 151_669).shift_label is shifted


def test_the_values_of_markov_reach_the_drafter_and_its_loss():
    config = changed(drafter__head="markov", drafter__markov__head_type="gated", drafter__markov__rank=12)
    drafter, settings = drafter_config_of(config, TARGET, 151_669), loss_of(config)
    assert (drafter.head, drafter.markov_head_type, drafter.markov_rank) == ("markov", "gated", 12)
    assert drafter.enable_confidence_head and drafter.confidence_head_with_markov
    assert (type(settings), settings.weights, settings.contiguous) == (MarkovLoss, (0.1, 0.9, 1.0), True)
    assert settings.reads_target and not loss_of(recipe()).reads_target
    config.train.loss = "cross_entropy"
    assert loss_of(config) == loss_of(recipe()) == Loss()
    assert not drafter_config_of(config, TARGET, 151_669).enable_confidence_head  # nothing would train it


def test_the_values_of_dflash2_reach_the_drafter_and_its_loss():
    config = changed(drafter__head="dflash2", drafter__dflash2__rank=12)
    drafter, settings = drafter_config_of(config, TARGET, 151_669), loss_of(config)
    assert (drafter.head, drafter.selector_rank, drafter.selector_top_k) == ("dflash2", 12, 16)
    assert (drafter.conv_kernel_size, drafter.conv_group_size, drafter.suffix_start) == (2, 16, 1)
    assert type(settings) is SelectorLoss and not settings.contiguous and not settings.reads_target
    config.train.loss = "cross_entropy"
    assert loss_of(config).contiguous and drafter_config_of(recipe(), TARGET, 151_669).conv_group_size == 0


@pytest.mark.parametrize(
    ("head", "key", "value"),
    [
        ("domino", "target_layer_ids", (1, 35)),
        ("eagle3", "target_layer_ids", (1, 2)),
        ("domino", "num_layers", 40),
        ("domino", "mask_token_id", 151_936),
        ("markov", "shift_label", False),
    ],
)
def test_a_shape_that_no_drafter_of_the_target_has_is_refused_by_its_key(head, key, value):
    config = changed(drafter__head=head)
    set_value(config, f"drafter.{key}", value)
    rules.check(config, "train")
    named = "target_layer_ids" if key == "num_layers" else key  # more layers than the public rule has taps for
    with pytest.raises(DominoError, match=rf"\nChange --config.drafter.{named}\.$") as refused:
        drafter_config_of(config, TARGET)
    assert refused.value.exit_code == 2


def target_with(tokens: dict[str, int], rows: int, stop_ids=()):
    """A target whose tokenizer has these tokens, and whose embedding has `rows` rows."""
    tokenizer, config = types.SimpleNamespace(get_vocab=lambda: tokens), types.SimpleNamespace(vocab_size=rows)
    model = types.SimpleNamespace(config=config)
    return types.SimpleNamespace(tokenizer=tokenizer, model=model, stop_ids=stop_ids, path="T")


@pytest.mark.parametrize(
    ("tokens", "rows", "stop_ids", "expected"),
    [
        ({"a": 0, "b": 1}, 4, (), 2),  # after all tokens
        ({"a": 0, "b": 1, "end": 3}, 6, (), 4),  # not 3, which is the number of tokens
        ({"a": 0, "end": 3}, 4, (), 1),  # in a gap, where the embedding ends with the tokens
        ({"a": 0, "b": 1}, 5, (2,), 3),  # a stop id without a token
        ({"a": 0, "<|mask|>": 1}, 4, (), 1),
    ],
)
def test_the_mask_token_that_a_training_chooses_is_one_that_no_text_has(tokens, rows, stop_ids, expected):
    assert find_mask_token(None, target_with(tokens, rows, stop_ids)) == expected


def test_without_a_free_id_the_recipe_has_to_name_a_mask_token():
    target = target_with({"a": 0, "b": 1}, 2)
    with pytest.raises(DominoError, match=r"a token for each of the 2 rows .*--config.drafter.mask_token_id"):
        find_mask_token(None, target)
    assert find_mask_token(1, target) == 1
    with pytest.raises(DominoError, match="2 is outside"):
        find_mask_token(2, target)
