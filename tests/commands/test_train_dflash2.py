"""train.py with the head dflash2: what is logged and exported. Restarts are in test_train_command.py."""

import json

import pytest

from domino_jax.method.kinds import parse_config
from domino_jax.training.metrics import read_rows
from domino_jax.weights.drafter import load_drafter
from tests.helpers.golden_files import target_config
from tests.helpers.train_runs import arguments, start, training_files

CHOICES = {
    "config__drafter__head": "dflash2",
    "config__drafter__dflash2__rank": 8,
    "config__drafter__dflash2__top_k": 4,
    "config__drafter__dflash2__alpha": 0.5,
    "config__train__steps": 4,
    "config__train__ema_decay": 0.5,
    "config__train__accumulate": 2,
    "config__checkpoint__every": 2,
    "config__eval__every": 4,
    "config__preflight__rows": 0,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return training_files(tmp_path_factory.mktemp("rows"), prompts=1)


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished") / "run"
    assert start(arguments(files, workdir, **CHOICES)) == 0
    return workdir


def test_a_run_logs_the_selector_and_decodes_the_targets_texts(finished):
    rows = [row for row in read_rows(finished / "metrics.jsonl") if "loss" in row]
    assert [row["selector_alpha"] for row in rows] == [0.5] * 4
    for row in rows:
        assert row["base_loss"] > 0 and 0 <= row["selector_coverage"] <= 1
        # A new drafter's candidates may hold no label at all.
        assert (row["selector_loss"] > 0) == (row["selector_coverage"] > 0)
        assert 1 <= row["serving_accept_len"] <= row["oracle_accept_len"] <= 4
    [judged] = [row for row in read_rows(finished / "metrics.jsonl") if "eval_tau" in row]
    assert judged["eval_identical"] == 1.0


def test_the_export_is_a_dflash2_folder(finished):
    config, _ = load_drafter(finished, target_config("tied_shift"), "float32")
    assert (config.head, config.conv_kernel_size, config.selector_top_k) == ("dflash2", 2, 4)
    raw = json.loads((finished / "export" / "config.json").read_text())
    assert raw["architectures"] == ["DFlash2DraftModel"] and parse_config(raw) == config
    card = (finished / "export" / "README.md").read_text()
    assert "# DFlash2 drafter" in card and "--speculative-algorithm DFLASH" in card and '"method": "dflash"' in card
    assert "\nalpha = 0.5\n" in card
