"""identity.py: the same model wherever and however it is stored, and another one after any change; files read once."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from domino_jax.data.index import tokenizer_digest
from domino_jax.weights import hf, identity
from domino_jax.weights.identity import drafter_identity, target_identity
from tests.helpers.models import rewrite_tensors
from tests.helpers.paths import ASSETS
from tests.helpers.train_runs import GOLDEN

MATRIX = "model.layers.3.self_attn.q_proj.weight"


@pytest.fixture
def target(tmp_path):
    return shutil.copytree(GOLDEN / "target", tmp_path / "target")


def rewrite_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_another_path_other_files_and_names_that_decide_nothing_change_nothing(target):
    tensors = load_file(target / hf.SINGLE)
    (target / hf.SINGLE).unlink()
    shards = {f"part-{n}.safetensors": list(tensors)[n::2] for n in range(2)}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, target / file, {"format": "np"})
    places = {name: file for file, names in shards.items() for name in names}
    (target / hf.INDEX).write_text(json.dumps({"weight_map": places}))
    rewrite_json(target / "config.json", _name_or_path="elsewhere", transformers_version="0")
    assert target_identity(target) == target_identity(GOLDEN / "target")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda folder: rewrite_tensors(folder, {MATRIX: lambda array: array + np.eye(*array.shape)}), "weights"),
        (lambda folder: rewrite_tensors(folder, {MATRIX: lambda array: array.astype("float16")}), "weights"),
        (lambda folder: rewrite_json(folder / "config.json", rms_norm_eps=2e-6), "weights"),
        (lambda folder: rewrite_json(folder / "generation_config.json", eos_token_id=5), "stop_ids"),
    ],
    ids=["merged", "another dtype", "config", "stop id"],
)
def test_a_change_of_weights_config_or_stop_ids_makes_another_target(target, change, part):
    before = target_identity(target)
    change(target)
    assert {key for key, value in target_identity(target).items() if value != before[key]} == {part}


@pytest.fixture
def texts(tmp_path):
    """A target's folder without weights."""
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ASSETS / "tiny_qwen3" / file, tmp_path)
    return tmp_path


def flag_first_token(folder):
    """The first added token takes the spaces before it."""
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    rewrite_json(folder / "tokenizer.json", added_tokens=[{**tokens[0], "lstrip": True}, *tokens[1:]])


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
        lambda folder: rewrite_json(folder / "tokenizer.json", normalizer={"type": "Lowercase"}),
        flag_first_token,
        lambda folder: rewrite_json(folder / "tokenizer_config.json", split_special_tokens=True),
    ],
    ids=["template", "normalizer", "flag of an added token", "settings"],
)
def test_any_change_of_tokenizer_or_template_makes_another_target_and_other_rows(texts, change):
    before, rows = target_identity(texts), tokenizer_digest(hf.load_tokenizer(texts))
    change(texts)
    after = target_identity(texts)
    assert after == {**before, "tokenizer": after["tokenizer"]} != before
    assert tokenizer_digest(hf.load_tokenizer(texts)) != rows


def test_the_same_tokenizer_in_other_files_is_the_same(texts):
    before = target_identity(texts)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (texts / name).write_text(json.dumps(json.loads((texts / name).read_text()), indent=7, sort_keys=True))
    template = (texts / "chat_template.jinja").read_text()
    (texts / "chat_template.jinja").unlink()
    rewrite_json(texts / "tokenizer_config.json", chat_template=template, name_or_path="elsewhere")
    assert target_identity(texts) == before


def test_a_head_that_was_trained_further_and_another_order_of_tokens_make_another_drafter(tmp_path):
    workdir = tmp_path / "run"
    folder = shutil.copytree(GOLDEN / "drafter", workdir / "export")
    before = drafter_identity(GOLDEN / "drafter")
    assert drafter_identity(workdir) == before
    save_file({"token_order": np.arange(4, dtype=np.int32)}, folder / hf.TOKEN_ORDER)
    ordered = drafter_identity(workdir)
    rewrite_tensors(folder, {"prefix_gru.weight_hh_l0": np.negative})
    assert len({str(one) for one in (before, ordered, drafter_identity(workdir))}) == 3


def test_a_file_is_read_again_only_after_a_change_even_one_that_keeps_size_and_date(target, monkeypatch, tmp_path):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    read, digest = [], identity._digest_bytes
    monkeypatch.setattr(identity, "_digest_bytes", lambda *place: read.append(place) or digest(*place))
    file = target / hf.SINGLE
    os.utime(file, ns=(0, 0))
    first = target_identity(target)
    tensors, read[:] = len(read), []
    assert target_identity(target) == first and tensors > 60 and not read
    rewrite_tensors(target, {MATRIX: np.negative})
    os.utime(file, ns=(0, 0))
    assert target_identity(target) != first and len(read) == tensors


def test_a_file_written_a_moment_ago_and_a_cache_that_cannot_be_written_are_read_every_time(target, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", "/dev/null/cache")
    first = target_identity(target)
    rewrite_tensors(target, {MATRIX: np.negative})
    assert target_identity(target) != first
