"""benchmarks/compilers/context.py: what a pass over caches of a size must move, and the lines of its tables."""

import jax

from benchmarks.compilers import context as compile_context
from benchmarks.compilers import decode as compile_decode
from benchmarks.device import cache_length
from domino_jax.models import sharding


def test_what_a_pass_must_move_follows_the_slots_and_the_rows_of_the_caches():
    """Three layers of Qwen3-8B: 2 bytes × 2 × 3 × 8 heads × 128 a slot, and one more written in each row of a step."""
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    models = compile_decode.models_on(mesh, "8b", layers=3)
    with jax.set_mesh(mesh):
        must = compile_context.must_move(models, compile_decode.state_on(mesh, models))
        names = set(compile_context.programs(mesh, models))
    assert set(must) | {"prefill chunks 1", "prefill whole 1", "prefill chunks 8", "prefill whole 8"} == names
    assert len(names) == compile_context.COUNT
    slot = 2 * 2 * 3 * 8 * 128
    assert must["step 4096 8"] - must["step 512 1"] == slot * (4_097 * 8 - 513)


def entry(**programs) -> dict:
    return {"must": {"step 512 1": 4e9, "round 512 1": 5e9}, "programs": programs}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_a_line_of_the_table_and_one_of_a_size_that_does_not_fit():
    made = {"step 512 1": {"traffic": 4.2e9, "peak": 6e9}, "round 512 1": {"traffic": 6.3e9, "peak": 7e9}}
    found = cells(compile_context.row("8b-v5p-tp4", entry(**made), 1, 512))
    assert found == ["v5p", "4", "1", "512", "7.0 of 95", "4.00 / 4.20", "1.05", "5.00 / 6.30", "1.26", "1.50"]
    made["round 512 1"]["peak"] = 96e9
    large = cells(compile_context.row("8b-v5p-tp4", entry(**made), 1, 512))
    assert large[4:] == ["does not fit", *["–"] * 5]
    del made["round 512 1"]
    assert cells(compile_context.row("8b-v5p-tp4", entry(**made), 1, 512))[4:7] == ["6.0 of 95", "4.00 / 4.20", "1.05"]
    refused = entry(**{"step 512 1": {"error": "RESOURCE_EXHAUSTED"}})
    assert cells(compile_context.row("8b-v5p-tp4", refused, 1, 512))[4] == "does not fit"


def test_prefills_in_chunks_and_whole_are_side_by_side():
    made = {"prefill chunks 8": {"peak": 30e9}, "prefill whole 8": {"peak": 99e9}}
    line = compile_context.prefill_row("8b-v5p-tp4", {"programs": made}, 8)
    assert cells(line) == ["v5p", "4", "8", "30.0", "99.0 (does not fit)"]


def test_the_ratio_of_two_limits_is_the_median_of_ratios_of_the_same_repetition():
    rates = {"draft": {448: [100.0, 200.0, 100.0], 8_192: [100.0, 190.0, 50.0]}}
    assert cells(cache_length.report(rates, [448, 8_192]).splitlines()[2]) == [
        "draft",
        "100",
        "100",
        "0.950",
        "0.500, 1.000",
    ]
