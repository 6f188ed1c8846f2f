"""Decoding compiled for devices that are not here: bounds, launches, and the tables."""

import json
from types import SimpleNamespace

import jax
import pytest

from benchmarks.compilers import compiler_text
from benchmarks.compilers import decode as compile_decode
from benchmarks.compilers import decode_tables as compile_decode_tables
from domino_jax.method.drafter import rows_together
from domino_jax.models import sharding


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")[1:-1]]


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
    """Three layers of Qwen3-8B: each 193 M weights, 8 heads of 128 in the cache; the embedding is looked up only."""
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    models = compile_decode.models_on(mesh, "8b", layers=3)
    must = compile_decode.must_move(models, compile_decode.state_on(mesh, models))
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


def test_sentences_of_the_section_are_wrapped_and_rows_of_tables_are_not():
    item, row = "- Goal: " + "8b-v5p-tp1 1.26, " * 10, "| 8B " * 40
    lines = compile_decode_tables.wrapped(item).splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= 120 and lines[1].startswith("  ")
    assert compile_decode_tables.wrapped(row) == row


def test_the_programs_of_an_entry_are_counted_and_named_as_the_compilers_files():
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    made = compile_decode.programs(mesh, compile_decode.models_on(mesh, "0.6b", layers=3))
    assert len(made) == compile_decode.PROGRAMS and compile_decode_tables.ROUND in made
    assert {f"head{count}" for count in compile_decode_tables.COUNTS} < set(made)
    for label, (function, arguments) in made.items():
        if label.startswith(("head", "round")):
            assert function.__name__ == label
        if label.startswith("head"):
            assert jax.eval_shape(function, *arguments).shape == (1, 16)


def test_the_head_of_an_absent_chip_has_the_numbers_of_a_token_side_by_side(monkeypatch):
    """The order [V, E] of a matrix [E, V]; on a CPU it stays as it is."""
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    models = compile_decode.models_on(mesh, "0.6b", layers=3)
    assert rows_together(models.drafter_params) is models.drafter_params
    kernel = models.drafter_params["head"]["up"]["kernel"]
    monkeypatch.setattr(type(kernel.sharding), "device_set", [SimpleNamespace(platform="tpu")])
    stored = rows_together(models.drafter_params)["head"]["up"]["kernel"]
    assert stored.format.layout.major_to_minor == (1, 0)
    assert (stored.shape, stored.sharding) == (kernel.shape, kernel.sharding)


def test_the_entries_cover_every_size_and_chip():
    names = [compile_decode.name(entry) for entry in compile_decode.ENTRIES]
    assert len(names) == len(set(names))
    assert {entry[0] for entry in compile_decode.ENTRIES} == {"0.6b", "4b", "8b"}
    assert {entry[1] for entry in compile_decode.ENTRIES} == set(compile_decode.SLICES)
    assert compile_decode.name(("8b", "v5p", 4, "split")) == "8b-v5p-tp4split"


def program(traffic: float, **others) -> dict:
    made = {"traffic": traffic, "peak": 5e9, "accessed": 9e9, "seconds": 0.003, "compile_seconds": 8.0}
    return {**made, **others}


def entry() -> dict:
    sizes = {"step": 4e9, "round64": 6e9, "verify17": 4e9, "verify64": 5e9, "draft": 1e9, "head64": 1e9}
    sizes |= {"round": 8e9, "head": 2e9, "head16": 0.5e9}
    must = dict.fromkeys(("step", "verify17", "draft", "head64"), 4e9) | {"round64": 5e9}
    programs = {name: program(size) for name, size in sizes.items()}
    return {"date": "2026-11-21", "jax": "0.10.2", "must": must, "programs": programs}


