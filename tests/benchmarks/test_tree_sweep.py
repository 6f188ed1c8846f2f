"""benchmarks/studies/trees.py: its figures are those of replays called by hand; what the tables pick and measure."""

import dataclasses
import json

import pytest

from benchmarks.studies import trees as tree_sweep
from domino_jax.evals.trees import record, replayed_tau
from domino_jax.method.settings import TreeSettings
from domino_jax.recipe import cli
from domino_jax.runtime.errors import DominoError
from tests.helpers.decoding_models import decode_settings_of, make_generator, random_models, random_prompts
from tests.helpers.models import GOLDEN

SHAPE = {"cache_slots": 96, "max_new_tokens": 16}


@pytest.mark.parametrize("drafter", [{}, {"head": "none", "shift_label": False}], ids=["domino", "dflash"])
def test_what_is_swept_is_what_replays_by_hand_give(monkeypatch, capsys, drafter):
    """128 nodes are more than 4 lanes give, and are left out; None is the whole vocabulary of 64."""
    for name, value in {"NODES": (4, 12, 128), "BETAS": (0.0, -0.5), "LANES": (4,), "CANDIDATES": (None,)}.items():
        monkeypatch.setattr(tree_sweep, name, value)
    found, models, prompts = {}, random_models(4, **drafter), random_prompts(4)
    monkeypatch.setattr(
        tree_sweep, "tables", lambda *arguments: found.update(zip(("trees", "chain"), arguments, strict=True))
    )
    settings = decode_settings_of(("draft", "tree"), max_new_tokens=16, cache_length=96, tree=TreeSettings())
    tree_sweep.show(models, (), settings, prompts)
    assert capsys.readouterr().out.startswith(f"chain: τ {found['chain']:.3f}, ")
    trees = [TreeSettings(nodes, 4, 64, beta) for nodes in (4, 12) for beta in (0.0, -0.5)]
    assert list(found["trees"]) == trees
    answers = make_generator(models, **SHAPE).generate(prompts, "draft")
    made = make_generator(models, tree=dataclasses.replace(trees[0], nodes=2), **SHAPE)
    recordings = record(models, made.generator, prompts, answers)
    for tree in trees:
        assert found["trees"][tree] == (replayed_tau(recordings[:2], tree), replayed_tau(recordings[2:], tree))


def test_a_tree_is_picked_on_the_second_half_and_measured_on_the_first(capsys):
    flat, broad = TreeSettings(16, 8, 64, 0.0), TreeSettings(16, 8, 64, -0.1)
    tree_sweep.tables({flat: (3.0, 2.0), broad: (2.5, 4.0)}, chain=2.0)
    lines = capsys.readouterr().out.splitlines()
    assert "| 16 | 64, 8, -0.1 | 2.500 | 1.250 | 1.250 to 1.500 |" in lines
    assert "| 16 | 64 | 8 | 1.500 | 1.250 |" in lines


def rows_file(tmp_path, count: int):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"token_ids": [5, number]}) + "\n" for number in range(count)))
    return path


@pytest.mark.parametrize(("there", "asked", "wanted"), [(3, 2, 4), (1, 0, 2)])
def test_too_few_prompts_are_refused_before_anything_is_loaded(tmp_path, there, asked, wanted):
    config = GOLDEN.parents[1] / "configs" / "tiny.py"
    argv = ["sweep", f"--config={config}", "--config.target.path=./nowhere"]
    argv += [f"--config.eval.prompts={rows_file(tmp_path, there)}", f"--config.decode.num_prompts={asked}"]
    with pytest.raises(DominoError, match=f"has {there} prompts, and the sweep reads {wanted}, .* or name a longer"):
        tree_sweep.main(cli.parse(argv, ("config",)))


def test_twice_the_prompts_asked_for_are_read_and_without_a_number_all_but_an_odd_one(tmp_path):
    path = rows_file(tmp_path, 5)
    assert len(tree_sweep.read_rows(str(path), 2)) == len(tree_sweep.read_rows(str(path), 0)) == 4
