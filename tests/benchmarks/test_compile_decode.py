"""Decoding compiled for devices that are not here: what is read from a program's text, the tables, and (slow) the
ratios that must not grow."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import compile_decode, compile_decode_tables, compiler_text, hbm_traffic
from domino_jax.models import sharding

ONE = """
ENTRY %main {
  %w = bf16[64,32]{1,0} parameter(0)
  %x = bf16[8,64]{1,0} parameter(1)
  %fetched = (bf16[64,32]{1,0:T(8,128)S(1)}, bf16[64,32]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %there = bf16[64,32]{1,0:T(8,128)S(1)} copy-done(%fetched)
  ROOT %y = bf16[8,32]{1,0} convolution(%x, %there), dim_labels=bf_io->bf
}
"""
GATHER = """
%rows (p0: bf16[1000,16], p1: s32[2]) -> bf16[2,16] {
  %p0 = bf16[1000,16]{1,0} parameter(0)
  %p1 = s32[2]{0} parameter(1)
  ROOT %taken = bf16[2,16]{1,0} gather(%p0, %p1), offset_dims={1}
}
ENTRY %main {
  %table = bf16[1000,16]{1,0} parameter(0)
  %ids = s32[2]{0} parameter(1)
  ROOT %out = bf16[2,16]{1,0} fusion(%table, %ids), kind=kCustom, calls=%rows
}
"""
UPDATE = """
ENTRY %main {
  %cache = bf16[1,2,4096,128]{3,2,1,0} parameter(0)
  %new = bf16[1,2,17,128]{3,2,1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %out = bf16[1,2,4096,128]{3,2,1,0} dynamic-update-slice(%cache, %new, %at, %at, %at, %at)
}
"""
LOOP = """
%body (p: (s32[], f32[10])) -> (s32[], f32[10]) {
  %p = (s32[], f32[10]{0}) parameter(0)
  %x = f32[10]{0} get-tuple-element(%p), index=1
  %i = s32[] get-tuple-element(%p), index=0
  %y = f32[10]{0} negate(%x)
  ROOT %t = (s32[], f32[10]{0}) tuple(%i, %y)
}
%condition (p: (s32[], f32[10])) -> pred[] {
  %p = (s32[], f32[10]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %c = s32[]{:T(128)} constant(7)
  ROOT %less = pred[] compare(%i, %c), direction=LT
}
ENTRY %main {
  %start = (s32[], f32[10]{0}) parameter(0)
  ROOT %w = (s32[], f32[10]{0}) while(%start), condition=%condition, body=%body
}
"""


def test_a_weight_fetched_into_vector_memory_counts_once():
    assert hbm_traffic.traffic(ONE) == 2 * 64 * 32 + 2 * 8 * 64 + 2 * 8 * 32


def test_a_part_fetched_ahead_counts_as_that_part():
    fetched = (
        "((bf16[64,32]{1,0:T(8,128)}), bf16[16,32]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:16]}"
    )
    text = f"ENTRY %main {{\n  %w = bf16[64,32]{{1,0}} parameter(0)\n  %part = {fetched}\n}}\n"
    assert hbm_traffic.traffic(text) == 2 * 16 * 32


def test_what_a_cache_keeps_is_left_out_but_no_argument_result_or_update():
    """x 512 B and 2,048 B of weights read, a sum of 1,024 B written and read, the result of 1,024 B written."""
    text = """
ENTRY %main {
  %x = f32[8,16]{1,0} parameter(0)
  %w = f32[16,32]{1,0} parameter(1)
  %y = f32[8,32]{1,0} dot(%x, %w)
  ROOT %z = f32[8,32]{1,0} negate(%y)
}
"""
    whole = 512 + 2048 + 3 * 1024
    assert hbm_traffic.traffic(text) == whole
    assert hbm_traffic.traffic(text, cache=1024) == whole - 2 * 1024
    assert hbm_traffic.traffic(text, cache=1023) == whole
    read_after = UPDATE.replace("ROOT %out", "%out").replace("%at)\n}", "%at)\n  ROOT %sum = f32[] reduce(%out)\n}")
    assert hbm_traffic.traffic(read_after, cache=2**30) == hbm_traffic.traffic(read_after)


def test_of_a_table_the_gathered_rows_count():
    assert hbm_traffic.traffic(GATHER) == 4 * 2 + 2 * 16 * 2 + 2 * 16 * 2


def test_of_an_update_in_place_the_update_counts_read_and_written():
    assert hbm_traffic.traffic(UPDATE) == 2 * (2 * 2 * 17 * 128)


def test_a_loop_counts_as_often_as_its_condition_lets_it_run():
    assert hbm_traffic.traffic(LOOP) == 7 * 2 * 40
    assert hbm_traffic.traffic(LOOP, entry_only=True) == 2 * 40


def test_the_text_of_a_real_program_is_read():
    """On the CPU: a product reads both sides and writes its result."""
    x, w = jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((128, 256), jnp.float32)
    text = jax.jit(lambda x, w: x @ w).lower(x, w).compile().as_text()
    assert hbm_traffic.traffic(text) == 4 * (64 * 128 + 128 * 256 + 64 * 256)


def test_launches_of_one_turn_with_a_loop_inside():
    text = """
001: kCopy  [source]
002: kWhile [sink]
condition:
    003: kCustomKernel [source] outside a buffer
  body:
    000: kCommandBuffer [source]
        004: kCopy [source]
        005: kCustomKernel [sink]
    006: kWhile [prev=000]
condition:
        007: kCustomKernel [source]
      body:
        000: kCommandBuffer [source]
            008: kCustomKernel [source]
"""
    expected = {"kernels": 1 + 1 + 20, "copies": 1, "in_buffers": 2 + 10, "starts": 22}
    assert compiler_text.launches(text, trips=10) == expected


def test_cycles_of_the_entry_alone():
    text = '%f {\n "estimated_cycles":"5"\n}\n\nENTRY %main {\n "estimated_cycles":"7", "estimated_cycles":"1"\n}\n'
    assert compiler_text.cycles(text) == 8 and compiler_text.cycles("ENTRY") is None


def test_what_a_step_must_move_is_every_weight_it_multiplies_with_and_the_cache():
    """Qwen3-8B by its public shapes: 8.19 G weights, 0.62 G of them the embedding; 36 layers, 8 heads of 128."""
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    models = compile_decode.models_on(mesh, "8b")
    must = compile_decode.must_move(models, compile_decode.state_on(mesh, models))
    cache = 2 * 2 * 36 * 8 * 128 * 4096
    weights = 2 * (8_190_735_360 - 151_936 * 4096)
    assert must["step"] == weights + cache + cache // 4096
    assert must["verify17"] == weights + cache + 17 * cache // 4096
    head = 2 * (3 * 1024 * (4096 + 1024) + 256 * (4096 + 1024) + 256 * 151_936)
    assert must["head"] == head
    parts = must["verify17"] + must["draft"] + must["head"]
    assert max(must["verify17"], must["draft"], must["head"]) < must["round"] < parts, "the lm_head counts once"


def test_the_entries_cover_every_size_and_chip():
    names = [compile_decode.name(entry) for entry in compile_decode.ENTRIES]
    assert len(names) == len(set(names))
    assert {entry[0] for entry in compile_decode.ENTRIES} == {"0.6b", "4b", "8b"}
    assert {entry[1] for entry in compile_decode.ENTRIES} == set(compile_decode.SLICES)


def program(traffic: float, **others) -> dict:
    made = {"traffic": traffic, "peak": 5e9, "accessed": 9e9, "seconds": 0.003, "compile_seconds": 8.0}
    return {**made, **others}


def entry() -> dict:
    parts = {"step": program(4e9), "round": program(6e9), "verify17": program(4e9), "verify64": program(5e9)}
    parts |= {"draft": program(1e9), "head": program(1e9)}
    must = dict.fromkeys(("step", "verify17", "draft", "head"), 4e9) | {"round": 5e9}
    return {"date": "2026-11-21", "jax": "0.10.2", "must": must, "programs": parts}


def test_a_row_of_the_table():
    cells = [cell.strip() for cell in compile_decode_tables.row("8b-v5p-tp4", entry()).split("|")[1:-1]]
    assert cells == [
        *("8B", "v5p", "4", "5.0 of 95", "4.00 / 4.00 / 9.00", "1.00", "1.45", "3.00"),
        *("5.00 / 6.00 / 9.00", "1.50", "1.25", "4.9"),
    ]


def test_a_model_that_is_larger_than_the_chip_is_marked():
    found = entry()
    found["programs"]["round"]["peak"] = 17e9
    assert "17.0 of 16 **does not fit**" in compile_decode_tables.row("8b-v5e-tp1", found)
    found["programs"] = {name: {"error": "RESOURCE_EXHAUSTED"} for name in found["programs"]}
    assert "**does not fit**" in compile_decode_tables.row("8b-v5e-tp1", found)


def test_the_parts_of_a_round_stand_beside_their_bounds():
    cells = [cell.strip() for cell in compile_decode_tables.parts_row("8b-v5p-tp4", entry()).split("|")[1:-1]]
    assert cells[3:] == ["4.00 / 4.00 / 9.00", "4.00 / 1.00 / 9.00", "4.00 / 1.00 / 9.00"]


def test_a_split_head_has_its_own_entry():
    assert compile_decode.name(("8b", "v5p", 4, "split")) == "8b-v5p-tp4split"
    assert compile_decode_tables.places("8b-v5p-tp4split") == ["8B", "v5p", "4, split head"]


def test_goals_name_the_entries_that_meet_and_that_miss_them():
    """Judged by all bytes moved, whatever a cache could keep."""
    wasteful = entry()
    wasteful["programs"]["step"] |= {"traffic": 5e9, "beyond_cache": 4e9}
    step, whole, empty = compile_decode_tables.goal_lines(
        {"8b-v5p-tp4": entry(), "8b-h200-tp1": wasteful}, compile_decode_tables.GOALS
    )
    assert step.endswith("Met: 8b-v5p-tp4 1.00. Missed: 8b-h200-tp1 1.25.") and empty == ""
    assert whole.endswith("Met: 8b-h200-tp1 1.20. Missed: 8b-v5p-tp4 1.50.")


def test_the_rows_without_what_a_cache_keeps():
    found = entry()
    assert compile_decode_tables.cache_rows({"8b-v5p-tp4": found}) == []
    for made in found["programs"].values():
        made["beyond_cache"] = made["traffic"]
    row = compile_decode_tables.cache_rows({"8b-h200-tp1": found})[-2]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "8B",
        "h200",
        "1.00",
        "1.00",
        "1.20",
        "1.50",
        "1.25",
        "4.9",
    ]


def test_the_document_keeps_what_stands_around_the_tables(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{compile_decode_tables.BEGIN}\nyesterday\n{compile_decode_tables.END}\nafter\n")
    (tmp_path / "8b-v5p-tp4.json").write_text(json.dumps(entry()))
    compile_decode_tables.write(page, tmp_path, ["8b-v5p-tp4", "8b-h200-tp1"], programs=6)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "yesterday" not in text
    assert "| 8B | v5p | 4 |" in text and "not all of it: 8b-h200-tp1." in text


COMPILE = """
import dataclasses, json, sys
import jax
from benchmarks import compile_decode as c
from benchmarks import hbm_traffic
from domino_jax.models import sharding
chip, tensor = sys.argv[1], int(sys.argv[2])
mesh = sharding.make_mesh(1, 1, tensor, c.devices_of(chip, tensor))
models = c.models_on(mesh, "0.6b", layers=4)
with jax.set_mesh(mesh):
    found = {"must": c.must_move(models, c.state_on(mesh, models))}
    for name, (function, arguments) in c.programs(mesh, models).items():
        if name in ("step", "verify17", "verify64"):
            text = c.compile_program(mesh, function, arguments).as_text()
            found[name] = hbm_traffic.traffic(text, cache=c.CACHES.get(chip, 0) // 2)
print(json.dumps(found))
"""


@pytest.mark.slow(minutes=2)
@pytest.mark.skipif(
    not (importlib.util.find_spec("libtpu") and importlib.util.find_spec("jax_cuda12_plugin")),
    reason="needs requirements-compile.txt",
)
@pytest.mark.parametrize("chip, tensor", [("v5p", 4), ("h200", 1)])
def test_a_pass_moves_little_more_than_it_must(chip, tensor):
    """Four layers of Qwen3-0.6B, whose vocabulary weighs more than they do; what a layer wastes shows all the same.

    Seen: v5p 1.01, 1.12 and 1.24; H200 without what its cache keeps 1.00, 1.00 and 1.16.
    """
    command = [sys.executable, "-c", COMPILE, chip, str(tensor)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert math.isclose(found["step"] / found["must"]["step"], 1.0, abs_tol=0.05)
    assert found["verify17"] / found["must"]["verify17"] < 1.18
    assert found["verify64"] / found["verify17"] < 1.3
