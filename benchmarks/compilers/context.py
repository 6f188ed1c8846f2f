"""docs/compile_decode.md: what a step and a round cost by the size of the caches, by the compilers of absent devices.

    python -m benchmarks.compilers.context --folder=/tmp/compile_context [--only=v5p]

Compiles, as decode.py does and with its shapes, an autoregressive step and a round of Qwen3-8B over caches of
512, 4,096 and 32,768 slots for 1, 8 and 32 requests, and the prefill of one and of eight prompts of 32,768 tokens, in
chunks and whole; one process and one JSON per chip; then rewrites its part of docs/compile_decode.md. No figure is a
measurement.
"""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from unittest import mock

import jax
from jax.sharding import Mesh

from benchmarks.compilers import decode as compile_decode
from benchmarks.compilers import decode_tables as compile_decode_tables
from benchmarks.compilers.decode import BUFFER, GREEDY, array, drafting, prompts_on, state_on
from benchmarks.document import put_section
from domino_jax.forecast import topologies
from domino_jax.method import loop
from domino_jax.method.loop import DecodeState
from domino_jax.method.pair import Models
from domino_jax.method.rounds import autoregressive_round, speculative_round

ENTRIES = (("8b", "v5p", 4), ("8b", "h200", 1), ("8b", "v6e", 1))
SLOTS, ROWS = (512, 4_096, 32_768), (1, 8, 32)
PROMPTS = (1, 8)  # of a prefill
GB = compile_decode_tables.GB


def programs(mesh: Mesh, models: Models) -> dict[str, tuple]:
    """name → (function, arguments): step and round by slots and rows, prefills in chunks and whole by rows."""
    plain, stop = Models(models.target, models.target_params), array(mesh, 1)
    found = {}

    def step(models, state, stop):
        return autoregressive_round(models, state, stop, GREEDY)

    def round_(models, state, stop):
        return speculative_round(models, state, stop, GREEDY, drafting())

    def prefill_in_chunks(models, prompts, stop):
        return loop.prefill(models, prompts, stop, slots=SLOTS[-1], buffer=BUFFER, sampling=GREEDY)

    def prefill_whole(models, prompts, stop):
        with mock.patch.object(loop, "PREFILL_TOKENS", SLOTS[-1] * PROMPTS[-1]):
            return prefill_in_chunks(models, prompts, stop)

    sizes = [(slots, rows, state_on(mesh, models, slots, rows)) for rows, slots in itertools.product(ROWS, SLOTS)]
    for slots, rows, state in sizes:
        found[f"step {slots} {rows}"] = (step, (plain, state.replace(draft_cache=()), stop))
    for slots, rows, state in sizes:
        found[f"round {slots} {rows}"] = (round_, (models, state, stop))
    for rows in PROMPTS:
        prompts = prompts_on(mesh, rows, SLOTS[-1])
        found[f"prefill chunks {rows}"] = (prefill_in_chunks, (models, prompts, stop))
        found[f"prefill whole {rows}"] = (prefill_whole, (models, prompts, stop))
    return found


def must_move(models: Models, state: DecodeState) -> dict[str, int]:
    """compile_decode.must_move of a step and a round, by slots and rows, on the mesh that is set."""
    mesh, found = jax.sharding.get_mesh(), {}
    for rows, slots in itertools.product(ROWS, SLOTS):
        must = compile_decode.must_move(models, state_on(mesh, models, slots, rows))
        parts = {"step": must["step"], "round": must[compile_decode_tables.ROUND]}
        found |= {f"{name} {slots} {rows}": part for name, part in parts.items()}
    return found


