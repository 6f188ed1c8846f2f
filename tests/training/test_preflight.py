"""preflight.py: what would waste a run is reported, or stops it before the first step."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.models.sharding import make_mesh
from domino_jax.runtime.errors import DataError
from domino_jax.training.preflight import run_preflight
from domino_jax.weights.drafter import load_drafter
from domino_jax.weights.loading import load_target
from tests.helpers.data_files import batches_of, write_rows
from tests.helpers.train_runs import CASES, GOLDEN

ONE = make_mesh(1, 1, 1, jax.devices()[:1])


def greedy_rows():
    """The golden target's greedy answers; the first token of a row is supervised as well."""
    return [
        (case["prompt"] + case["output"], [1] + [0] * (len(case["prompt"]) - 1) + [1] * len(case["output"]))
        for case in CASES
    ]


def foreign_row(seed):
    """An answer of no model."""
    ids = np.random.default_rng(seed).integers(0, 200, 60).tolist()
    return ids, [0] * 20 + [1] * 40


@pytest.fixture(scope="module")
def target():
    return load_target(str(GOLDEN / "target"), "float32")


@pytest.fixture(scope="module")
def drafter(target):
    return load_drafter(GOLDEN / "drafter", target.model.config, np.dtype("float32"))[0]


def preflight(target, drafter, folder, rows):
    file = write_rows(folder, [{"token_ids": ids, "loss_mask": mask} for ids, mask in rows])
    return run_preflight(folder, batches_of(file, max_length=144).rows, target, drafter, ONE, "f1", 0)


def test_the_targets_greedy_answers_are_its_choices(target, drafter, tmp_path, capsys):
    facts = preflight(target, drafter, tmp_path, greedy_rows())
    assert facts["chosen_share"] == 1.0 and "warning" not in capsys.readouterr().out


def test_foreign_answers_lower_the_share_and_are_warned_of(target, drafter, tmp_path, capsys):
    """Every token counts the same, whatever row it is in."""
    rows = [greedy_rows()[0], *map(foreign_row, range(5))]
    facts = preflight(target, drafter, tmp_path, [*rows, *[([1, 2], [0, 0])] * 2])
    ids = jnp.asarray([ids for ids, _ in rows[1:]])
    best = np.asarray(jax.jit(target.model.apply)({"params": target.params}, ids)["logits"].argmax(-1))
    chosen = (best[:, 19:-1] == np.asarray(ids[:, 20:])).sum()
    answer = len(CASES[0]["output"])
    assert facts["chosen_share"] == pytest.approx((answer + chosen) / (answer + 200))
    assert facts["data"] == {
        "fingerprint": "f1",
        "rows": 6,
        "rows_read": 8,
        "rows_without_anchor": 2,
        "rows_left_out": 0,
        "rows_with_evaluated_prompts": 0,
        "tokens": len(CASES[0]["prompt"]) + answer + 300,
        "supervised_tokens": 1 + answer + 200,
    }
    assert json.loads((tmp_path / "preflight.json").read_text()) == facts
    shown = capsys.readouterr().out
    assert "warning" in shown and "domino_jax.regenerate" in shown and "2 have no anchor" in shown
    assert f"mask token {drafter.mask_token_id}" in shown and f"stop ids {target.stop_ids[0]}" in shown
    assert "[[" in shown


def test_a_mask_token_in_the_text_stops_the_run(target, drafter, tmp_path):
    ids, mask = greedy_rows()[1]
    rows = [greedy_rows()[0]] * 300  # more than are drawn
    rows += [([drafter.mask_token_id, 1], [0, 0]), ([*ids[:5], drafter.mask_token_id, *ids[6:]], mask)]
    with pytest.raises(DataError, match="rows.jsonl:302.*\n.*drafter.mask_token_id"):
        preflight(target, drafter, tmp_path, rows)
    assert not (tmp_path / "preflight.json").exists()
