"""The draft's constant: measured per sampling setting, stored beside the drafter, found again."""

import json
import math
import pathlib
import shutil

import pytest

from domino_jax import tune
from domino_jax.decoding.sampling import SamplingParams
from domino_jax.errors import DataError, DominoError
from tests.decoding_models import random_models, random_prompts

WARM, HOT = SamplingParams(1.0), SamplingParams(1.5, top_p=0.9)
ASSETS = pathlib.Path(__file__).parent.parent / "assets"


def test_a_stored_constant_is_found_for_its_own_settings_alone(tmp_path):
    tune.store(tmp_path, WARM, tune.Tried(2.0, False, 3.25), 8)
    tune.store(tmp_path, HOT, tune.Tried(math.inf, False, 3.0), 8)
    tune.store(tmp_path, WARM, tune.Tried(1.4, False, 3.5), 16)
    found = [tune.stored_scale(str(tmp_path), sampling) for sampling in (WARM, HOT, SamplingParams(0.9))]
    assert found == [1.4, math.inf, math.inf]
    rows = json.loads((tmp_path / "decoding.json").read_text())["tuned"]
    assert [row["prompts"] for row in rows] == [8, 16]


def test_greedy_decoding_asks_for_no_constant():
    assert tune.stored_scale("/there/is/nothing", SamplingParams()) == math.inf


@pytest.mark.parametrize("text", ['{"tuned": 3}', '{"tuned": [{"draft_scale": 1}]}', "[]"])
def test_a_damaged_file_is_refused(tmp_path, text):
    (tmp_path / "decoding.json").write_text(text)
    with pytest.raises(DataError, match=r"decoding\.json"):
        tune.stored_scale(str(tmp_path), WARM)


def test_every_way_to_draft_is_measured_on_the_same_texts(monkeypatch, capsys):
    monkeypatch.setattr(tune, "SCALES", (1.0,))
    settings = {"stop_ids": (), "cache_slots": 64, "max_new_tokens": 16, "batch_size": 4, "sampling": WARM}
    tried = tune.try_scales(random_models(), random_prompts(8), "domino", None, settings)
    assert [one.name() for one in tried] == ["greedy", "coupled, c = 1", "sampled apart"]
    assert tried[1].tau > tried[2].tau >= 1.0
    assert "parted" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_stores_what_it_found(tmp_path, monkeypatch):
    shutil.copytree(ASSETS / "tiny_domino", tmp_path / "drafter")
    monkeypatch.setattr(tune, "SCALES", (1.0,))
    argv = [
        "tune",
        f"--config={ASSETS.parent / 'configs' / 'tiny.py'}",
        f"--config.drafter.path={tmp_path / 'drafter'}",
    ]
    argv += ["--config.decode.temperature=1.0", "--config.decode.num_prompts=4", "--config.decode.max_new_tokens=32"]
    with pytest.raises(SystemExit) as ended:
        tune.cli.run(tune.main, required=("config",), optional=("prompts",), argv=argv)
    assert ended.value.code == 0
    rows = json.loads((tmp_path / "drafter" / "decoding.json").read_text())["tuned"]
    assert [(row["temperature"], row["prompts"]) for row in rows] == [(1.0, 4)]


def test_greedy_settings_are_refused():
    argv = ["tune", f"--config={ASSETS.parent / 'configs' / 'tiny.py'}"]
    with pytest.raises(DominoError, match="temperature is 0"):
        tune.main(tune.cli.parse(argv, ("config",), ("prompts",)))
