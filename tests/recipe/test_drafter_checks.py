"""drafter_checks.py, and the drafters and losses that follow from a recipe's values."""

import json
import re

import pytest

from domino_jax.method.heads.dflash2 import SelectorSettings
from domino_jax.method.heads.markov import MarkovSettings
from domino_jax.method.kinds import KINDS, ROW_DRAFTERS
from domino_jax.method.losses import LossSettings
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.recipe import checks as recipes
from domino_jax.recipe import cli
from domino_jax.recipe.builders import drafter_config_of, loss_settings
from domino_jax.runtime.errors import DominoError
from tests.helpers.paths import ROOT
from tests.helpers.recipes import recipe, set_value


def test_an_unshifted_drafter_needs_one_slot_more_than_its_prefix():
    config = recipe()
    config.drafter.block_size = 3
    config.drafter.pure_draft_prefix_len = 2
    recipes.check(config, "train")
    config.drafter.shift_label = False
    with pytest.raises(DominoError, match="shift_label False the head would correct no slot"):
        recipes.check(config, "train")


@pytest.mark.parametrize(
    ("flags", "shifted"),
    [
        ((), True),
        (("--config.drafter.head=none",), False),
        (("--config.drafter.head=none", "--config.drafter.shift_label=true"), True),
        (("--config.drafter.head=none", "--noconfig.drafter.shift_label"), False),
        (("--config.drafter.shift_label=False",), False),
    ],
)
def test_plain_dflash_is_unshifted_and_domino_shifted_unless_the_recipe_says_otherwise(flags, shifted):
    command = ["train", f"--config={ROOT / 'configs' / 'qwen3_8b.py'}", *flags]
    config = cli.parse(command, ("config",)).config
    target = Qwen3Config.from_dict(json.loads((ROOT / "assets/qwen3_configs/8b/config.json").read_text()))
    assert recipes.resolved(config)["drafter"]["shift_label"] is shifted
    assert drafter_config_of(config, target, 151_669).shift_label is shifted


HEADED = [("train.head_tokens", "drafts"), ("train.frozen_backbone", "FOLDER"), ("train.rank_scales", (0.5, 1.0))]


@pytest.mark.parametrize(("key", "value"), HEADED)
def test_a_drafter_without_a_head_has_none_to_train_alone_or_on_its_own_drafts(key, value):
    config = recipe()
    set_value(config, key, value)
    config.train.lambda_start = 0.0
    recipes.check(config, "train")
    config.drafter.head = "none"
    with pytest.raises(DominoError, match=f"config.{key} is {re.escape(repr(value))}.*drafter.head.*none"):
        recipes.check(config, "train")


@pytest.mark.parametrize(
    ("key", "value"), [("train.dpace_alpha", 0.5), ("train.distill", 0.1), ("drafter.shift_label", False)]
)
def test_what_a_markov_drafter_does_not_read_is_refused(key, value):
    config = recipe()
    config.drafter.head = "markov"
    recipes.check(config, "train")
    set_value(config, key, value)
    with pytest.raises(DominoError, match=f"config.{key} is {value}.*markov"):
        recipes.check(config, "train")
    config.train.loss = "cross_entropy"
    if key.startswith("train."):
        recipes.check(config, "train")


def test_the_recipes_markov_values_reach_the_drafter_and_its_loss():
    config = recipe()
    config.drafter.head, config.drafter.markov_head_type, config.drafter.markov_rank = "markov", "gated", 12
    target = Qwen3Config.from_dict(json.loads((ROOT / "assets/qwen3_configs/8b/config.json").read_text()))
    made = drafter_config_of(config, target, 151_669)
    assert (made.head, made.markov_head_type, made.markov_rank, made.shift_label) == ("markov", "gated", 12, True)
    assert made.enable_confidence_head and made.confidence_head_with_markov
    config.drafter.enable_confidence_head = False
    made = drafter_config_of(config, target, 151_669)
    assert not made.enable_confidence_head and not made.confidence_head_with_markov
    settings = loss_settings(config.train, "markov")
    assert (type(settings), settings.weights, settings.contiguous) == (MarkovSettings, (0.1, 0.9, 1.0), True)
    assert settings.reads_target and not loss_settings(config.train, "domino").reads_target
    config.train.loss = "cross_entropy"
    assert loss_settings(config.train, "markov") == loss_settings(config.train, "domino") == LossSettings()


