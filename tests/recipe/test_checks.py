"""checks.py: each check trips on a value it is there for, and names the key and the value."""

import json

import pytest

from configs import qwen3
from domino_jax.recipe import checks as recipes
from domino_jax.runtime.errors import DominoError
from tests.helpers.paths import ROOT
from tests.helpers.recipes import recipe, set_value


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
    *((key, "x") for key in ("train.optimizer", "train.non_finite", "train.head_tokens")),
    *((key, 0) for key in ("drafter.eagle3.draft_vocab_size", "drafter.medusa.num_heads", "drafter.medusa.num_layers")),
    ("train.eagle3.passes", 0),
    *(("train.eagle3.decay", value) for value in (0.0, 1.5)),
    *((key, "") for key in ("train.start_from", "train.frozen_backbone")),
    *(("train.head_from", value) for value in ("", "FOLDER")),  # the recipe's head is domino, without such tables
    ("train.frozen_tables", True),
    *(("train.rank_scales", value) for value in ((0.5,), (0.0, 1.0), (1.0, 1.5), (0.3, 1.0), ("a",), (0.001, 1.0))),
    ("decode.head_rank", -1),
    *(("decode.draft_sharpness", value) for value in (0.0, -1.0, NAN)),
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
    ("train.markov_weights", (0.0, 0.0, 1.0)),
    *((key, most + 1) for most, keys in recipes.MOST for key in keys),
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


def test_resolved_is_strict_json_and_survives_a_round_trip():
    config = recipe()
    config.train.gamma = float("inf")
    recipes.check(config, "train")  # no decay
    plain = recipes.resolved(config)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["train"]["gamma"] == "inf"
    assert plain["decode"]["modes"] == ["autoregressive", "backbone", "domino"]
    assert plain["drafter"]["mask_token_id"] is None


def test_a_path_of_a_workdir_is_found_from_any_folder(monkeypatch, tmp_path):
    target = recipes.portable(str(ROOT / "assets" / "tiny_qwen3"))
    monkeypatch.chdir(tmp_path)
    assert target == "./assets/tiny_qwen3" and recipes.located(target) == str(ROOT / "assets" / "tiny_qwen3")
    assert [recipes.located(path) for path in ("owner/name", "./nowhere")] == ["owner/name", "./nowhere"]
    (tmp_path / "assets" / "tiny_qwen3").mkdir(parents=True)
    assert recipes.located(target) == target