INTRODUCTION = """\
`python -m benchmarks.compilers.context --folder=/tmp/compile_context` ({date}, jax {jax};
compilers' figures, none is a measurement). Qwen3-8B, words as above, per chip. The caches have as many **slots** as the
longest live row needs, a power of two (`decode.cache_length` is only their limit), so the bytes of a pass follow the
text. The head of a round corrects 64 candidates per slot.
"""
HEADER = (
    "| chip | tp | rows | slots | peak GB | step: bound / moved GB | moved ÷ bound "
    "| round: bound / moved GB | moved ÷ bound | round ÷ step |\n|---|---:|---:|---:|---:|---|---:|---|---:|---:|"
)
PREFILL = """\
A prefill of prompts of 32,768 tokens, caches of the same size included: chunks of 4,096 tokens (of all rows together)
against whole prompts.
"""
PREFILL_HEADER = "| chip | tp | rows | peak GB in chunks | peak GB whole |\n|---|---:|---:|---:|---:|"


def row(label: str, found: Mapping, rows: int, slots: int) -> str:
    """One line of the table; a size that the compiler refuses, or that exceeds the memory, does not fit."""
    _, chip, tensor = compile_decode_tables.places(label)
    made, memory = compile_decode_tables.compiled_parts(found), topologies.CHIPS[chip].memory
    step, whole = (made.get(f"{name} {slots} {rows}") for name in ("step", "round"))
    cells = [chip, tensor, str(rows), f"{slots:,}"]
    peak = max(part["peak"] for part in (step, whole) if part) if step or whole else memory + 1
    cells.append(f"{peak / GB:.1f} of {memory / GB:.0f}" if peak <= memory else "does not fit")
    for name, part in (("step", step), ("round", whole)):
        must = found["must"][f"{name} {slots} {rows}"]
        shown = part and peak <= memory
        cells += [f"{must / GB:.2f} / {part['traffic'] / GB:.2f}", f"{part['traffic'] / must:.2f}"] if shown else "––"
    both = step and whole and peak <= memory
    cells.append(f"{whole['traffic'] / step['traffic']:.2f}" if both else "–")
    return "| " + " | ".join(cells) + " |"


def prefill_row(label: str, found: Mapping, rows: int) -> str:
    _, chip, tensor = compile_decode_tables.places(label)
    made, memory = compile_decode_tables.compiled_parts(found), topologies.CHIPS[chip].memory
    cells = [chip, tensor, str(rows)]
    for kind in ("chunks", "whole"):
        part = made.get(f"prefill {kind} {rows}")
        peak = part and part["peak"]
        cells.append("does not fit" if not peak else f"{peak / GB:.1f}" + " (does not fit)" * (peak > memory))
    return "| " + " | ".join(cells) + " |"


def write(document: pathlib.Path, folder: pathlib.Path, names: Sequence[str], programs: int) -> None:
    """Puts the tables into their section of the document."""
    found, missing = compile_decode_tables.kept(folder, names, programs)
    if not found:
        return
    dates, versions = ({entry[key] for entry in found.values()} for key in ("date", "jax"))
    lines = [INTRODUCTION.format(date=", ".join(sorted(dates)), jax=", ".join(sorted(versions))), HEADER]
    sizes = itertools.product(found.items(), ROWS, SLOTS)
    lines += [row(label, entry, rows, slots) for (label, entry), rows, slots in sizes]
    lines += ["", PREFILL, PREFILL_HEADER]
    lines += [prefill_row(label, entry, rows) for (label, entry), rows in itertools.product(found.items(), PROMPTS)]
    if missing:
        lines += ["", f"Not compiled yet, or not all of it: {', '.join(missing)}."]
    put_section(document, "compile_context", "\n".join(lines))


COUNT = 2 * len(SLOTS) * len(ROWS) + 2 * len(PROMPTS)
WORK = compile_decode.Work(
    "benchmarks.compilers.context", ENTRIES, COUNT, programs, must_move, lambda *_: None, dumped="nothing"
)

if __name__ == "__main__":
    tables = SimpleNamespace(PAGE=compile_decode_tables.PAGE, write=write)
    compile_decode.run(WORK, tables, __doc__.splitlines()[0])
