"""benchmarks/studies/ablations.py: runs that differ in one thing each, shown in a table of docs/ablations.md."""

import json
import math
import pathlib

import pytest

from benchmarks.studies import ablations as ablation
from benchmarks.studies.ablation_tables import TABLES, VARIANTS
from configs import tiny
from domino_jax.recipe import checks as recipes
from tests.helpers.paths import ROOT
from tests.helpers.studies import golden_flags, page_of, stand_in

TAU = {"dflash": 2.0, "no_curriculum": 1.5, "curriculum": 2.5, "layers1": 2.25, "layers2": 2.5, "layers5": 2.75}


class Commands:
    """In the place of the real commands: writes what they would, with figures known beforehand."""

    def __init__(self):
        self.trained = []

    def __call__(self, study, command, title):
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
    return stand_in(monkeypatch, Commands())


def start(tmp_path, *flags):
    return page_of(ablation, tmp_path, *flags)


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
    assert "| plain DFlash | 2.000 | 0.800 | 3.000 | 1.750 | 2.0" in page
    assert "| Domino, curriculum | 2.500 | 1.000 | 3.500 | 2.250 | 2.5" in page
    assert "τ of the head with the curriculum is 25.0 % above that of plain DFlash and 66.7 % above" in page
    assert "All texts are the target's own" in page
    assert "7 training rows" in page and "prompts, 1 seed. 2026-01-02, 1 × cpu (2 cores), float32" in page
    assert "jax 1, flax 2, optax 3" in page
    assert "python -m benchmarks.studies.ablations --workdir=WORKDIR --table=head --steps=200 --seeds=0\n" in page
    assert str(tmp_path) not in page
    assert (tmp_path / "docs" / "ablation_head.png").read_bytes().startswith(b"\x89PNG")


def test_texts_that_are_not_the_targets_own_are_counted(tmp_path, commands):
    start(tmp_path, "--steps=20")
    metrics = tmp_path / "work" / "dflash_seed0_steps20" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"eval_identical": 1.0', '"eval_identical": 0.75'))
    page = start(tmp_path, "--steps=20")
    assert "At least 75.0% of the texts of each run are the target's own" in page


def test_several_seeds_are_a_mean_and_half_the_range_and_are_compared_one_by_one(tmp_path, commands):
    """Plain DFlash has 2.0 and 2.2, the recipe 2.5 and 2.7."""
    page = start(tmp_path, "--steps=20", "--seeds=0,2")
    assert "| plain DFlash | 2.100 ± 0.100 | 0.807 ± 0.007 | 3.100 ± 0.100 |" in page
    assert "with the curriculum is 23.9 % above (by seed +25.0, +22.7) that of plain DFlash" in page
    assert len(commands.trained) == 6


def test_the_table_says_whether_the_seeds_agree_on_the_better_row(tmp_path, commands):
    """Recipe 2.5 and 2.6; two layers the same, five layers 2.75 and, in place of 2.85, 2.55."""
    page = start(tmp_path, "--steps=20", "--table=layers", "--seeds=0,1")
    assert "τ of 1 layer is 9.8 % below (by seed -10.0, -9.6) that of the recipe; the seeds agree on the sign." in page
    assert "τ of 2 layers is equal to (by seed +0.0, +0.0) that of the recipe." in page
    metrics = tmp_path / "work" / "layers5_seed1_steps20" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace(f'"eval_tau": {TAU["layers5"] + 0.1}', '"eval_tau": 2.55'))
    again = start(tmp_path, "--steps=20", "--table=layers", "--seeds=0,1")
    assert "5 layers is 4.0 % above (by seed +10.0, -1.9) that of the recipe; the seeds do not agree" in again


def test_finished_runs_are_taken_as_they_are(tmp_path, commands):
    start(tmp_path, "--steps=20")
    start(tmp_path, "--steps=20", "--seeds=0,1")
    assert [title for title, _ in commands.trained[3:]] == [
        "dflash_seed1_steps20",
        "no_curriculum_seed1_steps20",
        "curriculum_seed1_steps20",
    ]


def test_tables_share_their_common_runs(tmp_path, commands):
    start(tmp_path, "--steps=20")
    page = start(tmp_path, "--steps=20", "--table=layers")
    assert [title.split("_seed")[0] for title, _ in commands.trained[3:]] == ["layers1", "layers2", "layers5"]
    assert "## The head and the curriculum" in page and "## Draft layers" in page
    assert "| Domino, curriculum (3 layers) | 2.500 | 1.000 |" in page and "| 5 layers | 2.750 | 1.100 |" in page
    assert "- τ of 1 layer is 10.0 % below that of the recipe." in page
    assert "--workdir=WORKDIR --table=layers --steps=20 --seeds=0\n" in page
    assert (tmp_path / "docs" / "ablation_layers.png").exists()


def test_a_table_that_is_made_again_takes_the_place_of_the_old_one(tmp_path, commands):
    once = start(tmp_path, "--steps=20", "--table=layers", "--seeds=0,1")
    assert "agree" in once and start(tmp_path, "--steps=20", "--table=layers", "--seeds=0,1") == once


def test_one_training_of_a_table_can_be_run_alone(tmp_path, commands):
    ablation.main([f"--workdir={tmp_path / 'work'}", f"--output={tmp_path / 'docs'}", "--steps=20", "--only=dflash"])
    assert [title for title, _ in commands.trained] == ["dflash_seed0_steps20"]
    assert not (tmp_path / "docs").exists()


def test_an_unknown_flag_is_refused(tmp_path, commands, capsys):
    for flags, message in (
        (["--step=20"], "--step=20 is no flag"),
        (["--only=layers9"], "--only=layers9: choose among dflash, no_curriculum, curriculum"),
        (["--table=x"], "--table: invalid choice"),
    ):
        with pytest.raises(SystemExit):
            start(tmp_path, *flags)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_changes_keys_and_types_of_the_recipe(name):
    config = tiny.get_config()
    changes = VARIANTS[name].changes
    config.update_from_flattened_dict(dict(changes))
    config.eval.final = False  # as the study has it: the final decoding is in the modes of a Domino drafter
    recipes.check(config, "train")


@pytest.mark.parametrize("table", TABLES)
def test_the_page_has_a_section_for_each_table(table):
    page = (ROOT / "docs" / ablation.PAGE).read_text()
    assert page.count(f"<!-- ablation {table}: begin -->") == page.count(f"<!-- ablation {table}: end -->") == 1


def test_every_table_has_the_recipe_and_every_variant_a_table():
    assert all("curriculum" in table.variants for table in TABLES.values())
    assert {name for table in TABLES.values() for name in table.variants} == set(VARIANTS)


@pytest.mark.slow(minutes=3)
def test_the_whole_of_it_on_a_small_random_target(tmp_path):
    page = start(tmp_path, "--steps=3", *golden_flags(tmp_path, drafter__gru_hidden_dim=16, drafter__emb_dim=8))
    assert all(VARIANTS[name].title in page for name in TABLES["head"].variants)
    assert (tmp_path / "docs" / "ablation_head.png").exists()