@pytest.mark.parametrize(("key", "value"), [("train.distill", 0.1), ("drafter.shift_label", True)])
def test_what_a_dflash2_drafter_does_not_read_is_refused(key, value):
    config = recipe()
    config.drafter.head, config.train.dpace_alpha = "dflash2", 0.5
    recipes.check(config, "train")
    set_value(config, key, value)
    with pytest.raises(DominoError, match=f"config.{key} is {value}.*dflash2"):
        recipes.check(config, "train")


def test_the_recipes_selector_and_convolutions_reach_the_drafter_and_its_loss():
    config = recipe()
    config.drafter.head, config.drafter.selector_rank, config.drafter.selector_top_k = "dflash2", 12, 6
    config.train.selector_alpha, config.train.selector_ramp_ratio = 2.0, 1.0
    target = Qwen3Config.from_dict(json.loads((ROOT / "assets/qwen3_configs/8b/config.json").read_text()))
    made = drafter_config_of(config, target, 151_669)
    assert (made.head, made.selector_rank, made.selector_top_k, made.shift_label) == ("dflash2", 12, 6, False)
    assert (made.conv_kernel_size, made.conv_group_size, made.suffix_start) == (2, 16, 1)
    assert recipes.resolved(config)["drafter"]["conv_kernel_size"] == 2
    settings = loss_settings(config.train, "dflash2")
    assert type(settings) is SelectorSettings
    assert not settings.contiguous and not settings.reads_target
    half = config.train.steps // 2
    assert float(KINDS["dflash2"].curriculum(config.train)(half)) == pytest.approx(1.0, rel=1e-4)
    assert float(KINDS["domino"].curriculum(config.train)(half)) == pytest.approx(0.5, rel=1e-4)
    config.train.loss = "cross_entropy"
    plain = loss_settings(config.train, "dflash2")
    assert plain.contiguous
    config.drafter.conv_kernel_size = 0
    assert drafter_config_of(config, target, 151_669).conv_group_size == 0
    config.drafter.head, config.drafter.conv_kernel_size = "domino", 3
    assert drafter_config_of(config, target, 151_669).conv_kernel_size == 3


def test_a_plain_block_of_two_needs_no_room_for_a_heads_prefix():
    config = recipe()
    config.drafter.head, config.drafter.block_size, config.train.num_anchors = "none", 2, 8
    recipes.check(config, "train")


@pytest.mark.parametrize(("key", "value"), [("dpace_alpha", 0.5), ("distill", 0.1), ("loss", "cross_entropy")])
@pytest.mark.parametrize("head", ROW_DRAFTERS)
def test_choices_of_the_losses_of_blocks_are_refused_where_there_are_none(head, key, value):
    config = recipe()
    config.drafter.head, config.train[key] = head, value
    with pytest.raises(DominoError, match=f"config.train.{key} is .*: drafter.head {head} has its own loss"):
        recipes.check(config, "train")


def test_drafters_without_blocks_need_no_room_for_anchors():
    config = recipe()
    config.data.max_length, config.train.num_anchors = 200, 256
    with pytest.raises(DominoError, match=r"train.num_anchors is 256: a row of data.max_length 200"):
        recipes.check(config, "train")
    config.drafter.head = "medusa"
    recipes.check(config, "train")


TARGET = Qwen3Config.from_dict(json.loads((ROOT / "assets/qwen3_configs/8b/config.json").read_text()))


@pytest.mark.parametrize(("key", "value"), [("loss", "cross_entropy"), ("markov_weights", (0.1, 0.9, 0.0))])
def test_a_confidence_head_exists_where_the_loss_trains_it_and_is_refused_elsewhere(key, value):
    config = recipe()
    config.drafter.head = "markov"
    assert recipes.resolved(config)["drafter"]["enable_confidence_head"] is True
    config.train[key] = value
    recipes.check(config, "train")
    made = drafter_config_of(config, TARGET, 151_669)
    assert not made.enable_confidence_head and not made.confidence_head_with_markov
    assert recipes.resolved(config)["drafter"]["enable_confidence_head"] is False
    config.drafter.enable_confidence_head = True
    with pytest.raises(DominoError, match="drafter.enable_confidence_head is True: with train.loss .* nothing trains"):
        recipes.check(config, "train")
    config.drafter.head = "domino"
    recipes.check(config, "train")


