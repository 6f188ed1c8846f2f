"""From a recipe's values to a drafter and its loss."""

import json

import pytest

from domino_jax.method.heads.dflash2 import SelectorLoss
from domino_jax.method.heads.markov import MarkovLoss
from domino_jax.method.losses import Loss
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.recipe import loading, rules
from domino_jax.recipe.builders import drafter_config_of, loss_of
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
    assert loading.resolved(config)["drafter"]["conv_kernel_size"] == 2
    assert type(settings) is SelectorLoss and not settings.contiguous and not settings.reads_target
    config.train.loss, config.drafter.conv_kernel_size = "cross_entropy", 0
    assert loss_of(config).contiguous and drafter_config_of(config, TARGET, 151_669).conv_group_size == 0
    assert drafter_config_of(changed(drafter__conv_kernel_size=3), TARGET, 151_669).conv_kernel_size == 3


@pytest.mark.parametrize(
    ("head", "key", "value"),
    [
        ("dflash2", "conv_kernel_size", 17),
        ("domino", "domino.pure_draft_prefix_len", 16),
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