def test_the_rows_of_the_tables():
    assert cells(compile_decode_tables.row("8b-v5p-tp4", entry())) == [
        *("8B", "v5p", "4", "5.0 of 95", "4.00 / 4.00 / 9.00", "1.00", "1.45", "3.00"),
        *("5.00 / 6.00 / 9.00", "1.50", "1.25", "4.9"),
    ]
    parts = cells(compile_decode_tables.parts_row("8b-v5p-tp4", entry()))
    assert parts[3:] == ["4.00 / 4.00 / 9.00", "4.00 / 1.00 / 9.00", "4.00 / 1.00 / 9.00"]
    heads = cells(compile_decode_tables.candidates_row("8b-v5p-tp4", entry()))
    assert heads[3:] == ["2.00, 0.50, 1.00, –", "8.00, 6.00", "2.00, 1.50"]
    assert compile_decode_tables.places("8b-v5p-tp4split") == ["8B", "v5p", "4, split head"]


def test_a_model_that_is_larger_than_the_chip_is_marked():
    found = entry()
    found["programs"]["round64"]["peak"] = 17e9
    assert "17.0 of 16 **does not fit**" in compile_decode_tables.row("8b-v5e-tp1", found)
    found["programs"] = {name: {"error": "RESOURCE_EXHAUSTED"} for name in found["programs"]}
    assert "**does not fit**" in compile_decode_tables.row("8b-v5e-tp1", found)


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
    assert cells(row) == ["8B", "h200", "1.00", "1.00", "1.20", "1.50", "1.25", "4.9"]


def test_the_document_keeps_what_is_around_the_tables(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- compile_decode: begin -->\nyesterday\n<!-- compile_decode: end -->\nafter\n")
    (tmp_path / "8b-v5p-tp4.json").write_text(json.dumps(entry()))
    compile_decode_tables.write(page, tmp_path, ["8b-v5p-tp4", "8b-h200-tp1"], programs=6)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "yesterday" not in text
    assert "| 8B | v5p | 4 |" in text and "not all of it: 8b-h200-tp1." in text


# ------------------------------------------------------------------------------------------------------ the folder


def test_what_a_folder_holds_is_not_compiled_again(tmp_path, monkeypatch):
    """The first is there already, the second is refused by the compiler, the third compiles."""
    calls = []

    def compile_program(mesh, function, arguments):
        calls.append(function)
        if function == "second":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too large\nmore")
        return function

    def programs(mesh, models):
        return {name: (name, ()) for name in ("first", "second", "third")}

    def add(found, label, program):
        found["programs"][label]["seen"] = program

    stubs = {
        "compile_program": compile_program,
        "examine": lambda program, seconds, cache: {"traffic": 5},
        "devices_of": lambda chip, tensor: jax.devices()[:1],
        "models_on": lambda mesh, size, split_head: None,
        "state_on": lambda mesh, models: None,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(compile_decode, name, stub)
    file = tmp_path / "8b-v5p-tp1.json"
    file.write_text(json.dumps({"programs": {"first": {"traffic": 3}}}))
    entries = (("8b", "v5p", 1),)
    work = compile_decode.Work("none", entries, 3, programs, lambda models, state: {"first": 1}, add, "first")
    assert not compile_decode.whole(file, work.count)
    compile_decode.compile_entry(entries[0], tmp_path, work)
    assert calls == ["second", "third"]
    found = json.loads(file.read_text())
    assert found["programs"] == {
        "first": {"traffic": 3},
        "second": {"error": "RESOURCE_EXHAUSTED: too large"},
        "third": {"traffic": 5, "seen": "third"},
    }
    assert found["must"] == {"first": 1} and compile_decode.whole(file, work.count)


@pytest.mark.parametrize(("loops", "kernels"), [(0, 1), (2, 3)])
def test_launches_of_a_program_are_those_of_one_turn(loops, kernels):
    """A kernel in a buffer, and a loop with a condition and a copy outside of buffers."""
    listed = ["000: kCommandBuffer [source]", "    001: kCustomKernel [source]"]
    if loops:
        listed += ["002: kWhile [prev=000]", "condition:", "    003: kCustomKernel [source]"]
        listed += ["  body:", "    004: kCopy [source]"]
    counted = compiler_text.launches(compile_decode.wrapped("\n".join(listed)), trips=loops)
    assert counted == {"kernels": kernels, "copies": loops, "in_buffers": 1, "starts": 1 + 2 * loops}
