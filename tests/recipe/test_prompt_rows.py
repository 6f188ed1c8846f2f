"""Settings are lowered to what a drafter's block gives, set keys are known, and rows of prompts are grouped."""

import dataclasses
import json

import pytest

from domino_jax.method.settings import TreeSettings
from domino_jax.recipe.models import lower_to_drafter
from domino_jax.recipe.prompt_rows import read_file_rows
from tests.helpers.decoding_models import decode_settings_of, random_models

# Five drafts, as a block of 5 with shifted labels gives.
DRAFTER = random_models(5).drafter.config
TREE = TreeSettings(nodes=64, depth=8, lanes=4, candidates=8)
SETTINGS = decode_settings_of(("domino", "tree"), num_drafts=8, tree=TREE)


def test_values_are_lowered_to_the_drafters_with_a_note_each():
    notes = []
    settings = lower_to_drafter(SETTINGS, DRAFTER, notes.append)
    assert (settings.drafting.num_drafts, settings.drafting.tree.depth, settings.drafting.tree.nodes) == (5, 5, 21)
    block = "this drafter's block of 5 gives at most 5 drafts: lowered to 5."
    assert notes == [
        f"note: config.decode.num_drafts is 8, but {block}",
        f"note: config.decode.tree.depth is 8, but {block}",
        "note: config.decode.tree.nodes is 64, but 4 lanes of depth 5 and the anchor are 21: lowered to 21.",
    ]
    assert settings.round_widths(DRAFTER) == {"domino": 6, "tree": 6}

    fitting = SETTINGS.change(num_drafts=None, tree=dataclasses.replace(TREE, nodes=8, depth=0))
    assert lower_to_drafter(fitting, DRAFTER, pytest.fail) == fitting


def test_rows_of_a_prompts_file_are_grouped_by_task_and_only_texts_name_one(tmp_path):
    tasks = ["b", "a", "b", 7, "a"]
    rows = [{"id": str(i), "prompt": "x", "task": task, "next_turns": ["y"]} for i, task in enumerate(tasks)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_file_rows(str(file), 0)
    grouped = [("0", "b"), ("2", "b"), ("1", "a"), ("4", "a"), ("3", None)]
    assert [(row["id"], row.get("task")) for row in read] == grouped
    assert not any("next_turns" in row for row in read)
    assert [row["id"] for row in read_file_rows(str(file), 2)] == ["0", "1"]