@pytest.mark.parametrize(("head", "loss"), [("domino", "own"), ("markov", "cross_entropy")])
def test_a_curriculum_that_starts_with_the_base_loss_is_refused_on_a_frozen_backbone(head, loss):
    config = recipe()
    config.drafter.head, config.train.loss, config.train.frozen_backbone = head, loss, "FOLDER"
    with pytest.raises(DominoError, match="train.lambda_start is 1.0: the base loss has nothing to train"):
        recipes.check(config, "train")
    config.train.lambda_start = 0.0
    recipes.check(config, "train")
    config.train.lambda_start, config.train.loss, config.drafter.head = 1.0, "own", "dflash2"
    recipes.check(config, "train")  # its own loss has no λ


@pytest.mark.parametrize(
    ("head", "key", "value", "message"),
    [
        ("dflash2", "drafter.pure_draft_prefix_len", 1, "does not read it"),
        ("markov", "drafter.pure_draft_prefix_len", 1, "does not read it"),
        ("medusa", "drafter.shift_label", True, "does not read it"),
        ("eagle3", "drafter.shift_label", False, "does not read it"),
        ("medusa", "drafter.target_layer_ids", (1, 2, 3), "does not read it"),
        ("eagle3", "drafter.target_layer_ids", (1, 2), "fuses 3 layers"),
    ],
)
def test_a_key_of_the_command_line_that_the_drafter_does_not_read_is_refused(head, key, value, message):
    config = recipe()
    config.drafter.head = head
    recipes.check(config, "train")
    set_value(config, key, value)
    recipes.check(config, "decode")
    with pytest.raises(DominoError, match=rf"config.{key} is .*: .*{message}"):
        recipes.check(config, "train", {key})


@pytest.mark.parametrize(
    ("head", "key", "value"),
    [
        ("dflash2", "selector_top_k", 200_000),
        ("dflash2", "conv_group_size", 24),
        ("domino", "target_layer_ids", (1, 35)),
        ("eagle3", "target_layer_ids", (1, 2, 35)),
        ("domino", "num_layers", 40),
        ("domino", "mask_token_id", 151_936),
    ],
)
def test_what_does_not_fit_the_target_is_a_mistake_in_the_recipe_that_names_its_key(head, key, value):
    config = recipe()
    config.drafter.head, config.drafter[key] = head, value
    recipes.check(config, "train")
    named = "target_layer_ids" if key == "num_layers" else key  # more layers than the public rule has taps for
    with pytest.raises(DominoError, match=rf"\nChange --config.drafter.{named}\.$") as refused:
        drafter_config_of(config, TARGET)
    assert refused.value.exit_code == 2


def test_a_head_that_is_cut_at_random_does_not_read_its_drafts():
    config = recipe()
    config.train.rank_scales = (0.25, 0.5, 1.0, 1.0)
    recipes.check(config, "train")
    config.train.head_tokens = "drafts"
    with pytest.raises(DominoError, match=r"config.train.rank_scales is .*: a head that is cut at random reads the"):
        recipes.check(config, "train")


@pytest.mark.parametrize("head", ["markov", "dflash2"])
def test_tables_of_tokens_can_come_from_another_drafter_and_be_left_as_they_are(head):
    config = recipe()
    config.drafter.head, config.train.head_from, config.train.frozen_tables = head, "FOLDER", True
    recipes.check(config, "train")
    settings = loss_settings(config.train, head)
    assert settings.frozen_tables and not settings.frozen_backbone and settings.rank_scales == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter.head": "eagle3"}, "draft vocabulary of drafter.head eagle3"),
        ({"train.frozen_backbone": "OTHER"}, "train.frozen_backbone would replace some of them"),
        (
            {"drafter.head": "markov", "train.frozen_backbone": "OTHER", "train.head_from": "OTHER"},
            "train.frozen_backbone and train.head_from would",
        ),
    ],
)
def test_a_run_starts_from_one_drafter_whole(changes, message):
    config = recipe()
    config.train.start_from = "FOLDER"
    recipes.check(config, "train")
    for key, value in changes.items():
        set_value(config, key, value)
    with pytest.raises(DominoError, match=f"config.train.start_from is 'FOLDER'.*{message}"):
        recipes.check(config, "train")
