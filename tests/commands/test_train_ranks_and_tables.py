"""train.py with nested ranks, whose drafter is then cut to a smaller one, and with the tables of another drafter."""

import json
import shutil

import numpy as np
import pytest

from domino_jax import decode, export
from domino_jax.evals import measure
from domino_jax.recipe import cli
from domino_jax.weights.safetensors_file import read_header
from tests.helpers.paths import ROOT
from tests.helpers.train_runs import GOLDEN, arguments, start, training_files

pytestmark = pytest.mark.slow
CHOICES = {
    "config__data__max_length": 112,
    "config__train__steps": 4,
    "config__checkpoint__every": 2,
    "config__preflight__rows": 0,
}
NESTED = {**CHOICES, "config__train__rank_scales": "(0.5,1.0)"}
MARKOV = {
    **CHOICES,
    "config__drafter__head": "markov",
    "config__drafter__markov__rank": 8,
    "config__train__loss": "cross_entropy",
    "config__train__lambda_start": 0.0,
}


def run(workdir, changes, **more):
    return start(arguments(training_files(workdir.parent), workdir, **changes, **more))


def command(main, required, argv, optional=()):
    with pytest.raises(SystemExit) as left:
        cli.run(main, required, optional, ["command", *argv])
    return left.value.code


def exported(folder):
    return {name: np.asarray(tensor.read()) for name, tensor in read_header(folder / "model.safetensors").items()}


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("nested") / "work"
    assert run(workdir, NESTED) == 0
    return workdir


def test_a_restart_draws_the_same_ranks(nested, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(nested, again)
    for name in ("checkpoints/4", "export"):
        shutil.rmtree(again / name)
    (again / "finished.json").unlink()
    assert run(again, NESTED, config__data__train=nested.parent / "rows.jsonl") == 0
    for name, tensor in exported(nested / "export").items():
        assert exported(again / "export")[name].tobytes() == tensor.tobytes(), name


def test_an_export_at_a_smaller_rank_is_that_part_of_the_whole_one(nested, tmp_path, capsys):
    flags = [f"--workdir={nested}", f"--output={tmp_path / 'cut'}"]
    assert command(export.main, ("workdir", "output"), [*flags, "--head_rank=4"], ("head_rank",)) == 0
    assert "its head cut from rank 8 to 4, to" in capsys.readouterr().out
    raw = json.loads((tmp_path / "cut" / "config.json").read_text())["dflash_config"]
    assert (raw["emb_dim"], raw["gru_hidden_dim"]) == (4, 16)
    whole, cut = exported(nested / "export"), exported(tmp_path / "cut")
    parts = {"embed_proj.0.weight": np.s_[:4], "embed_proj.2.weight": np.s_[:, :4]}
    for name, tensor in cut.items():
        np.testing.assert_array_equal(tensor, whole[name][parts[name]] if name in parts else whole[name], strict=True)
    assert command(export.main, ("workdir", "output"), [*flags, "--head_rank=9"], ("head_rank",)) == 2
    assert "--head_rank is 9, but this drafter's head has rank 8" in capsys.readouterr().err
    assert command(export.main, ("workdir", "output"), [*flags, "--head_rank=x"], ("head_rank",)) == 2


def test_a_cut_head_decodes_the_targets_own_text_and_another_rank_is_refused(nested, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "time_rounds", lambda *_: {})
    changes = {"target.path": GOLDEN / "target", "drafter.path": nested, "decode.max_new_tokens": 16}
    changes |= {"decode.cache_length": 128, "decode.modes": "('autoregressive','draft')"}
    flags = [f"--config={ROOT / 'configs' / 'tiny.py'}", f"--prompts={nested.parent / 'prompts.jsonl'}"]
    flags += [f"--config.{key}={value}" for key, value in changes.items()]
    output = tmp_path / "decoded"
    needs = ("config", "output")
    assert command(decode.main, needs, [*flags, "--config.decode.head_rank=4", f"--output={output}"], ("prompts",)) == 0
    report = json.loads((output / "report.json").read_text())
    assert report["settings"]["head_rank"] == 4
    assert report["identical_outputs"]["draft"]["same"] == report["identical_outputs"]["draft"]["of"] == 2
    again = [*flags, "--config.decode.head_rank=9", f"--output={tmp_path / 'refused'}"]
    assert command(decode.main, needs, again, ("prompts",)) == 2
    said = capsys.readouterr().err
    assert "decode.head_rank is 9, but this drafter's head has rank 8" in said and len(said.splitlines()) == 1


def test_tables_of_another_drafter_are_the_first_values_and_stay_where_they_are_frozen(tmp_path):
    source, other = tmp_path / "source", tmp_path / "other"
    assert run(source, MARKOV) == 0
    tables = {"config__train__head_from": source, "config__train__frozen_tables": True, "config__seed": 7}
    assert run(other, MARKOV, **tables) == 0
    before, after = exported(source / "export"), exported(other / "export")
    for name in before:
        same = before[name].tobytes() == after[name].tobytes()
        assert same == name.startswith("markov_head."), name
