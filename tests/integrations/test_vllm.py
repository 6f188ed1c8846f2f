"""The Domino plug-in for vLLM drafts as we do: its head on shared arrays, and the rounds in both of its runners.

VLLM_PYTHON names the Python of an environment with vLLM's CPU build (CONTRIBUTING.md); without it, the Python of the
tests is looked at. The tests of the head need torch, and only those at the end need the engine.
"""

import ast
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from domino_jax.method.candidates import pick_candidates
from domino_jax.method.drafters import new_drafter
from domino_jax.method.pair import Pair
from domino_jax.method.rollout import roll_out
from domino_jax.models.qwen3 import Qwen3
from domino_jax.weights.drafter import load_drafter, save_drafter
from domino_jax.weights.target import load_target
from integrations.vllm.domino_vllm.drafter import Unsupported, candidates, check_options, read_head_config
from tests.helpers.decoding_models import DRAFTERS, golden_models, make_generator, random_models, texts
from tests.helpers.models import GOLDEN_SETS, load_golden
from tests.helpers.paths import ROOT
from tests.helpers.train_runs import GOLDEN, arguments, start, training_files
from tests.processes.test_engines import ENVIRONMENT, PROMPTS, PYTHON

PLUGIN = ROOT / "integrations" / "vllm"
KINDS = DRAFTERS | {
    "shifted, prefix 0": {"shift_label": True, "pure_draft_prefix_len": 0},
    "unshifted, prefix 1": {"shift_label": False, "pure_draft_prefix_len": 1},
    "unshifted, prefix 2": {"shift_label": False, "pure_draft_prefix_len": 2},
}
NEW_TOKENS = 40


# ------------------------------------------------------------------------------------------------------- the head


def hf_config(folder) -> SimpleNamespace:
    raw = json.loads((folder / "config.json").read_text())
    return SimpleNamespace(to_dict=lambda: raw)


def draft_there(folder, count, base, z, anchors, table) -> list[list[int]]:
    """The drafts of the plug-in's head, with the tensors of the drafter in `folder`."""
    torch = pytest.importorskip("torch")
    from integrations.vllm.domino_vllm.head import Head

    config, (width, vocab) = read_head_config(hf_config(folder)), (z.shape[-1], base.shape[-1])
    head = Head(width, config.gru_hidden_dim, config.emb_dim, vocab, config.pure_draft_prefix_len, count)
    stored, table = load_file(folder / "model.safetensors"), torch.tensor(np.asarray(table))
    head.load_state_dict({name: torch.tensor(stored[name]) for name in head.state_dict()})
    base, z, anchors = (torch.tensor(np.asarray(array)) for array in (base, z, anchors))
    drafts, corrected = head(base, z, anchors, lambda tokens: table[tokens], keep_logits=True)
    assert [logits.shape[-1] for logits in corrected] == [min(count or vocab, vocab)] * config.num_drafts
    return drafts.tolist()


def draft_here(models, count, base, z, anchors) -> list[list[int]]:
    program = jax.jit(
        lambda *arrays: roll_out(models, arrays[2][:, None], arrays[1], pick_candidates(arrays[0], count)).tokens
    )
    return program(base, z, anchors).tolist()


def assert_same_drafts(models, folder, count, base, z, anchors):
    table = models.embed(jnp.arange(base.shape[-1]))
    drafts = draft_here(models, count, base, z, anchors)
    assert draft_there(folder, count, base, z, anchors, table) == drafts
    assert (np.asarray(drafts) != np.asarray(base.argmax(-1))).any()  # the head changes something


