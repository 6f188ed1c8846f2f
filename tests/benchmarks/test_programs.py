"""Programs for devices that are not here: what they must move, and their number."""

import jax
import pytest

from benchmarks.compilers import decode, programs
from domino_jax.models import sharding


def test_what_a_step_must_move_is_every_weight_it_multiplies_with_and_the_cache():
    """Three layers of Qwen3-8B: each 193 M weights, 8 heads of 128 in the cache; the embedding is looked up only."""
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    models = programs.models_on(mesh, "8b", layers=3)
    must = programs.must_move(models, programs.state_on(mesh, models))
    cache = 2 * 2 * 3 * 8 * 128 * 4096
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 12_288) + 2 * 4096 + 2 * 128
    weights = 2 * (3 * layer + 151_936 * 4096 + 4096)
    assert must["step"] == weights + cache + cache // 4096
    assert must["verify17"] == weights + cache + 17 * cache // 4096
    head = 2 * (3 * 1024 * (4096 + 1024) + 256 * (4096 + 1024) + 256 * 151_936)
    assert must["head"] == head
    fusion, context = 2 * (2 * 4096 * 4096 + 4096), 2 * 2 * 3 * 8 * 128  # of two taps; a slot of three layers
    parts = must["verify17"] + must["draft"] + must["head"]
    assert must["round"] == parts + fusion + context, "draft and verify each read the lm_head"
    vocabulary, rows = 2 * 256 * 151_936, 15 * 64 * 2 * 256
    assert must["head64"] == head - vocabulary + rows + 4 * 16 * 151_936  # the base logits of 16 drafts
    assert must["round64"] == must["round"] - vocabulary + rows


@pytest.mark.parametrize("what", decode.WORKS)
def test_the_programs_of_an_entry_are_counted_named_as_the_compilers_files_and_can_be_traced(what):
    mesh, work = sharding.make_mesh(1, 1, 1, jax.devices()[:1]), decode.WORKS[what]
    models = programs.models_on(mesh, "0.6b", layers=8)  # EAGLE-3 reads three of them
    by_name = work.programs(mesh, models)
    assert len(by_name) == work.count
    for label, (function, arguments) in by_name.items():
        if label.startswith(("head", "tree", "commit", "round", "loop")) and what != "contexts":
            assert function.__name__ == label
        if label in ("head64", "tree64", "commit64"):
            jax.eval_shape(function, *arguments)
    with jax.set_mesh(mesh):
        bound = work.must(models)
    if what in ("chains", "trees"):  # whose tables state what a program must move
        assert set(by_name) - set(bound) <= {"round_tree64", "loop64"}
