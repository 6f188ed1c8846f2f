"""Hugging Face folders: what is read, what is refused before it is opened, and how they are written."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.weights import hf
from tests.helpers.paths import ASSETS, GOLDEN, PACKAGE


def message_of(error: pytest.ExceptionInfo, lines: int = 3) -> str:
    text = str(error.value)
    assert len(text.splitlines()) <= lines
    return text


# ---- which files are opened ------------------------------------------------------------------------------------------


def index_folder(folder: Path, weight_map: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


ESCAPES = ["../out.safetensors", "/etc/out.safetensors", "a\\out.safetensors", "a\0.safetensors", "w.bin", "..", 7]


@pytest.mark.parametrize("shard", ESCAPES)
def test_no_shard_is_opened_when_the_name_of_one_leaves_the_folder(tmp_path, monkeypatch, shard):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "out.safetensors")
    folder = index_folder(tmp_path / "model", {"a": "good.safetensors", "b": shard})
    save_file({"a": np.ones(2, np.float32)}, folder / "good.safetensors")
    monkeypatch.setattr(hf, "read_header", lambda path: pytest.fail(f"opened {path}"))
    with pytest.raises(DataError) as error:
        hf.open_tensors(folder)
    assert repr(shard) in message_of(error)


@pytest.mark.parametrize("name", [hf.SINGLE, "shard.safetensors", "config.json", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_refused(tmp_path, name):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "outside")
    folder = index_folder(tmp_path / "model", {"a": "shard.safetensors"})
    (folder / name).symlink_to(tmp_path / "outside")
    readers = {"config.json": hf.read_config, "tokenizer.json": hf.load_tokenizer}
    with pytest.raises(DataError, match=f"'{name}' leads to .*outside, and nothing outside the folder"):
        readers.get(name, hf.open_tensors)(folder)


def test_a_link_within_the_folder_is_followed_and_a_loop_of_links_refused(tmp_path):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "weights")
    (tmp_path / hf.SINGLE).symlink_to("weights")
    assert list(hf.open_tensors(tmp_path)) == ["a"]
    (tmp_path / "weights").unlink()
    (tmp_path / "weights").symlink_to(hf.SINGLE)
    with pytest.raises(DataError):
        hf.open_tensors(tmp_path)


def hub_snapshot(cache: Path) -> Path:
    """A hub cache as huggingface_hub lays it out, holding the tied golden target."""
    repository = cache / "models--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for number, file in enumerate(sorted((GOLDEN / "tied_shift" / "target").iterdir())):
        (repository / "blobs" / f"{number:040d}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040d}")
    return snapshot


def test_a_hub_snapshot_may_link_into_its_blobs_and_not_beyond(tmp_path):
    snapshot = hub_snapshot(tmp_path)
    assert "model.norm.weight" in hf.open_tensors(snapshot)
    assert hf.read_config(snapshot)["vocab_size"] == 260
    (tmp_path / "secret").write_text("{}")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../secret")
    with pytest.raises(DataError, match="outside the folder"):
        hf.read_config(snapshot)


@pytest.mark.parametrize(
    "weight_map, reason",
    [
        ({"a": "x.safetensors", "c": "x.safetensors"}, "lack them: c"),
        ({"a": "x.safetensors", "b": "gone.safetensors"}, "gone.safetensors cannot be read: No such file"),
        (["x.safetensors"], "no weight_map"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path, weight_map, reason):
    save_file({"a": np.ones(2, np.float32)}, index_folder(tmp_path, weight_map) / "x.safetensors")
    with pytest.raises(DataError) as error:
        hf.open_tensors(tmp_path)
    assert reason in message_of(error)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_folder_of_pickles_is_refused_unopened(tmp_path, name):
    os.mkfifo(tmp_path / name)  # opening it would block for ever
    with pytest.raises(DataError) as error:
        hf.open_tensors(tmp_path)
    assert name in message_of(error) and "not opened" in str(error.value) and "safetensors" in str(error.value)


def test_a_folder_is_refused_by_what_it_lacks(tmp_path):
    assert hf.read_json(tmp_path, "config.json", required=False) == {} and hf.load_tokenizer(tmp_path) is None
    with pytest.raises(DataError, match="holds no config.json"):
        hf.read_config(tmp_path)
    with pytest.raises(DataError, match="holds neither model.safetensors nor"):
        hf.open_tensors(tmp_path)


# ---- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, reason",
    [
        (b"[1]", "JSON list"),
        (b'{"a": 1', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "nested too deeply"),
    ],
)
def test_a_config_that_is_no_plain_json_object_is_refused(tmp_path, text, reason):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(DataError) as error:
        hf.read_json(tmp_path, "config.json")
    assert reason in message_of(error)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda folder: hf.read_json(folder, "config.json")),
        ("tokenizer.json", hf.load_tokenizer),
        (hf.SINGLE, lambda folder: hf.open_tensors(folder)),
    ],
)
def test_a_pointer_or_a_web_page_in_place_of_a_file_is_named(tmp_path, name, read):
    for data, kind in ((b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS"), (b"\n<html>", "a web page")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=kind) as error:
            read(tmp_path)
        assert name in message_of(error)


def test_auto_map_is_ignored_with_one_warning_and_never_imported(tmp_path, caplog):
    (tmp_path / "canary.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')")
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "canary.Model"}, "vocab_size": 3}))
    with caplog.at_level(logging.WARNING):
        assert hf.read_config(tmp_path) == {"vocab_size": 3}
    assert ["auto_map" in record.getMessage() for record in caplog.records] == [True]
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "generation, config, expected",
    [
        ({"eos_token_id": [5, 3]}, {"eos_token_id": 4}, (3, 4, 5)),
        (None, {"eos_token_id": 4}, (4,)),
        ({"eos_token_id": None}, {}, ()),
    ],
)
def test_stop_ids_are_the_union_of_both_files(tmp_path, generation, config, expected):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert hf.stop_ids(tmp_path) == expected


@pytest.mark.parametrize("eos", [1530, [1530], None])
def test_the_token_that_closes_a_turn_is_a_stop_id_whatever_eos_token_id_is(tmp_path, eos):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ASSETS / "tiny_qwen3" / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    tokenizer = hf.load_tokenizer(tmp_path)
    assert hf.stop_ids(tmp_path, tokenizer) == ((1530, 1532) if eos else (1532,))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert hf.stop_ids(tmp_path, hf.load_tokenizer(tmp_path)) == ((1530,) if eos else ())


@pytest.mark.parametrize("value", ["<eos>", [1, "2"], -1])
def test_a_stop_id_that_is_no_token_id_is_refused(tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(DataError, match="eos_token_id"):
        hf.stop_ids(tmp_path)


# ---- finding folders -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_hub(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))


def test_local_folders_never_ask_a_hub(tmp_path, no_hub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "owner" / "name").mkdir(parents=True)
    for path in ("owner/name", "./owner/name", "~/owner/name", str(tmp_path / "owner/name")):
        assert hf.resolve_folder(path).resolve() == (tmp_path / "owner" / "name").resolve()


@pytest.mark.parametrize("path", ["./nope", "~/nope", "s3://bucket/model", "FILE"])
def test_a_local_path_that_is_no_folder_is_a_usage_error(tmp_path, no_hub, path):
    (tmp_path / "file").write_text("")
    path = path.replace("FILE", str(tmp_path / "file"))
    with pytest.raises(DominoError) as error:
        hf.resolve_folder(path)
    assert error.value.exit_code == 2 and path in message_of(error, lines=2)


OFFLINE = """
import sys
from domino_jax.weights import hf
from domino_jax.runtime.errors import DominoError
for name in sys.argv[1:]:
    try:
        print(hf.resolve_folder(name))
    except DominoError as error:
        print(error.exit_code, repr(str(error)))
