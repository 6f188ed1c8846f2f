"""docs/scaling.md: what a training step costs on devices that are not present, one compilation per entry.

    python -m benchmarks.compilers.scaling --folder=/tmp/scaling

Runs `train --dry_run` for every entry and keeps its dry_run.json in --folder, so that it can be stopped and started
again. When all entries are there, it writes the tables of docs/scaling.md. Some 50 minutes on one core; --only=8b
compiles a part, --effort=0 compiles as a run does (some three hours).
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import subprocess
import sys

import jax

from benchmarks.document import put_section
from domino_jax.forecast import topologies
from domino_jax.runtime.files import write_whole
from domino_jax.training import estimates

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZES = ("0_6b", "1_7b", "4b", "8b", "14b", "32b")
TOPOLOGIES = ("v5e:4x4", "v5p:4x4x4", "v6e:8x8", "v5e:16x16", "h200")
ANCHORS, LENGTH = 256, 3072
# How the cost grows, on the smallest model: its steps compile fastest and its parts are the same.
GROWN = "0_6b"
MORE_ANCHORS = (128, 512)
MORE_LENGTHS = (1536, 6144)
MORE_CHIPS = ("v5e:2x2", "v5e:8x8")


def entries() -> list[dict]:
    """All compilations, the most useful first."""
    table = [{"size": size, "topology": topology} for topology in TOPOLOGIES for size in SIZES]
    table.sort(key=lambda entry: (entry["topology"] != "v5e:4x4", entry["size"] not in ("0_6b", "8b")))
    grown = [{"size": GROWN, "topology": "v5e:4x4", "anchors": anchors} for anchors in MORE_ANCHORS]
    grown += [{"size": GROWN, "topology": "v5e:4x4", "length": length} for length in MORE_LENGTHS]
    grown += [{"size": GROWN, "topology": topology} for topology in MORE_CHIPS]
    return [{"anchors": ANCHORS, "length": LENGTH} | entry for entry in [*table, *grown]]


def chips(topology: str) -> int:
    shape = topology.split(":")
    return math.prod(map(int, shape[1].split("x"))) if len(shape) > 1 else 1


def name(entry: dict) -> str:
    return f"{entry['size']}-{entry['topology'].replace(':', '-')}-a{entry['anchors']}-s{entry['length']}"


def compile_entry(entry: dict, folder: pathlib.Path, effort: float) -> None:
    """One row per chip, parameters over all of them. effort: of the compiler, from -1 (least) over 0 (as in a run)."""
    command = [
        *(sys.executable, "-m", "domino_jax.train"),
        f"--config=configs/qwen3_{entry['size']}.py",
        f"--workdir={folder / name(entry)}",
        *("--dry_run", f"--topology={entry['topology']}"),
        f"--config.train.batch_size={chips(entry['topology'])}",
        f"--config.train.num_anchors={entry['anchors']}",
        f"--config.data.max_length={entry['length']}",
        "--config.eval.every=0",  # the step alone
    ]
    efforts = {name: str(effort) for name in ("JAX_EXEC_TIME_OPTIMIZATION_EFFORT", "JAX_MEMORY_FITTING_EFFORT")}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | efforts, capture_output=True, text=True)
    figures = folder / name(entry) / "dry_run.json"
    found = {"error": done.stderr[-4000:]} if done.returncode else json.loads(figures.read_text())
    found |= {"date": str(datetime.date.today()), "jax": jax.__version__}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(file_of(entry, folder), json.dumps(found, indent=1) + "\n")
    print(name(entry), f"failed: {done.stderr.strip().splitlines()[-1:]}" if done.returncode else "done", flush=True)


def file_of(entry: dict, folder: pathlib.Path) -> pathlib.Path:
    """Holds the figures of an entry, or the "error" of its compilation, and the date and the version of jax."""
    return folder / f"{name(entry)}.json"


def read(entry: dict, folder: pathlib.Path) -> dict:
    return json.loads(file_of(entry, folder).read_text())


def row(label: str, entry: dict, folder: pathlib.Path) -> str:
    found = read(entry, folder)
    if "error" in found:
        return f"| {label} | **no**: it does not compile | | | | |"
    floors = {
        "products": found["flops"] / found["chips"] / estimates.peak_flops(entry["topology"]),
        "memory": (found["bytes_accessed"] or 0.0) / topologies.chip_of(entry["topology"]).bandwidth,
    }
    bound = max(floors, key=floors.get)
    cells = [
        label,
        "yes" if found["fits"] else "**no**",
        f"{found['peak_bytes_per_chip'] / 1e9:.1f} of {found['chip_bytes'] / 1e9:.0f}",
        f"{found['flops'] / found['rows'] / 1e12:.1f}",
        f"{floors[bound] * 1e3:,.0f} ({bound})",
        f"{found['rows'] / found['chips'] / floors[bound]:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| | fits | peak GB a chip | TFLOP a row | data sheet ms a step | rows/s a chip |\n|---|---|---:|---:|---:|---:|"
)


def document(folder: pathlib.Path) -> str:
    """The section: a table for each topology of which anything was compiled, and how cost grows."""
    base = {"anchors": ANCHORS, "length": LENGTH}
    compiled = [read(entry, folder) for entry in entries() if file_of(entry, folder).exists()]
    dates, versions = (", ".join(sorted({found[key] for found in compiled})) for key in ("date", "jax"))
    parts = [INTRODUCTION.format(date=dates, jax=versions)]
    for topology in TOPOLOGIES:
        sizes = {size.replace("_", ".").upper(): base | {"size": size, "topology": topology} for size in SIZES}
        parts += table(f"{topology}, {chips(topology)} chip{'s' if chips(topology) > 1 else ''}", sizes, folder)
    grown = {"size": GROWN, "topology": "v5e:4x4"} | base
    rows = {f"{anchors} anchors": grown | {"anchors": anchors} for anchors in sorted({*MORE_ANCHORS, ANCHORS})}
    rows |= {f"{length:,} tokens": grown | {"length": length} for length in sorted({*MORE_LENGTHS, LENGTH})}
    by_chips = sorted({*MORE_CHIPS, "v5e:4x4", "v5e:16x16"}, key=chips)
    rows |= {topology: grown | {"topology": topology} for topology in by_chips}
    parts += table("How it grows: Qwen3-0.6B, v5e:4x4 unless stated otherwise", rows, folder)
    return "\n".join(parts)


def table(title: str, rows: dict[str, dict], folder: pathlib.Path) -> list[str]:
    """Lines of one table, without the entries that were not compiled; none when none was."""
    there = {label: entry for label, entry in rows.items() if file_of(entry, folder).exists()}
    if not there:
        return []
    return [f"## {title}\n", HEADER, *(row(label, entry, folder) for label, entry in there.items()), ""]


INTRODUCTION = """# What a training step costs, by the compilers

