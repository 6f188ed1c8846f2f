"""docs/compilers.md: what a training step costs on devices that are not present, one compilation per entry.

    python -m benchmarks.compilers.scaling --folder=/tmp/scaling
    python -m benchmarks.compilers.scaling --folder=/tmp/scaling --small     # a test of the command

Runs `train --dry_run` for every entry and keeps its dry_run.json in --folder, so that it can be stopped and started
again. It writes the table of the entries that are there into docs/compilers.md, and a CSV file. All take some three
hours of a core; --only=8b compiles a part.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.tables import DOCS, ROOT, publish
from domino_jax.forecast import topologies
from domino_jax.runtime.files import write_whole

SIZES = ("0_6b", "1_7b", "4b", "8b", "14b", "32b")
TOPOLOGIES = ("v5e:4x4", "v5p:4x4x4", "v6e:8x8", "v5e:16x16", "h200")
ANCHORS, LENGTH = 256, 3072
SMALL = ({"size": "0_6b", "topology": "v5e:2x2", "anchors": 1, "length": 64},)
COLUMNS = {"size": "size", "topology": "topology", "peak_gb": "peak GB a chip", "chip_gb": "of"}
COLUMNS |= {"tflop_row": "TFLOP a row", "error": "error"}
SAYS = """\
Compilers' figures; **none is a measurement** ({date}, jax {jax}). Paper recipes: 5 draft layers, blocks of 16, one row
per chip, parameters and optimizer over all chips (`mesh.fsdp=-1`), bfloat16 with float32 master weights. TFLOP a row:
the program's products, those that the backward pass computes again included."""


def entries() -> list[dict[str, Any]]:
    """All compilations, the most useful first."""
    table = [{"size": size, "topology": topology} for topology in TOPOLOGIES for size in SIZES]
    table.sort(key=lambda entry: (entry["topology"] != "v5e:4x4", entry["size"] not in ("0_6b", "8b")))
    return [{"anchors": ANCHORS, "length": LENGTH} | entry for entry in table]


def chips(topology: str) -> int:
    shape = topology.split(":")
    return math.prod(map(int, shape[1].split("x"))) if len(shape) > 1 else 1


def name_of(entry: dict[str, Any]) -> str:
    return f"{entry['size']}-{entry['topology'].replace(':', '-')}-a{entry['anchors']}-s{entry['length']}"


def compile_entry(entry: dict[str, Any], file: pathlib.Path) -> None:
    """One row per chip, parameters over all of them, and the compiler's effort that a run has."""
    workdir = file.with_suffix("")
    command = [
        *(sys.executable, "-m", "domino_jax.train"),
        f"--config=configs/qwen3_{entry['size']}.py",
        f"--workdir={workdir}",
        *("--dry_run", f"--topology={entry['topology']}"),
        f"--config.train.batch_size={chips(entry['topology'])}",
        f"--config.train.num_anchors={entry['anchors']}",
        f"--config.data.max_length={entry['length']}",
        "--config.eval.every=0",  # the step alone
    ]
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_EFFORT")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    error = (done.stderr.strip().splitlines() or ["no output"])[-1]
    record = {"error": error} if done.returncode else json.loads((workdir / "dry_run.json").read_text())
    record |= {"date": str(datetime.date.today()), "jax": jax.__version__}
    write_whole(file, json.dumps(record, indent=1) + "\n")
    print(file.stem, f"failed: {error}" if done.returncode else "done", flush=True)


def row_of(entry: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    row = {**entry, "size": entry["size"].replace("_", ".").upper()}
    row["chip_gb"] = topologies.CHIPS[entry["topology"].split(":")[0]].memory / 1e9
    if "error" in record:
        return row | {"error": record["error"]}
    row["peak_gb"] = record["peak_bytes_per_chip"] / 1e9
    return row | {"tflop_row": record["flops"] / chips(entry["topology"]) / 1e12, "error": ""}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="", help="compile entries whose name holds this")
    parser.add_argument("--page", type=pathlib.Path, default=DOCS / "compilers.md")
    parser.add_argument("--small", action="store_true", help="one small entry")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    files = {name_of(entry): (entry, options.folder / f"{name_of(entry)}.json") for entry in entries()}
    if options.small:
        files = {name_of(entry): (entry, options.folder / f"{name_of(entry)}.json") for entry in SMALL}
    for name, (entry, file) in files.items():
        if options.only in name and not file.exists():
            compile_entry(entry, file)
    records = [(entry, json.loads(file.read_text())) for entry, file in files.values() if file.exists()]
    if records:
        dates, versions = (", ".join(sorted({record[key] for _, record in records})) for key in ("date", "jax"))
        command = "```\npython -m benchmarks.compilers.scaling --folder=/tmp/scaling\n```"
        text = f"## A training step\n\n{command}\n\n{SAYS.format(date=dates, jax=versions)}"
        rows = [row_of(entry, record) for entry, record in records]
        print(publish(options.page, "scaling", rows, COLUMNS, text), flush=True)


if __name__ == "__main__":
    main()
