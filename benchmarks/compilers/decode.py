"""docs/compilers.md: what decoding costs on devices that are not present, by their compilers.

    python -m benchmarks.compilers.decode --folder=/tmp/compile_decode [--what=chains,trees] [--only=8b]
    python -m benchmarks.compilers.decode --folder=/tmp/compile_decode --small     # a test of the command, on a CPU

chains: an autoregressive step, draft, head, verify of 17 and of 64 rows, a whole round, and the loop of rounds; head
and round with few candidates and over the whole vocabulary. heads: a round of each head. vocabulary: a round that
drafts among few tokens. eight_bits: step and round of targets and of drafters in eight bits. trees: proposal, verify
and commit of 16 to 128 nodes, and a round. contexts: step and round over caches of 512 to 32,768 slots for 1 to 32
requests. All from shapes (programs.py).
Every entry is compiled in a separate process and leaves one JSON in --folder, so the script can be stopped and started
again. It then writes one table for each of these into the page, and a CSV file. It needs requirements-compile.txt.
No figure is a measurement.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks.compilers import program_text, programs
from benchmarks.tables import DOCS, ROOT, publish
from domino_jax.forecast import compiled, topologies
from domino_jax.models import sharding

# Eight chips of each kind, of which an entry takes the first 1, 4 or 8.
SLICES = {"v5p": "v5p:2x2x2", "v5e": "v5e:2x4", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}
SLICES |= {name: name for name in ("h100", "h200")}  # one
CACHES = {"h200": 50 * 2**20}  # bytes of L2, by the data sheet
# τ at T = 0, pooled over eight tasks, of a public rerun of the published drafters; other sizes are given the 8B's.
TAU = {"4b": 7.17, "8b": 7.33}
GB = 1e9
DUMP = "COMPILE_DECODE_DUMP"  # variable: the folder in which the compiler for GPUs lists its launches

Entry = tuple[str, str, int]  # size, chip, tensor parallelism


@dataclasses.dataclass(frozen=True)
class Work:
    """title: of its table.  entries: the most informative first.  count: programs of an entry.

    programs: (mesh, models) → name → (function, arguments).  must: models → bytes by name, on the mesh that is set.
    columns: of the table in the page, column → heading.
    """

    title: str
    entries: tuple[Entry, ...]
    count: int
    programs: Callable
    must: Callable
    columns: Mapping[str, str]


def chip_bytes(models) -> dict[str, int]:
    return programs.must_move(models, programs.state_on(jax.sharding.get_mesh(), models))


def step_bytes(models) -> dict[str, int]:
    return {"step": chip_bytes(models)["step"]}


PLACE = {"entry": "size, chip, tensor"}
WORKS = {
    "chains": Work(
        "A chain's round",
        (
            *(("8b", "v5p", 1), ("8b", "h200", 1), ("8b", "v5p", 4), ("8b", "v5p", 8), ("0.6b", "h200", 1)),
            *(("0.6b", "v5p", 1), ("8b", "v6e", 1), ("8b", "v5e", 8), ("4b", "h200", 1), ("4b", "v5p", 1)),
            *(("4b", "v6e", 1), ("4b", "v5p", 4), ("4b", "v5p", 8)),
        ),
        8 + len(programs.CANDIDATES),
        programs.chains,
        chip_bytes,
        PLACE
        | {"step moved": "step, GB", "step over bound": "÷ bound", "round64 moved": "round, GB"}
        | {"round over step": "round ÷ step", "speedup": "speed-up", "round64 peak": "peak GB"},
    ),
    "trees": Work(
        "A tree's round",
        (
            *(("8b", "v5p", 1), ("8b", "h200", 1), ("8b", "v6e", 1), ("8b", "v5e", 8), ("4b", "v5p", 1)),
            *(("4b", "h200", 1), ("0.6b", "v5p", 1), ("0.6b", "h200", 1)),
        ),
        4 + 3 * len(programs.NODES),
        programs.trees,
        chip_bytes,
        PLACE
        | {"verify17 moved": "verify 17, GB", "verify64 moved": "verify 64, GB", "head moved": "head, GB"}
        | {"tree64 moved": "proposal of 64, GB", "commit64 moved": "commit, GB", "round_tree64 moved": "round, GB"},
    ),
    "contexts": Work(
        "Longer caches and more requests",
        (("8b", "v5p", 4), ("8b", "h200", 1), ("8b", "v6e", 1)),
        2 * len(programs.CONTEXTS) * len(programs.ROWS),
        programs.contexts,
        programs.context_bytes,
        PLACE
        | {f"step {slots} 1 moved": f"step, {slots:,} slots, GB" for slots in programs.CONTEXTS}
        | {f"round {slots} 1 moved": f"round, {slots:,} slots, GB" for slots in programs.CONTEXTS},
    ),
}
WORKS |= {
    "vocabulary": Work(
        "A draft vocabulary of 32,768 tokens",
        tuple(itertools.product(("8b", "0.6b", "4b"), ("h200", "v6e"), (1,)))
        + tuple((size, "v5p", 4) for size in ("8b", "0.6b", "4b")),
        2,
        programs.vocabulary,
        step_bytes,
        PLACE | {"step moved": "step, GB", "round64 moved": "round, GB", "round over step": "round ÷ step"},
    ),
    "heads": Work(
        "The head in a round",
        (("8b", "h200", 1),),
        1 + len(programs.HEADS),
        programs.heads,
        step_bytes,
        PLACE | {"step moved": "step, GB"} | {f"round_{name} moved": name.replace("_", " ") for name in programs.HEADS},
    ),
    "eight_bits": Work(
        "Eight bits",
        tuple(
            (size, chip, tensor)
            for size in ("8b", "4b", "0.6b")
            for chip, tensor in (("h200", 1), ("v5p", 4), ("v6e", 1))
        ),
        9,
        programs.eight_bits,
        step_bytes,
        PLACE
        | {"step moved": "step, GB", "round64 moved": "round, GB"}
        | {"int8 step moved": "int8 step", "int8 round64 moved": "int8 round", "int8 round64 share": "÷ bfloat16"}
        | {"fp8 step moved": "FP8 step", "fp8 round64 moved": "FP8 round", "fp8 round64 share": "÷ bfloat16"}
        | {"int8 round64 peak share": "int8 peak ÷ bfloat16", "draft over step": "int8 drafter: round ÷ step"}
        | {"draft vocabulary over step": "with 32,768 tokens", "int8 draft round64 share": "both int8 ÷ bfloat16"},
    ),
}
SAYS = """\
Compilers' figures; none is a measurement. bfloat16, per chip; {date}, jax {jax}. **Moved**: bytes to and from main
memory, counted in the program's text, loop bodies as often as they run. **Bound**: each weight that a pass multiplies
with once, the whole cache, the new rows. **Speed-up**: τ of a public rerun (4B 7.17, others 7.33) over round ÷ step."""


# ----------------------------------------------------------------------------------------------------- compiling


def name_of(what: str, entry: Entry) -> str:
    size, chip, tensor = entry
    return f"{what}-{size}-{chip}-tp{tensor}"


def devices_of(chip: str, tensor: int) -> list[jax.Device]:
    return list(topologies.devices_of(SLICES[chip]))[:tensor] if chip in SLICES else jax.devices()[:tensor]


def compile_program(mesh: Mesh, function, arguments) -> jax.stages.Compiled:
    """A program as it runs in decoding; these give nothing that could be stored where their argument 1 is."""
    layout = sharding.decode_layout(mesh, jax.eval_shape(function, *arguments))
    donated = () if function.__name__.startswith(("head", "tree")) else (1,)
    return jax.jit(function, donate_argnums=donated, out_shardings=layout).lower(*arguments).compile()


def examine(program: jax.stages.Compiled, label: str, cache: int) -> dict[str, Any]:
    """The compiler's figures of one program on one chip; "moved" and "launches" are read from texts.

    cache: bytes; "beyond_cache" is what is moved without the values of at most half of it that the program makes.
    """
    memory, cost, text = compiled.memory(program), compiled.cost(program), program.as_text()
    return {
        "peak": memory["peak"],
        "accessed": cost.get("bytes_accessed"),
        "seconds": cost.get("seconds"),
        "moved": program_text.traffic(text),
        "beyond_cache": program_text.traffic(text, cache=cache // 2) if cache else None,
        "launches": launches(label),
    }


def launches(label: str) -> dict[str, int] | None:
    """What a GPU starts for the program `label`: the compiler's list of thunks as the body of a loop."""
    folder = os.environ.get(DUMP)
    files = list(pathlib.Path(folder).glob(f"*jit_{label}.thunk_sequence_after_thunk_passes.txt")) if folder else []
    if not files:
        return None
    text = files[0].read_text()
    if label.startswith("loop"):
        return program_text.launches(text, trips=1)
    body = "\n".join(f"  {line}" for line in text.splitlines())
    trips = programs.BLOCK if "tree" in label else programs.BLOCK - 1
    return program_text.launches(f"000: kWhile [source]\n{body}", trips=trips)