Every figure here comes from compiling the real step for devices that were not present
({date}, jax {jax}, the TPU and CUDA compilers of the same release); **none is a measurement**.
Paper recipes: 5 draft layers, blocks of 16, 256 anchors, rows of 3,072 tokens, one row per chip, parameters and
optimizer over all chips (`mesh.fsdp=-1`), bfloat16 with float32 master weights. The command that made the tables:

```
python -m benchmarks.compilers.scaling --folder=/tmp/scaling
```

- The compilers worked with their least effort (`--effort=-1`), which takes a quarter of the time. On Qwen3-0.6B,
  v5e:4x4, that gives a peak of 3.35 GB per chip where the effort of a run gives 3.25, and the same products.
- **peak**: the compiler's own plan of a chip's memory.
- **TFLOP**: the matrix products of the program, what is computed again in the backward pass and attention under the
  mask included.
- **data sheet ms**: the larger of two times at the data sheet's rates: the program's products at the chip's peak, and
  the compiler's bytes at its memory bandwidth (it counts a loop's body once). The larger one is in brackets;
  **rows/s** follows from it.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--effort", type=float, default=-1.0, help="of the compiler: -1 is least, 0 as in a run")
    parser.add_argument("--only", default="", help="compile entries whose name holds this")
    parser.add_argument(
        "--write", action="store_true", help="write the document from the stored entries, compile nothing"
    )
    arguments = parser.parse_args()
    for entry in [] if arguments.write else entries():
        if arguments.only in name(entry) and not file_of(entry, arguments.folder).exists():
            compile_entry(entry, arguments.folder, arguments.effort)
    missing = [name(entry) for entry in entries() if not file_of(entry, arguments.folder).exists()]
    if missing:
        print(f"docs/scaling.md is left as it is, because these entries are not compiled: {', '.join(missing)}")
        return
    put_section(ROOT / "docs" / "scaling.md", "scaling", document(arguments.folder))


if __name__ == "__main__":
    main()
