"""checks.py: each cross-field check trips on a value it is there for, and names the key and the value."""

import json
import re

import pytest

from configs import qwen3
from domino_jax.drafters.names import ROW_DRAFTERS
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.recipe import checks as recipes
from domino_jax.recipe import cli
from domino_jax.recipe.builders import curriculum_of, drafter_config_of, loss_settings
from domino_jax.runtime.errors import DominoError
from tests.helpers.paths import ROOT


def recipe():
    """A recipe that passes every check of train."""
    config = qwen3.get_config("Qwen/Qwen3-8B")
    config.data.train = "rows.jsonl"
    return config


def set_value(config, key, value):
    *sections, name = key.split(".")
    for section in sections:
        config = config[section]
    config[name] = value


@pytest.mark.parametrize("command", ["train", "decode", "regenerate"])
def test_a_sound_recipe_passes(command):
    recipes.check(recipe(), command)


NAN, INF = float("nan"), float("inf")
COUNTS = """drafter.num_layers drafter.intermediate_size drafter.gru_hidden_dim drafter.emb_dim drafter.markov_rank
drafter.selector_rank drafter.selector_top_k drafter.conv_group_size
train.steps train.batch_size train.log_every train.num_anchors checkpoint.every checkpoint.keep eval.batch_size
eval.num_prompts decode.batch_size decode.max_new_tokens decode.tree.candidates decode.tree.lanes
decode.mesh.data regenerate.batch_size regenerate.max_new_tokens mesh.data mesh.fsdp""".split()
FROM_ZERO = """drafter.conv_kernel_size train.selector_alpha
drafter.mask_token_id drafter.pure_draft_prefix_len seed data.held_out preflight.rows eval.every
decode.seed decode.top_k decode.head_candidates decode.num_drafts decode.num_prompts decode.tree.depth
regenerate.num_prompts regenerate.top_k""".split()
BAD = [
    *((key, 0) for key in COUNTS),
    *((key, -1) for key in FROM_ZERO),
    *((key, 1) for key in ("drafter.block_size", "data.max_length", "decode.tree.nodes")),
    *((key, "") for key in ("target.path", "data.train")),
    *((key, "x") for key in ("drafter.head", "drafter.markov_head_type", "train.loss", "data.layout")),
    *((key, "x") for key in ("train.optimizer", "train.non_finite", "train.selector_rule", "train.head_tokens")),
    *((key, "x") for key in ("train.eagle3.mask", "train.medusa_loss")),
    *((key, 0) for key in ("drafter.eagle3.draft_vocab_size", "drafter.medusa.num_heads", "drafter.medusa.num_layers")),
    ("train.eagle3.passes", 0),
    *(("train.eagle3.decay", value) for value in (0.0, 1.5)),
    ("train.frozen_backbone", ""),
    *(("train.head_from", value) for value in ("", "FOLDER")),  # the recipe's head is domino, without such tables
    ("train.frozen_tables", True),
    *(("train.rank_scales", value) for value in ((0.5,), (0.0, 1.0), (1.0, 1.5), (0.3, 1.0), ("a",), (0.001, 1.0))),
    ("decode.head_rank", -1),
    *((key, "x") for key in ("target.dtype", "decode.dtype", "decode.parity")),
    *((key, value) for key in ("drafter.target_layer_ids",) for value in ((), (1, 1), (1, -2), (1, "x"))),
    *((key, value) for key in ("decode.modes",) for value in ((), ("forest",), ("domino", "domino"))),
    *((key, value) for key in ("train.lambda_start", "train.dpace_alpha", "train.distill") for value in (1.5, -0.1)),
    *((key, 1.5) for key in ("train.selector_warmup_ratio", "train.selector_ramp_ratio")),
    *((key, 1.0) for key in ("train.warmup_ratio", "train.ema_decay")),
    *((key, -0.1) for key in ("train.lambda_decay_ratio", "train.hang_seconds", "decode.min_p")),
    *((key, value) for key in ("decode.temperature", "regenerate.temperature") for value in (-0.5, NAN)),
    *((key, value) for key in ("decode.top_p", "regenerate.top_p") for value in (0.0, 1.01)),
    *(("decode.confidence", value) for value in (-0.1, 1.5, NAN)),
    *(("train.markov_weights", value) for value in ((), (1.0, 0.0), (0, 0, 0), (1, -1, 0), (NAN, 1, 1), ("a", 1, 1))),
    *(("train.gamma", value) for value in (0.0, NAN)),
    *(("train.learning_rate", value) for value in (0.0, INF)),
    *(("train.profile_steps", value) for value in ((5,), (7, 5))),
    *(("decode.tree.beta", value) for value in (0.1, -INF)),
    ("drafter.pure_draft_prefix_len", 16),
    ("drafter.conv_kernel_size", 17),
    ("train.selector_alpha", INF),
    ("train.num_anchors", 3072),
    ("train.accumulate", 3),
    ("decode.min_p", 1.0),
    ("decode.seed", 2**31),
    ("decode.simulate_tau", 0.5),
    ("decode.concurrency", (0,)),
    ("decode.tasks", ("",)),
    ("decode.cache_length", 2048),
    ("decode.tree.lanes", 65),
    ("mesh.tensor", -2),
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_bad_value_is_refused_by_key_and_value(key, value):
    config = recipe()
    set_value(config, key, value)
    with pytest.raises(DominoError) as refused:
        recipes.check(config, "train")
    assert f"config.{key} is {value!r}" in str(refused.value)
    assert refused.value.exit_code == 2
    assert len(str(refused.value).splitlines()) <= 5


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
    assert drafter_config_of(config.drafter, target, 151_669).shift_label is shifted


HEADED = [("train.head_tokens", "drafts"), ("train.frozen_backbone", "FOLDER"), ("train.rank_scales", (0.5, 1.0))]


@pytest.mark.parametrize(("key", "value"), HEADED)
def test_a_drafter_without_a_head_has_none_to_train_alone_or_on_its_own_drafts(key, value):
    config = recipe()
    set_value(config, key, value)
    recipes.check(config, "train")
    config.drafter.head = "none"
    with pytest.raises(DominoError, match=f"config.{key} is {re.escape(repr(value))}.*drafter.head.*none"):
        recipes.check(config, "train")


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


@pytest.mark.parametrize(("head", "rank"), [("domino", 257), ("none", 1), ("eagle3", 1)])
def test_the_final_decodings_rank_is_one_that_the_trained_head_has(head, rank):
    config = recipe()
    config.eval.final, config.eval.prompts, config.drafter.head = True, "prompts.jsonl", head
    config.decode.modes = ("autoregressive", "draft")
    recipes.check(config, "train")
    config.decode.head_rank = rank
    recipes.check(config, "decode")  # whose drafter is not this recipe's
    with pytest.raises(DominoError, match=f"config.decode.head_rank is {rank}: the head of drafter.head {head} has"):
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
    made = drafter_config_of(config.drafter, target, 151_669)
    assert (made.head, made.markov_head_type, made.markov_rank, made.shift_label) == ("markov", "gated", 12, True)
    assert made.enable_confidence_head and made.confidence_head_with_markov and made.emb_dim == 0
    config.drafter.enable_confidence_head = False
    made = drafter_config_of(config.drafter, target, 151_669)
    assert not made.enable_confidence_head and not made.confidence_head_with_markov
    settings = loss_settings(config.train, "markov")
    assert (settings.kind, settings.weights, settings.contiguous) == ("markov", (0.1, 0.9, 1.0), True)
    assert settings.reads_target and not loss_settings(config.train, "domino").reads_target
    config.train.loss = "cross_entropy"
    assert loss_settings(config.train, "markov").kind == loss_settings(config.train, "domino").kind == "cross_entropy"


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
    config.train.selector_rule, config.train.selector_detached = "replace", True
    config.train.selector_alpha, config.train.selector_ramp_ratio = 2.0, 1.0
    target = Qwen3Config.from_dict(json.loads((ROOT / "assets/qwen3_configs/8b/config.json").read_text()))
    made = drafter_config_of(config.drafter, target, 151_669)
    assert (made.head, made.selector_rank, made.selector_top_k, made.shift_label) == ("dflash2", 12, 6, False)
    assert (made.conv_kernel_size, made.conv_group_size, made.suffix_start) == (2, 16, 1)
    assert recipes.resolved(config)["drafter"]["conv_kernel_size"] == 2
    settings = loss_settings(config.train, "dflash2")
    assert (settings.kind, settings.rule, settings.detached) == ("dflash2", "replace", True)
    assert not settings.contiguous and not settings.reads_target
    half = config.train.steps // 2
    assert float(curriculum_of(config.train, "dflash2")(half)) == pytest.approx(1.0, rel=1e-4)
    assert float(curriculum_of(config.train, "cross_entropy")(half)) == pytest.approx(0.5, rel=1e-4)
    config.train.loss = "cross_entropy"
    plain = loss_settings(config.train, "dflash2")
    assert plain.contiguous and not plain.detached
    config.drafter.conv_kernel_size = 0
    assert drafter_config_of(config.drafter, target, 151_669).conv_group_size == 0
    config.drafter.head, config.drafter.conv_kernel_size = "domino", 3
    assert drafter_config_of(config.drafter, target, 151_669).conv_kernel_size == 3


def test_a_plain_block_of_two_needs_no_room_for_a_heads_prefix():
    config = recipe()
    config.drafter.head, config.drafter.block_size, config.train.num_anchors = "none", 2, 8
    recipes.check(config, "train")


def test_two_axes_cannot_both_be_the_rest():
    config = recipe()
    config.mesh.data = config.mesh.fsdp = -1
    with pytest.raises(DominoError, match="only one axis"):
        recipes.check(config, "train")


def test_rows_and_heldout_prompts_are_asked_for_by_train_alone():
    config = qwen3.get_config("Qwen/Qwen3-8B")
    recipes.check(config, "decode")
    with pytest.raises(DominoError, match="config.data.train is None"):
        recipes.check(config, "train")
    config.data.train = "rows.jsonl"
    recipes.check(config, "train")  # prompts held out of the rows
    config.data.held_out = 0
    with pytest.raises(DominoError, match="config.eval.prompts is None"):
        recipes.check(config, "train")
    config.data.held_out, config.eval.final = 64, True
    with pytest.raises(DominoError, match="config.eval.prompts is None"):
        recipes.check(config, "train")


def test_a_drafter_without_a_head_has_no_domino_mode():
    config = recipe()
    config.drafter.head = "none"
    config.eval.final, config.eval.prompts = True, "p.jsonl"
    with pytest.raises(DominoError, match="drafter.head is 'none': .* needs a drafter with a head"):
        recipes.check(config, "train")
    config.decode.modes = ("autoregressive", "backbone")
    recipes.check(config, "train")


@pytest.mark.parametrize("head", ROW_DRAFTERS)
def test_a_drafter_without_a_backbone_has_no_mode_backbone(head):
    config = recipe()
    config.drafter.head = head
    config.eval.final, config.eval.prompts = True, "p.jsonl"
    with pytest.raises(DominoError, match=f"drafter.head is '{head}': .* {head} has none; use mode 'draft'"):
        recipes.check(config, "train")
    config.decode.modes = ("autoregressive", "draft")
    recipes.check(config, "train")
    config.decode.num_drafts = 65
    with pytest.raises(DominoError, match="config.decode.num_drafts is 65, but"):
        recipes.check(config, "train")


@pytest.mark.parametrize(("key", "value"), [("dpace_alpha", 0.5), ("distill", 0.1), ("loss", "cross_entropy")])
@pytest.mark.parametrize("head", ROW_DRAFTERS)
def test_choices_of_the_losses_of_blocks_are_refused_where_there_are_none(head, key, value):
    config = recipe()
    config.drafter.head, config.train[key] = head, value
    with pytest.raises(DominoError, match=f"config.train.{key} is .*: drafter.head {head} has its own loss"):
        recipes.check(config, "train")


def test_resolved_is_strict_json_and_survives_a_round_trip():
    config = recipe()
    config.train.gamma = float("inf")
    recipes.check(config, "train")  # no decay
    plain = recipes.resolved(config)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["train"]["gamma"] == "inf"
    assert plain["decode"]["modes"] == ["autoregressive", "backbone", "domino"]
    assert plain["drafter"]["mask_token_id"] is None


def test_a_tree_has_no_fixed_shape_parity():
    config = recipe()
    config.decode.modes, config.decode.parity = ("autoregressive", "tree"), "fixed_shape"
    with pytest.raises(DominoError, match="it is a promise for chains"):
        recipes.check(config, "decode")
    config.decode.modes = ("autoregressive", "domino")
    recipes.check(config, "decode")


@pytest.mark.parametrize(
    ("modes", "tree_depth", "message"),
    [
        (("domino",), 16, "decode.num_drafts is 8, but a block of 8 slots gives 7 drafts"),
        (("tree",), 8, "decode.tree.depth is 8, but a block of 8 slots gives 7"),
    ],
)
def test_more_drafts_than_the_trained_block_gives_are_refused_before_the_training(modes, tree_depth, message):
    config = recipe()
    config.data.train = config.eval.prompts = "rows.jsonl"
    config.eval.final, config.drafter.block_size, config.drafter.shift_label = True, 8, False
    config.decode.modes, config.decode.tree.depth = modes, tree_depth
    config.decode.num_drafts = 8 if "domino" in modes else 0
    config.decode.tree.nodes = 16
    with pytest.raises(DominoError, match=message):
        recipes.check(config, "train")
    config.drafter.shift_label = True
    recipes.check(config, "train")
    recipes.check(config, "decode")
    config.decode.modes = ("autoregressive",)
    config.decode.num_drafts = 99
    recipes.check(config, "train")  # nothing is drafted


def test_a_tree_of_more_nodes_than_lanes_give_is_refused_before_the_training():
    config = recipe()
    config.data.train = config.eval.prompts = "rows.jsonl"
    config.decode.modes, config.eval.final, config.decode.tree.lanes = ("tree",), True, 2
    with pytest.raises(DominoError, match="decode.tree.nodes is 64, but 2 lanes of 16 drafts and the anchor are 33"):
        recipes.check(config, "train")


def test_a_tree_needs_room_in_the_cache():
    config = recipe()
    config.decode.cache_length, config.decode.max_new_tokens = 192, 128
    recipes.check(config, "decode")
    config.decode.modes = ("tree",)
    with pytest.raises(DominoError, match="a cache_length of 192 with max_new_tokens 128 has no room"):
        recipes.check(config, "decode")
    config.decode.tree.nodes = 63
    recipes.check(config, "decode")


def test_a_confidence_without_its_head_is_refused_before_the_training():
    config = recipe()
    config.eval.final, config.eval.prompts, config.decode.confidence = True, "p.jsonl", 0.5
    with pytest.raises(DominoError, match=r"decode.confidence is 0.5: a drafter of drafter.head domino has no conf"):
        recipes.check(config, "train")
    config.drafter.head = "markov"
    config.decode.modes = ("autoregressive", "draft")
    recipes.check(config, "train")


def test_drafters_without_blocks_need_no_room_for_anchors():
    config = recipe()
    config.data.max_length, config.train.num_anchors = 200, 256
    with pytest.raises(DominoError, match=r"train.num_anchors is 256: a row of data.max_length 200"):
        recipes.check(config, "train")
    config.drafter.head = "medusa"
    recipes.check(config, "train")