def compile_entry(what: str, entry: Entry, folder: pathlib.Path, layers: int | None = None) -> None:
    """Every program that the entry's JSON does not hold yet; the file is rewritten after each."""
    (size, chip, tensor), work = entry, WORKS[what]
    file = folder / f"{name_of(what, entry)}.json"
    record = json.loads(file.read_text()) if file.exists() else {"programs": {}}
    record |= {"date": str(datetime.date.today()), "jax": jax.__version__}
    mesh = sharding.make_mesh(1, 1, tensor, devices_of(chip, tensor))
    models = programs.models_on(mesh, size, layers)  # outside: nothing can be run on that mesh
    with jax.set_mesh(mesh):
        record["must"] = work.must(models)
        for label, (function, arguments) in work.programs(mesh, models).items():
            if label in record["programs"] or (layers and label not in SMALL_PROGRAMS):
                continue
            begin = time.perf_counter()
            try:
                program = compile_program(mesh, function, arguments)
            except jax.errors.JaxRuntimeError as error:
                record["programs"][label] = {"error": str(error).splitlines()[0][:300]}
            else:
                record["programs"][label] = examine(program, label, CACHES.get(chip, 0))
            file.write_text(json.dumps(record, indent=1) + "\n")
            print(file.stem, label, f"{time.perf_counter() - begin:.0f} s", flush=True)


