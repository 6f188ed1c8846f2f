"""evaluate.py --server finds nothing wrong with our server, whose rounds are those of the pass."""

import json

import pytest

from tests.helpers.answering import check_flags
from tests.helpers.commands import run

pytestmark = pytest.mark.long


def test_our_server_gives_the_targets_texts_in_the_rounds_of_the_pass(port, tmp_path):
    flags = [*check_flags(tmp_path), "--config.decode.max_new_tokens=96"]
    code = run("evaluate", f"--server=http://127.0.0.1:{port}/v1", *flags)
    evaluation = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    server, [drafter] = evaluation["server"], evaluation["drafters"].values()
    assert code == 0
    assert server["texts"] == {"own": 4, "near_tie": 0, "wrong": 0, "first_wrong": None}
    assert server["prompts"]["same"] == 4 and (server["engine"], server["model"]) == ("domino_jax", "tiny_qwen3")
    tau = drafter["server"]
    assert tau["tau"] == tau["tau_one_pass"] > tau["tau_backbone"] > 2
    assert (tau["drafts"], tau["hint"]) == (8, None)
