"""decode_checks.py: what the decode section asks of itself and of the drafter that a training ends with."""

import contextlib

import pytest

from domino_jax.method.kinds import HEADS, KINDS, ROW_DRAFTERS
from domino_jax.method.settings import canonical_mode, supported_modes
from domino_jax.recipe import checks as recipes
from domino_jax.recipe.decode_checks import decode_settings, modes_of
from domino_jax.runtime.errors import DominoError
from tests.helpers.recipes import recipe


def test_a_drafter_without_a_head_has_no_domino_mode():
    config = recipe()
    config.drafter.head, config.decode.modes = "none", ("autoregressive", "domino")
    config.eval.final, config.eval.prompts = True, "p.jsonl"
    with pytest.raises(DominoError, match="drafter.head is 'none': .* needs a head"):
        recipes.check(config, "train")
    config.decode.modes = ("autoregressive", "backbone")
    recipes.check(config, "train")


@pytest.mark.parametrize("head", ROW_DRAFTERS)
def test_a_drafter_without_a_backbone_has_no_mode_backbone(head):
    config = recipe()
    config.drafter.head, config.decode.modes = head, ("autoregressive", "backbone")
    config.eval.final, config.eval.prompts = True, "p.jsonl"
    with pytest.raises(DominoError, match=f"drafter.head is '{head}': .* {head} has none; use mode 'draft'"):
        recipes.check(config, "train")
    config.decode.modes = ("autoregressive", "draft")
    recipes.check(config, "train")
    config.decode.num_drafts = 65
    with pytest.raises(DominoError, match="config.decode.num_drafts is 65, but"):
        recipes.check(config, "train")


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


@pytest.mark.parametrize("head", HEADS)
def test_modes_that_are_left_open_are_those_of_the_drafter(head):
    config = recipe()
    config.drafter.head, config.eval.final, config.eval.prompts = head, True, "p.jsonl"
    recipes.check(config, "train")
    modes = modes_of(config.decode, head)
    assert modes == tuple(recipes.resolved(config)["decode"]["modes"]) == decode_settings(config.decode, head).modes
    assert supported_modes(modes, KINDS[head]) == modes and modes[0] == "autoregressive"
    assert ("backbone" in modes) == (head in ("domino", "markov", "dflash2"))
    assert canonical_mode(modes[-1]) == "draft"


@pytest.mark.parametrize(("modes", "fine"), [(("tree",), False), (("backbone",), False), (("tree", "domino"), True)])
def test_a_confidence_that_no_mode_reads_is_refused(modes, fine):
    config = recipe()
    config.decode.modes, config.decode.confidence = modes, 0.5
    with contextlib.nullcontext() if fine else pytest.raises(DominoError, match="decode.confidence is 0.5: none of"):
        recipes.check(config, "decode")


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
