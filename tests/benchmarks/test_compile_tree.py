"""A tree's parts compiled for devices that are not here: that they are the round, what is read of them, the tables."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compilers import decode as compile_decode
from benchmarks.compilers import decode_tables as compile_decode_tables
from benchmarks.compilers import tree as compile_tree
from benchmarks.compilers import tree_tables as compile_tree_tables
from domino_jax.method.propose import draft_base
from domino_jax.method.rounds import speculative_round
from domino_jax.models import sharding
from tests.benchmarks.test_compile_decode import cells
from tests.helpers.decoding_models import make_generator, random_models


def one_device():
    return sharding.make_mesh(1, 1, 1, jax.devices()[:1])


def test_the_parts_are_the_round():
    """Of a tree of 16 nodes over a random tiny pair: backbone, proposal, verify and commit one after another."""
    models = random_models(4)
    made = compile_tree.parts(one_device(), models, 16)
    state = make_generator(models).start([[5, 9, 2, 60, 7]], [0])
    settings, stop = compile_tree.drafting(16), jnp.array([-1])

    @jax.jit
    def both(models, state):
        tree_of, check, conclude = (function for _, function, _ in made)
        z, base, draft_cache = draft_base(models, state)
        tree = tree_of(models, (z, base), state)
        chosen, features, cache = check(models, state.target_cache, tree, state.lengths)
        after = conclude(models, (cache, draft_cache), (chosen, features), tree, state, stop)
        return after, speculative_round(models, state, stop, compile_tree.GREEDY, settings)

    after, expected = both(models, state)
    assert expected.counts[0] > state.counts[0]
    for name in ("tokens", "counts", "lengths", "anchors", "rounds"):
        assert (getattr(after, name) == getattr(expected, name)).all()
    committed = int(expected.lengths[0])
    for side in ("target_cache", "draft_cache"):
        pairs = zip(*(jax.tree.leaves(getattr(state, side)) for state in (after, expected)), strict=True)
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours[:, :, :committed], theirs[:, :, :committed], atol=1e-5)


def test_the_programs_of_an_entry():
    """Three layers of Qwen3-0.6B: names, and shapes by the tree's size."""
    mesh = one_device()
    models = compile_decode.models_on(mesh, "0.6b", layers=3)
    made = compile_tree.programs(mesh, models)
    assert len(made) == compile_tree.PROGRAMS == 16
    assert all(function.__name__ == label for label, (function, _) in made.items() if label != "verify17")
    parts = ("head", "tree16", "verify128", "commit64")
    shapes = {label: jax.eval_shape(made[label][0], *made[label][1]) for label in parts}
    assert shapes["head"].shape == (1, 16)
    assert [part.shape for part in shapes["tree16"]] == [(1, 16)] * 3 + [(1, 16, 16)]
    chosen, features, _ = shapes["verify128"]
    assert chosen.shape == (1, 128) and features.shape == (1, 128, 2 * 1024)
    state = compile_decode.state_on(mesh, models)
    assert jax.tree.map(jnp.shape, shapes["commit64"]) == jax.tree.map(jnp.shape, state)
    must = compile_tree.must_move(models, state)
    rows = (must["verify64"] - must["verify16"]) // 48
    assert rows == 2 * 2 * 3 * 8 * 128 and must["verify17"] - must["verify16"] == rows
    assert must["tree16"] == must["tree64"] < must["head"]


def test_cycles_of_a_loop_count_in_every_turn():
    text = "\n".join(
        [
            '%body (p: s32[]) -> s32[] {\n  %a = s32[] fusion(%p), "estimated_cycles":"10"\n}',
            'ENTRY %main (x: s32[]) -> s32[] {\n  %b = s32[] fusion(%x), "estimated_cycles":"7"',
            "  ROOT %w = s32[] while(%b), condition=%c, body=%body\n}",
        ]
    )
    assert compile_tree.turned_cycles(text, trips=16) == 7 + 16 * 10
    assert compile_tree.turned_cycles("ENTRY %main () -> s32[] {\n}", trips=16) is None


# ----------------------------------------------------------------------------------------------------- the tables


def entry(kept: bool = False) -> dict:
    """kept: with a fifth of all traffic left to a cache."""
    sizes = {"head": 1e9, "verify17": 16e9, "verify16": 16e9, "verify32": 17e9, "verify64": 18e9, "verify128": 20e9}
    sizes |= {
        f"{part}{nodes}": size for part, size in (("tree", 2.5e8), ("commit", 9e8)) for nodes in (16, 32, 64, 128)
    }
    sizes |= {"round": 20e9, "round_tree64": 22e9}
    made = {
        label: {"traffic": size, "beyond_cache": 0.8 * size if kept else None, "peak": 19e9, "cycles": 100}
        for label, size in sizes.items()
    }
    made["head"]["turned_cycles"], made["tree64"]["turned_cycles"] = 2_000, 1_000
    if kept:
        made["head"]["launches"] = {"kernels": 128, "copies": 3, "in_buffers": 131, "starts": 1}
    must = {"commit64": 4e8, "tree64": 2e8}
    return {"date": "2026-11-22", "jax": "0.10.2", "must": must, "programs": made}


def test_the_rows_of_both_tables():
    assert cells(compile_tree_tables.verify_row("8b-v5p-tp1", entry())) == [
        *("8B", "v5p", "1", "16.00", "1.00, 1.06, 1.12, 1.25", "1.00", "0.40 / 0.90", "0.050"),
        *("20.00 / 22.00", "19.0 of 95"),
    ]
    assert cells(compile_tree_tables.proposal_row("8b-v5p-tp1", entry())) == [
        *("8B", "v5p", "1", "1.00", "0.20 / 0.25, 0.25, 0.25, 0.25", "0.25", "0.50"),
    ]
    ratios = cells(compile_tree_tables.verify_row("8b-h200-tp1", entry(kept=True)))[4]
    assert ratios == "1.00 (1.00), 1.06 (1.06), 1.12 (1.12), 1.25 (1.25)"


def test_a_part_that_is_not_there_leaves_its_cells_empty():
    found = entry()
    found["programs"] = {"verify17": found["programs"]["verify17"], "verify64": {"error": "RESOURCE_EXHAUSTED"}}
    made = cells(compile_tree_tables.verify_row("8b-v5e-tp8", found))
    assert made[3:] == ["16.00", "–, –, –, –", "–", "0.40 / –", "–", "– / –", "–"]
    assert cells(compile_tree_tables.proposal_row("8b-v5e-tp8", found))[3:] == ["–", "0.20 / –, –, –, –", "–", "–"]


def test_the_goals_of_a_tree():
    missed = entry()
    missed["programs"]["verify64"]["traffic"] = 20e9
    found = {"8b-v5p-tp1": entry(), "4b-v5p-tp1": missed}
    verify, proposal, _ = compile_decode_tables.goal_lines(found, compile_tree_tables.GOALS)
    assert verify.endswith("Met: 8b-v5p-tp1 1.12. Missed: 4b-v5p-tp1 1.25.")
    assert proposal.endswith("Met: 8b-v5p-tp1 0.25, 4b-v5p-tp1 0.25.")


def test_launches_and_missing_entries_are_stated_in_the_document(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- compile_tree: begin -->\nold\n<!-- compile_tree: end -->\n")
    (tmp_path / "8b-h200-tp1.json").write_text(json.dumps(entry(kept=True)))
    compile_tree_tables.write(page, tmp_path, ["8b-h200-tp1", "4b-v5p-tp1"], programs=16)
    text = page.read_text()
    assert "- 8B: head 128 + 3 (1)." in text and "not all of it: 4b-v5p-tp1." in text