"""


def test_without_a_hub_a_cached_model_is_found_and_any_other_is_a_short_usage_error(tmp_path):
    """In a separate process: the library reads at import that the hub is off, and where its cache is."""
    snapshot, unknown = hub_snapshot(tmp_path), ["owner/unknown", "no/such/folder", "", "owner/name@elsewhere"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", OFFLINE, "owner/name", *unknown]
    done = subprocess.run(command, cwd=PACKAGE.parent, env=env, capture_output=True, text=True, check=True)
    first, *others = done.stdout.splitlines()
    assert first == str(snapshot)
    for name, line in zip(unknown, others, strict=True):
        assert line.startswith("2 ") and repr(name) in line and line.count("\\n") <= 1


# ---- tokenizer -------------------------------------------------------------------------------------------------------


def test_a_damaged_tokenizer_is_a_short_data_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot be loaded") as error:
        hf.load_tokenizer(tmp_path)
    message_of(error)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_texts_are_cut_as_tokenizer_json_says_whatever_class_is_named(tmp_path, kind):
    """transformers builds the parts of some classes itself."""
    stored = Tokenizer.from_file(str(ASSETS / "tiny_qwen3" / "tokenizer.json"))
    cut = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    stored.pre_tokenizer, stored.normalizer = cut, normalizers.Lowercase()
    stored.model = models.BPE(stored.get_vocab() | {"xyzzy": stored.get_vocab_size()}, [], ignore_merges=True)
    stored.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    text = "Laura has 46 plums, def f(x): return 1234 xyzzy"
    assert hf.load_tokenizer(tmp_path).encode(text) == stored.encode(text).ids


def test_several_chat_templates_need_a_default(tmp_path):
    shutil.copy(ASSETS / "tiny_qwen3" / "tokenizer.json", tmp_path)
    config = json.loads((ASSETS / "tiny_qwen3" / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "{{ tools }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    with pytest.raises(DataError, match="has the chat templates tool_use and none named default"):
        hf.load_tokenizer(tmp_path)


def test_a_template_that_reaches_for_python_is_stopped_by_the_sandbox(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "tiny_qwen3" / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(Exception, match="unsafe"):
        hf.load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "no"}], tokenize=False)