@pytest.mark.parametrize("count", [0, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_head_drafts_as_ours_token_by_token(kind, count, tmp_path):
    models = random_models(5, **KINDS[kind])
    ours = models.drafter.config
    save_drafter(tmp_path, ours, models.drafter_params, "float32")
    config = read_head_config(hf_config(tmp_path))
    assert config == tuple(getattr(ours, name) for name in config._fields)
    assert config.num_drafts == ours.num_drafts
    random = np.random.default_rng(0)
    z = jnp.asarray(random.standard_normal((24, config.num_drafts, ours.hidden_size)), jnp.float32)
    anchors = jnp.asarray(random.integers(0, ours.vocab_size, 24), jnp.int32)
    assert_same_drafts(models, tmp_path, count, models.unembed(z), z, anchors)


@pytest.mark.parametrize("count", [0, 64])
@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_the_head_drafts_as_ours_on_the_golden_blocks(name, count):
    golden, models = load_golden(name), golden_models(name)
    rows, columns = np.nonzero(golden.arrays["train.block_valid"])
    first = models.drafter.config.first_slot
    z, base = (
        jnp.asarray(golden.arrays[f"train.{array}"][rows, columns, first:]) for array in ("block_hidden", "base_logits")
    )
    places = golden.arrays["train.anchors"][rows, columns]
    anchors = jnp.asarray(golden.arrays["target.input_ids"][rows, places], jnp.int32)
    assert_same_drafts(models, ROOT / "tests" / "golden" / name / "drafter", count, base, z, anchors)


# ---------------------------------------------------------------------------------------------- what is refused


def vllm_config(keys=(), sizes=(32, 64), stages=1, **options) -> SimpleNamespace:
    """The parts of the engine's config that are checked, for a block of 8 slots, all of which predict."""
    nested = {"mask_token_id": 63, "target_layer_ids": [0], "shift_label": True, "emb_dim": 4} | dict(keys)
    raw = {"block_size": 8, "dflash_config": nested}

    def model(width, vocab, **fields):
        return SimpleNamespace(get_hidden_size=lambda: width, get_vocab_size=lambda: vocab, **fields)

    drafter = model(32, 64, quantization=options.pop("quantization", None))
    drafter.hf_config = SimpleNamespace(to_dict=lambda: raw)
    fields = {"method": "dflash", "num_speculative_tokens": 8, "draft_sample_method": "greedy"}
    fields |= {"use_local_argmax_reduction": False} | options
    return SimpleNamespace(
        model_config=model(*sizes),
        speculative_config=SimpleNamespace(draft_model_config=drafter, **fields),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        additional_config={},
    )


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({"num_speculative_tokens": 9}, "9.* 8 drafts"),
        ({"keys": {"shift_label": False}}, "8.* 7 drafts"),
        ({"keys": {"shift_label": None}}, "shift_label"),
        ({"keys": {"conv_kernel_size": 2}}, "conv_kernel_size"),
        ({"method": "draft_model"}, "draft_model.*dflash"),
        ({"draft_sample_method": "probabilistic"}, "probabilistic.*greedy"),
        ({"quantization": "fp8"}, "fp8.*float"),
        ({"use_local_argmax_reduction": True}, "use_local_argmax_reduction.*Leave the option out"),
        ({"stages": 2}, "pipeline_parallel_size is 2.*tensor_parallel_size"),
        ({"sizes": (32, 65)}, "64.*65"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(choices, named):
    assert check_options(vllm_config()).num_drafts == 8
    with pytest.raises(Unsupported, match=named):
        check_options(vllm_config(**choices))


def test_the_number_of_candidates_is_an_option_of_the_engine():
    config = vllm_config()
    assert candidates(config) == 64
    config.additional_config["domino_head_candidates"] = -1
    with pytest.raises(Unsupported, match="domino_head_candidates is -1"):
        candidates(config)


@pytest.mark.parametrize(
    ("version", "named"),
    [
        ("0.31.2", ["0.32 and 0.33", "0.31.2"]),
        (
            "0.33.1",
            ["hf_config_override has the parameters (config, more) instead", "DFlashProposer.__init__ is missing"],
        ),
    ],
)
def test_another_engine_is_refused_by_what_differs(version, named, tmp_path):
    (tmp_path / "vllm" / "config").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (tmp_path / "vllm" / "config" / "speculative.py").write_text(
        "class SpeculativeConfig:\n    @staticmethod\n    def hf_config_override(config, more): ...\n"
    )
    words = [sys.executable, "-c", "import domino_vllm; domino_vllm.register()"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PLUGIN}"}
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    for text in named:
        assert text in ran.stderr


# ------------------------------------------------------------------------------------------------------ the engine


@pytest.fixture(scope="module")
def unshifted(plugin, tmp_path_factory):
    """(target, drafter): folders of an unshifted drafter after a short run, and of a target with a separate lm_head."""
    scratch = tmp_path_factory.mktemp("unshifted")
    drafter = {
        "config.drafter.shift_label": False,
        "config.drafter.num_layers": 2,
        "config.drafter.target_layer_ids": "(1,3)",
        "config.drafter.block_size": 6,
        "config.drafter.mask_token_id": 259,
        "config.drafter.domino.gru_hidden_dim": 24,
        "config.drafter.domino.emb_dim": 12,
        "config.train.num_anchors": 16,
    }
    choices = {"config__train__steps": 60, "config__checkpoint__every": 60}
    assert start(arguments(training_files(scratch), scratch / "run", drafter, **choices)) == 0
    target = scratch / "target"
    shutil.copytree(GOLDEN / "target", target)
    tensors = load_file(target / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    noise = np.random.default_rng(0).standard_normal(table.shape, np.float32)
    tensors["lm_head.weight"] = table + 0.1 * table.std() * noise
    save_file(tensors, target / "model.safetensors")
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    return target, scratch / "run" / "export"


@pytest.fixture(scope="module")
def shifted():
    """(target, drafter): folders of the golden pair."""
    return GOLDEN / "target", GOLDEN / "drafter"


def open_pair(target, drafter) -> Pair:
    config, params = load_target(target, jnp.float32)
    drafter_config, drafter_params = load_drafter(drafter, config, jnp.float32)
    return Pair(Qwen3(config), params, new_drafter(drafter_config), drafter_params)


def decode_in_vllm(plugin, runner, job, scratch) -> dict:
    """What tests/helpers/vllm_rounds.py writes."""
    (scratch / "job.json").write_text(json.dumps(job))
    words = [PYTHON, "-P", ROOT / "tests/helpers/vllm_rounds.py", scratch / "job.json", scratch / "answers.json"]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(plugin), "VLLM_USE_V2_MODEL_RUNNER": runner}
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads((scratch / "answers.json").read_text())


def test_the_engines_estimator_of_acceptance_gets_the_corrected_logits(plugin):
    words = [PYTHON, "-P", ROOT / "tests/helpers/vllm_adaptive.py"]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(plugin)}
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    sure, best = (np.asarray(found[name]).ravel() for name in ("sure", "best"))
    assert (0 < sure).all() and (sure < 1).all()  # -1 where it was not called
    np.testing.assert_array_equal(np.argsort(sure), np.argsort(best))


# By class of the engine the methods that ours replace: "calls super" or what the engine's version calls, all of which
# ours calls too or leaves out for the reason beside it. Another set of calls means that a version expects more.
GREEDY = "drafts are greedy, and other settings are refused"
REPLACED = {
    ("v1/spec_decode/dflash.py", "DFlashProposer"): {"__init__": "calls super", "set_inputs_first_pass": "calls super"},
    ("v1/spec_decode/llm_base_proposer.py", "SpecDecodeBaseProposer"): {
        "_sample_draft_tokens": {
            "_greedy_sample": "argmax of the base logits: ours is the head's",
            "model.compute_logits": "called",
            "_sample_from_logits": GREEDY,
            **dict.fromkeys(
                ("vocab_mapping.constrain_draft_logits", "vocab_mapping.map_draft_to_target_ids"),
                "a drafter with another vocabulary is refused",
            ),
        }
    },
    ("v1/worker/gpu/spec_decode/dflash/speculator.py", "DFlashSpeculator"): {
        "__init__": "calls super",
        "_generate_draft": {"_run_model": "called", "sample_draft": "replaced, see below"},
    },
    ("v1/worker/gpu/spec_decode/speculator.py", "DraftModelSpeculator"): {
        "sample_draft": {
            "compute_draft_logits": "by model.compute_logits",
            "get_draft_top_tokens": "use_local_argmax_reduction is refused",
            "_maybe_predict_acceptance": "called",
            "draft_watermarker.sample": GREEDY,
        }
    },
}


def calls_of(path, class_name, method) -> set[str]:
    """What a method calls of its object, as "name" or "attribute.name"."""
    [body] = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == class_name]
    [function] = [node for node in body.body if getattr(node, "name", "") == method]
    texts = [ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    called = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    called |= {text for text in texts if text.endswith(".sample")}  # chosen first, called later
    return {name.removeprefix("self.") for name in called if name.startswith("self.")}


def test_every_method_of_the_engine_that_ours_replaces_calls_what_is_known():
    # Of the installed sources, so that no engine has to run.
    question = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    ran = subprocess.run([PYTHON, "-P", "-c", question], capture_output=True, text=True, check=False)
    if ran.returncode:
        pytest.skip(f"{PYTHON} has no vllm; VLLM_PYTHON names one that has")
    folder = pathlib.Path(ran.stdout.strip())
    ours = ast.parse((PLUGIN / "domino_vllm" / "proposer.py").read_text())
    replaced = {
        (node.name, method.name)
        for node in ours.body
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    }
    assert replaced == {
        ("DominoProposer", "__init__"),
        ("DominoProposer", "set_inputs_first_pass"),
        ("DominoProposer", "_sample_draft_tokens"),
        ("DominoSpeculator", "__init__"),
        ("DominoSpeculator", "_generate_draft"),
    }
    for (path, class_name), methods in REPLACED.items():
        for method, known in methods.items():
            if known != "calls super":
                assert calls_of(folder / path, class_name, method) == set(known), method


CHUNKED = {"max_num_batched_tokens": 24, "enable_chunked_prefill": True}
CACHED = {"enable_prefix_caching": True, "block_size": 32}


@pytest.mark.slow(minutes=2)
@pytest.mark.parametrize(("runner", "drafter"), [("0", "DominoProposer"), ("1", "DominoSpeculator")])
@pytest.mark.parametrize(
    ("pair", "prefix", "candidates", "options"),
    [("shifted", 2, 64, CACHED), ("unshifted", 1, 0, CHUNKED)],
    ids=["shifted", "unshifted"],
)
def test_the_engine_emits_our_texts_in_our_rounds(
    plugin, request, tmp_path, runner, drafter, pair, prefix, candidates, options
):
    models = open_pair(*request.getfixturevalue(pair))
    config = dataclasses.replace(models.drafter.config, pure_draft_prefix_len=prefix)
    models = dataclasses.replace(models, drafter=models.drafter.clone(config=config))
    save_drafter(tmp_path / "drafter", config, models.drafter_params, "float32")
    generator = make_generator(models, cache_length=256, max_new_tokens=NEW_TOKENS, head_candidates=candidates)
    prompts = PROMPTS
    if options is CACHED:  # two pages of each prompt are needed, of which the engine takes all but the last
        prompts = [
            prompt + text for prompt, text in zip(PROMPTS, texts(generator.generate(PROMPTS, "draft")), strict=True)
        ]
    ours = generator.generate(prompts, "draft")

    drafts = {"method": "dflash", "model": str(tmp_path / "drafter"), "num_speculative_tokens": config.num_drafts}
    engine = {"model": str(request.getfixturevalue(pair)[0]), "speculative_config": drafts, "max_num_seqs": 8}
    engine["additional_config"] = {"domino_head_candidates": candidates}
    runs = [{"together": 1}, {"together": 4, "cancel": 3}, {"together": 4, "temperature": 1.0}]
    job = {"options": engine | options, "prompts": prompts, "max_tokens": NEW_TOKENS, "runs": runs}
    theirs = decode_in_vllm(plugin, runner, job, tmp_path)

    assert theirs["drafter"] == drafter
    rounds = [answer.accept_lengths for answer in ours]
    lengths = sum(rounds, [])
    print(f"{pair}, {drafter}: {len(lengths)} rounds, τ {sum(lengths) / len(lengths):.2f}")
    alone, together, sampled = theirs["runs"]
    for answers in alone, together:
        assert [answer["token_ids"] for answer in answers] == texts(ours)
        assert [answer["steps"] for answer in answers] == [[1, *lengths] for lengths in rounds]
    assert (sum(answer["cached"] for answer in together) > 0) == (options is CACHED)
    assert [len(answer["token_ids"]) for answer in sampled] == [NEW_TOKENS] * len(prompts)
    assert [answer["token_ids"] for answer in sampled] != texts(ours)
    assert 1.3 < sum(lengths) / len(lengths) < config.num_drafts  # drafts are accepted and rejected


@pytest.mark.slow(minutes=2)
def test_the_benchmark_times_three_modes_in_the_engine(plugin, tmp_path):
    here = {"parts": {"step": {"ms": 2.0}, "round_without_head": {"ms": 3.0}, "round": {"ms": 5.0}}}
    (tmp_path / "here.json").write_text(json.dumps(here))
    words = [PYTHON, ROOT / "benchmarks/device/vllm_decode.py", "--small", f"--here={tmp_path / 'here.json'}"]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(plugin)}
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran.stdout.splitlines()[2:]]
    assert [[mode, ours, ratio] for mode, _, _, _, ours, ratio in rows] == [
        ["plain", "2.00", "1.00"],
        ["dflash", "3.00", "1.50"],
        ["domino", "5.00", "2.50"],
    ]
    assert [float(row[2]) > 0 and float(row[3]) >= 1 for row in rows] == [True] * 3
