"""The Domino worker for sglang-jax drafts as we do: its head on shared arrays, and the engine's rounds.

SGLANG_JAX_PYTHON names the Python of an environment with sglang-jax at the commit that the adapter was made for
(docs/serving.md); without it, the Python of the tests is looked at. Only the tests of the engine need it.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.candidates import pick_candidates
from domino_jax.method.rollout import roll_out
from domino_jax.weights.drafter import save_drafter
from integrations.sglang_jax.drafter import Unsupported, read_config, read_head
from integrations.sglang_jax.head import roll_out as roll_out_there
from integrations.sglang_jax.options import server_arguments
from tests.helpers.decoding_models import DRAFTERS, golden_models, make_generator, random_models, texts
from tests.helpers.models import load_golden, reference_accept_lengths
from tests.helpers.paths import GOLDEN, ROOT

PYTHON = os.environ.get("SGLANG_JAX_PYTHON", sys.executable)
KINDS = DRAFTERS | {
    "shifted, prefix 0": {"shift_label": True, "pure_draft_prefix_len": 0},
    "unshifted, prefix 1": {"shift_label": False, "pure_draft_prefix_len": 1},
    "unshifted, prefix 2": {"shift_label": False, "pure_draft_prefix_len": 2},
}
ROWS, NEW_TOKENS = 24, 40
TARGET = "--model-path", "--speculative-draft-model-path"


@pytest.fixture(params=KINDS)
def exported(request, tmp_path):
    """(models, the folder of their drafter in float32) for each kind of Domino drafter."""
    models = random_models(5, **KINDS[request.param])
    save_drafter(tmp_path, models.drafter.config, models.drafter_params, "float32")
    return models, tmp_path


@jax.jit
def draft_here(models, z, anchors):
    base = models.unembed(z)
    drafts = roll_out(models, anchors[:, None], z, pick_candidates(base, 0)).tokens
    return base, models.embed(jnp.arange(base.shape[-1])), drafts


def test_the_head_drafts_as_ours_token_by_token(exported):
    models, folder = exported
    ours, config = models.drafter.config, read_config(folder)
    assert config == (ours.block_size, ours.shift_label, ours.pure_draft_prefix_len)
    assert (config.first_slot, config.num_drafts) == (ours.first_slot, ours.num_drafts)
    random = np.random.default_rng(0)
    z = jnp.asarray(random.standard_normal((ROWS, config.num_drafts, ours.hidden_size)), jnp.float32)
    anchors = jnp.asarray(random.integers(0, ours.vocab_size, ROWS), jnp.int32)
    base, table, drafts = draft_here(models, z, anchors)
    head = read_head(folder, jnp.float32, ours.hidden_size, ours.vocab_size)
    theirs = roll_out_there(head, lambda tokens: table[tokens], base, z, anchors, config.pure_draft_prefix_len)
    assert theirs.tolist() == drafts.tolist()
    assert (drafts != base.argmax(-1)).any()  # the head changes something


@pytest.fixture
def folders(tmp_path):
    """(target, drafter): folders that hold a config.json alone."""
    for name, config in (
        ("target", {"rope_theta": 1e6}),
        ("drafter", {"rope_theta": 1e6, "block_size": 8, "dflash_config": {"projector_type": "domino"}}),
    ):
        (tmp_path / name).mkdir()
        write_keys(tmp_path / name, **config)
    write_keys(tmp_path / "drafter", shift_label=True, pure_draft_prefix_len=1)
    return tmp_path / "target", tmp_path / "drafter"


def write_keys(folder, **keys):
    file = folder / "config.json"
    raw = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(raw | keys))


def paths(folders) -> list[str]:
    return [word for pair in zip(TARGET, map(str, folders), strict=True) for word in pair]


@pytest.mark.parametrize(("shifted", "rows"), [(True, "9"), (False, "8")])
def test_the_launcher_asks_for_all_drafts_of_the_block(folders, shifted, rows):
    write_keys(folders[1], shift_label=shifted)
    words = server_arguments([*paths(folders), "--tp-size", "4"])
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options["--speculative-num-draft-tokens"] == rows
    assert options["--speculative-algorithm"] == "DFLASH"
    assert options["--tp-size"] == "4"


@pytest.mark.parametrize(
    ("place", "keys", "named"),
    [
        ("drafter", {"dflash_config": {"projector_type": "dspark"}}, "dspark"),
        ("drafter", {"shift_label": None}, "shift_label"),
        ("drafter", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("drafter", {"conv_kernel_size": 2}, "conv_kernel_size"),
        ("drafter", {"rope_parameters": {"rope_theta": 5e5}}, "500000"),
        ("target", {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta"),
    ],
)
def test_a_folder_that_the_engine_would_misread_is_refused_by_the_key(folders, place, keys, named):
    write_keys(folders[0].parent / place, **keys)
    with pytest.raises(Unsupported, match=named):
        server_arguments(paths(folders))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--speculative-num-draft-tokens", "10"], "10.* 9 rows"),
        (["--speculative-algorithm", "EAGLE"], "EAGLE.*DFLASH"),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_both_values(folders, words, named):
    with pytest.raises(Unsupported, match=named):
        server_arguments([*paths(folders), *words])


def test_a_head_of_another_target_is_refused(tmp_path):
    models = random_models(5, **KINDS["shifted, prefix 1"])
    save_drafter(tmp_path, models.drafter.config, models.drafter_params, "float32")
    with pytest.raises(Unsupported, match="64 tokens.*65 tokens"):
        read_head(tmp_path, jnp.float32, models.drafter.config.hidden_size, 65)


def launch_with(engine_folder) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "integrations.sglang_jax.launch"]
    environment = os.environ | {"PYTHONPATH": str(engine_folder)}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_another_engine_is_refused_by_what_differs(tmp_path):
    package = tmp_path / "sgl_jax" / "srt" / "speculative"
    package.mkdir(parents=True)
    (package / "dflash_worker.py").write_text(
        "class DFlashWorker:\n"
        "    def __init__(self, server_args, target_worker): ...\n"
        "    def _run_jit_draft_block(self, plan, tables): ...\n"
    )
    ran = launch_with(tmp_path)
    assert ran.returncode == 2
    assert "cddbf6f1" in ran.stderr
    assert "_init_jit_draft_block is missing" in ran.stderr
    assert "(self, plan, tables) instead of (self, plan)" in ran.stderr
    assert "target_worker" not in ran.stderr  # the constructor is as expected


# ------------------------------------------------------------------------------------------------------ the engine


@pytest.fixture(scope="module")
def engine():
    """Skips where PYTHON has no sglang-jax."""
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sgl_jax') is None)"
    if subprocess.run([PYTHON, "-c", question], check=False).returncode:
        pytest.skip(f"{PYTHON} has no sgl_jax; SGLANG_JAX_PYTHON names one that has")


def decode_in_the_engine(rows, prompts, scratch, **choices):
    """What tests/helpers/sglang_jax_rounds.py writes, with the folders target and drafter of `scratch`."""
    options = {
        "model_path": str(scratch / "target"),
        "speculative_draft_model_path": str(scratch / "drafter"),
        "speculative_algorithm": "DFLASH",
        "speculative_eagle_topk": 1,
        "speculative_num_steps": 1,
        "speculative_num_draft_tokens": rows,
    }
    job = {"options": options | choices, "prompts": prompts, "max_tokens": NEW_TOKENS}
    (scratch / "job.json").write_text(json.dumps(job))
    words = [PYTHON, "-m", "tests.helpers.sglang_jax_rounds", scratch / "job.json", scratch / "answers.json"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads((scratch / "answers.json").read_text())


@pytest.mark.slow(minutes=3)
@pytest.mark.parametrize(
    ("golden", "prefix", "options"),
    [
        ("tied_shift", 1, {}),
        ("untied_noshift", 0, {"disable_overlap_schedule": True}),
        ("untied_noshift", 2, {}),
    ],
    ids=str,
)
def test_the_engine_emits_our_texts_in_our_rounds(engine, golden, prefix, options, tmp_path):
    models, prompts = golden_models(golden), [case["prompt"] for case in load_golden(golden).figures["generate"]]
    config = dataclasses.replace(models.drafter.config, pure_draft_prefix_len=prefix)
    save_drafter(tmp_path / "drafter", config, models.drafter_params, "float32")
    shutil.copytree(GOLDEN / golden / "target", tmp_path / "target")
    raw = json.loads((tmp_path / "target" / "config.json").read_text())
    write_keys(tmp_path / "target", rope_theta=(raw.get("rope_parameters") or raw)["rope_theta"])

    models = dataclasses.replace(models, drafter=models.drafter.clone(config=config))
    ours = make_generator(models, cache_length=128, max_new_tokens=NEW_TOKENS).generate(prompts, "draft")
    theirs = decode_in_the_engine(config.num_drafts + 1, prompts, tmp_path, **options)
    rounds = [answer.accept_lengths for answer in ours]
    lengths = sum(rounds, [])
    print(f"{golden}, prefix {prefix}: {len(lengths)} rounds, τ {sum(lengths) / len(lengths):.2f}")
    for answers in theirs["answers"], theirs["again"]:
        assert [answer["token_ids"][:NEW_TOKENS] for answer in answers] == texts(ours)
        assert [reference_accept_lengths(answer | {"max_new_tokens": NEW_TOKENS}) for answer in answers] == rounds
    assert sum(answer["cached"] for answer in theirs["again"]) > 0  # from the prefix cache
    assert "greedy" in theirs["sampled"]  # a temperature is refused, and not ignored
