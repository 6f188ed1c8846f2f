"""An engine that opens our exported drafters emits the same texts in the same rounds as our own decode loop.

VLLM_PYTHON names the Python of an environment with vLLM's CPU build (CONTRIBUTING.md); without it, the Python of
the tests is looked at.
"""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

from domino_jax.method.drafters import new_drafter
from domino_jax.method.pair import Pair
from domino_jax.weights.drafter import load_drafter
from tests.helpers.decoding_models import make_generator, texts
from tests.helpers.models import load_golden
from tests.helpers.paths import ROOT
from tests.helpers.train_runs import CASES, GOLDEN, arguments, start, training_files

PYTHON = os.environ.get("VLLM_PYTHON", sys.executable)
NUM_DRAFTS, NEW_TOKENS = 5, 40
# Whole prompts and their ends; the drafters are trained on answers to the whole ones alone.
PROMPTS = [case["prompt"][skipped:] for case in CASES for skipped in (0, 3, 6)]
# Steps after which the drafters are neither useless nor perfect, and what their recipes change.
HEADS = {
    "none": {
        "config.drafter.num_layers": 2,
        "config.drafter.target_layer_ids": "(1,3)",
        "config.drafter.block_size": NUM_DRAFTS + 1,
        "config.drafter.mask_token_id": 259,
        "config.train.num_anchors": 16,
    },
    "eagle3": {
        "config.drafter.target_layer_ids": "(1,2,4)",
        "config.drafter.eagle3.draft_vocab_size": 96,
        "config.drafter.eagle3.passes": 3,
    },
}
VLLM_METHODS = {"none": "dflash", "eagle3": "eagle3"}
STEPS = 60
# One process, no network, and quiet.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="module")
def vllm():
    """Skips where PYTHON has no vLLM."""
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([PYTHON, "-c", question], check=False).returncode:
        pytest.skip(f"{PYTHON} has no vllm; VLLM_PYTHON names one that has")


@pytest.fixture(params=HEADS)
def exported(request, vllm, tmp_path):
    """(head, the exported folder) of a short run on the golden target's answers."""
    choices = {"config__train__steps": STEPS, "config__checkpoint__every": STEPS}
    drafter = {"config.drafter.head": request.param, **HEADS[request.param]}
    assert start(arguments(training_files(tmp_path), tmp_path / "run", drafter, **choices)) == 0
    return request.param, tmp_path / "run" / "export"


def decode_here(folder):
    """Our answers, each with its accept_lengths."""
    target = load_golden("tied_shift").target
    config, params = load_drafter(folder, target.config, jnp.float32)
    models = Pair(target.module, target.params, new_drafter(config), params)
    generator = make_generator(models, cache_length=128, max_new_tokens=NEW_TOKENS, num_drafts=NUM_DRAFTS)
    return generator.generate(PROMPTS, "draft")


def decode_in_vllm(head, folder, scratch):
    """vLLM's answers, each with the tokens of its steps."""
    drafts = {"method": VLLM_METHODS[head], "model": str(folder), "num_speculative_tokens": NUM_DRAFTS}
    job = {
        "options": {"model": str(GOLDEN / "target"), "speculative_config": drafts},
        "prompts": PROMPTS,
        "max_tokens": NEW_TOKENS,
        "runs": [{"together": 1}],
    }
    (scratch / "job.json").write_text(json.dumps(job))
    program = ROOT / "tests" / "helpers" / "vllm_rounds.py"
    words = [PYTHON, "-P", program, scratch / "job.json", scratch / "answers.json"]
    ran = subprocess.run(words, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads((scratch / "answers.json").read_text())["runs"][0]


@pytest.mark.slow(minutes=2)
def test_vllm_emits_our_texts_in_our_rounds(exported, tmp_path):
    head, folder = exported
    ours, theirs = decode_here(folder), decode_in_vllm(head, folder, tmp_path)
    rounds = [answer.accept_lengths for answer in ours]
    print(f"{head}: {sum(map(len, rounds))} rounds, τ {sum(map(sum, rounds)) / sum(map(len, rounds)):.2f}")
    assert [answer["token_ids"] for answer in theirs] == texts(ours)
    assert [answer["steps"] for answer in theirs] == [[1, *lengths] for lengths in rounds]
    lengths = sum(rounds, [])
    assert 1.3 < sum(lengths) / len(lengths) < NUM_DRAFTS  # drafts are accepted and rejected