def compile_apart(what: str, entry: Entry, folder: pathlib.Path) -> None:
    """In a separate process: a compiler that fails may end its process."""
    with tempfile.TemporaryDirectory() as dump:
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        if entry[1] == "h200":
            dumping = f"--xla_dump_to={dump} --xla_dump_hlo_module_re=jit_(head|tree|commit64|round|loop)"
            environment |= {DUMP: dump, "XLA_FLAGS": dumping}
        command = ["nice", "-n", "10", sys.executable, "-m", "benchmarks.compilers.decode", f"--folder={folder}"]
        label = name_of(what, entry)
        if subprocess.run([*command, f"--entry={label}"], cwd=ROOT, env=environment).returncode:
            print(label, "failed", flush=True)


# -------------------------------------------------------------------------------------------------------- tables


def row_of(entry: Entry, record: Mapping[str, Any]) -> dict[str, Any]:
    """GB of every program that was compiled, and the ratios of a chain's round; a refused program has "error"."""
    size, chip, tensor = entry
    row: dict[str, Any] = {"entry": f"{size.upper()}, {chip}, {tensor}"}
    for label, one in record["programs"].items():
        if "error" in one:
            row[f"{label} error"] = one["error"]
            continue
        row |= {f"{label} {key}": one[key] and one[key] / GB for key in ("moved", "beyond_cache", "accessed", "peak")}
        row[f"{label} ms"] = one["seconds"] and one["seconds"] * 1e3
        if label in record["must"]:
            row |= {f"{label} bound": record["must"][label] / GB}
            row |= {f"{label} over bound": one["moved"] / record["must"][label]}
        row |= {f"{label} {key}": count for key, count in (one["launches"] or {}).items()}
    if "step moved" in row and "round64 moved" in row:
        row["round over step"] = row["round64 moved"] / row["step moved"]
        for label in [label for label in record["programs"] if label.endswith(" round64") and f"{label} moved" in row]:
            row[f"{label} share"] = row[f"{label} moved"] / row["round64 moved"]
            row[f"{label} peak share"] = row[f"{label} peak"] / row["round64 peak"]
            row[f"{label.removesuffix(' round64')} over step"] = row[f"{label} moved"] / row["step moved"]
        row["speedup"] = TAU.get(size, TAU["8b"]) / row["round over step"]
    return row


def write(what: str, folder: pathlib.Path, page: pathlib.Path, entries: Sequence[Entry]) -> None:
    """The table of the entries that have a JSON."""
    files = {entry: folder / f"{name_of(what, entry)}.json" for entry in entries}
    records = {entry: json.loads(file.read_text()) for entry, file in files.items() if file.exists()}
    if not records:
        return
    dates, versions = (", ".join(sorted({one[key] for one in records.values()})) for key in ("date", "jax"))
    command = f"python -m benchmarks.compilers.decode --folder=/tmp/compile_decode --what={what}"
    text = f"## {WORKS[what].title}\n\n```\n{command}\n```\n\n{SAYS.format(date=dates, jax=versions)}"
    missing = [name_of(what, entry) for entry in entries if entry not in records]
    text += f" Not compiled yet: {', '.join(missing)}." if missing else ""
    rows = [row_of(entry, record) for entry, record in records.items()]
    print(publish(page, f"compile {what}", rows, WORKS[what].columns, text), flush=True)


SMALL_PROGRAMS = ("step", "round64")  # on one CPU, with three layers


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--what", default=",".join(WORKS), help=f"joined by commas: {', '.join(WORKS)}")
    parser.add_argument("--only", default="", help="compile entries whose name holds this")
    parser.add_argument("--entry", default="", help=argparse.SUPPRESS)
    parser.add_argument("--page", type=pathlib.Path, default=DOCS / "compilers.md")
    parser.add_argument("--small", action="store_true", help="two programs of three layers for this CPU")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.small:
        entry = ("0.6b", "cpu", 1)
        compile_entry("chains", entry, options.folder, layers=3)
        write("chains", options.folder, options.page, [entry])
        return
    for what in options.what.split(","):
        for entry in WORKS[what].entries:
            label = name_of(what, entry)
            if options.entry == label:
                compile_entry(what, entry, options.folder)
            elif not options.entry and options.only in label:
                file = options.folder / f"{label}.json"
                if not file.exists() or len(json.loads(file.read_text())["programs"]) < WORKS[what].count:
                    compile_apart(what, entry, options.folder)
        if not options.entry:
            write(what, options.folder, options.page, WORKS[what].entries)


if __name__ == "__main__":
    main()
