"""benchmarks/ablation.py: three runs that differ in one thing each, resumed where they were, shown in a table."""

import json
import math
import pathlib

import pytest

from benchmarks import ablation
from domino_jax.runtime.errors import DominoError
from tests.helpers.paths import ROOT

GOLDEN = ROOT / "tests" / "golden" / "tied_shift"
TAU = {"dflash": 2.0, "no_curriculum": 1.5, "curriculum": 2.5}


class Commands:
    """In the place of the real commands: writes what they would, with figures known beforehand."""

    def __init__(self):
        self.trained = []

    def __call__(self, command, workdir, title):
        flags = dict(flag.removeprefix("--").split("=", 1) for flag in command[1:])
        if command[0] == "domino_jax.regenerate":
            pathlib.Path(flags["output"]).write_text("{}\n" * 7)
            return
        self.trained.append((title, flags))
        folder = pathlib.Path(flags["workdir"])
        folder.mkdir()
        name = title.split("_seed")[0]
        steps, seed = int(flags["config.train.steps"]), int(flags["config.seed"])
        tau = TAU[name] + 0.1 * seed
        rows = [
            {"step": step, "base_loss": 4 * math.exp(-step / 50) + tau, "final_loss": 1.0}
            for step in range(2, steps + 1, 2)
        ]
        fixed = {"eval_tau_per_prompt": tau + 1, "eval_tau_backbone": tau - 0.25, "eval_identical": 1.0}
        rows += [{"step": step, "eval_tau": tau * step / steps, **fixed} for step in (steps // 2, steps)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps({**row, "seconds": 90.0}) + "\n" for row in rows))
        recipe = {
            "target": {"dtype": "float32"},
            "train": {"steps": steps, "batch_size": 8, "num_anchors": 48},
            "data": {"train": flags["config.data.train"], "layout": "pack"},
            "drafter": {"block_size": 8},
            "eval": {"num_prompts": 64},
        }
        (folder / "config.json").write_text(json.dumps(recipe))
        environment = {
            "date": "2026-01-02T03:04:05+00:00",
            "device_kinds": {"cpu": 1},
            "cores": 2,
            "packages": {"jax": "1", "flax": "2", "optax": "3"},
            "domino_jax": "0",
            "python": "3.11",
        }
        (folder / "env.json").write_text(json.dumps(environment))


@pytest.fixture
def commands(monkeypatch):
    commands = Commands()
    monkeypatch.setattr(ablation, "run", commands)
    return commands


def start(tmp_path, *more):
    ablation.main([f"--workdir={tmp_path / 'work'}", f"--output={tmp_path / 'docs'}", *more])
    return (tmp_path / "docs" / "results.md").read_text()


def test_the_runs_differ_in_the_head_and_in_lambda_alone(tmp_path, commands):
    start(tmp_path, "--steps=20")
    flags = [flags for _, flags in commands.trained]
    common = set.intersection(*(set(given.items()) for given in flags))
    own = [{key: value for key, value in given.items() if (key, value) not in common} for given in flags]
    for given in own:
        del given["workdir"]
    assert own == [
        {"config.drafter.head": "none", "config.drafter.shift_label": "True"},
        {"config.train.lambda_start": "0.0"},
        {"config.train.lambda_start": "1.0"},
    ]
    assert ("config.data.regenerate", "False") in common


def test_the_table_holds_the_figures_of_the_last_evaluation(tmp_path, commands):
    page = start(tmp_path, "--steps=200")
    assert "| plain DFlash | 2.000 | 3.000 | 1.750 | 2.0" in page
    assert "| Domino, curriculum | 2.500 | 3.500 | 2.250 | 2.5" in page
    assert "τ of the head with the curriculum is 25.0 % above that of plain DFlash and 66.7 % above" in page
    assert "| 1.000 | 100.0% |" in page
    assert "7 rows" in page and "2026-01-02, 1 × cpu (2 cores), float32" in page and "jax 1, flax 2, optax 3" in page
    assert "python -m benchmarks.ablation --workdir=WORKDIR --steps=200 --seeds=0\n" in page
    assert str(tmp_path) not in page
    assert (tmp_path / "docs" / "results.png").read_bytes().startswith(b"\x89PNG")


def test_several_seeds_are_a_mean_and_half_the_range(tmp_path, commands):
    page = start(tmp_path, "--steps=20", "--seeds=0,2")
    assert "| plain DFlash | 2.100 ± 0.100 | 3.100 ± 0.100 |" in page
    assert len(commands.trained) == 6


def test_finished_runs_are_taken_as_they_are(tmp_path, commands):
    start(tmp_path, "--steps=20")
    start(tmp_path, "--steps=20", "--seeds=0,1")
    assert [title for title, _ in commands.trained[3:]] == [
        "dflash_seed1_steps20",
        "no_curriculum_seed1_steps20",
        "curriculum_seed1_steps20",
    ]


def test_a_finished_run_of_other_flags_is_refused(tmp_path, commands):
    start(tmp_path, "--steps=20")
    with pytest.raises(DominoError, match="other flags"):
        start(tmp_path, "--steps=20", "--config.train.batch_size=2")


def test_an_unknown_flag_is_refused(tmp_path, commands, capsys):
    with pytest.raises(SystemExit):
        start(tmp_path, "--step=20")
    assert "--step=20 is no flag" in capsys.readouterr().err


def test_a_run_that_fails_is_reported_with_the_end_of_its_log(tmp_path):
    with pytest.raises(DominoError, match="(?s)broken left with exit code 1.*No module named"):
        ablation.run(["no_such_module"], tmp_path, "broken")


@pytest.mark.slow(minutes=2)
def test_the_whole_of_it_on_a_small_random_target(tmp_path):
    cases = json.loads((GOLDEN / "golden.json").read_text())["generate"]
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{index}", "token_ids": case["prompt"]} for index, case in enumerate(cases)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "target.path": GOLDEN / "target",
        "drafter.mask_token_id": 259,
        "drafter.num_layers": 1,
        "drafter.target_layer_ids": "(1,3)",
        "drafter.block_size": 4,
        "drafter.gru_hidden_dim": 16,
        "drafter.emb_dim": 8,
        "data.train": prompts,
        "data.max_length": 64,
        "train.batch_size": 2,
        "train.num_anchors": 8,
        "eval.prompts": prompts,
        "decode.max_new_tokens": 8,
        "decode.cache_length": 128,
        "regenerate.max_new_tokens": 16,
    }
    page = start(tmp_path, "--steps=3", *(f"--config.{key}={value}" for key, value in changes.items()))
    assert all(variant.title in page for variant in ablation.VARIANTS.values())
    assert (tmp_path / "docs" / "results.png").exists()
