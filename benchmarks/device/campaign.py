"""A measurement of this package on the accelerator at hand, in phases that can be resumed; one JSON for each.

    python -m benchmarks.device.campaign --output=FOLDER --minutes=9            # a GPU or TPU
    python -m benchmarks.device.campaign --output=FOLDER --phases=decode-8b,train --docs
    python -m benchmarks.device.campaign --output=FOLDER --small                # a test on any CPU

Golden parity, bandwidth, decoding and training of public shapes with random weights, and with --smollm2 the SmolLM2
pipeline. Needs neither a hub nor a checkpoint. A phase whose FOLDER/NAME.json exists is not measured again; a phase
that failed is tried again. Each phase runs in a separate process, which leaves what it prints in FOLDER/NAME.log, and
shares the compiled programs in FOLDER/compiled. FOLDER/summary.md holds the table; --docs writes it into
docs/benchmarks.md, with a CSV file beside. Exit code 1: a phase failed, the others ran.
"""

import argparse
import contextlib
import datetime
import functools
import itertools
import json
import math
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks.device import phases, smollm2
from benchmarks.device.parity import parity
from benchmarks.tables import DOCS, ROOT, publish
from domino_jax.runtime import environment
from domino_jax.runtime.errors import DominoError, first_line
from domino_jax.runtime.files import write_whole
from domino_jax.weights.loading import keep_compiled

GOLDEN = ROOT / "tests" / "golden"
SECTION = "device_campaign"  # of docs/benchmarks.md
SIZES = ("8b", "4b", "0.6b")
# What measures a phase, and its minutes: rough estimates for one H100, compilation included.
DECODING = {
    "decode": (phases.decode, 3.0),
    "context": (phases.context, 3.0),
    "batch": (phases.batch, 3.5),
    "drafts": (phases.drafts, 2.5),
    "eight_bits": (phases.eight_bits, 3.0),
    "attention": (phases.attention, 1.0),
}
PIPELINE = {
    "answers": (smollm2.answers, 3.0),
    "training": (smollm2.training, 4.0),
    "decoding": (smollm2.decoding, 3.0),
}
# Shares the accelerator with nothing else: the default of three quarters is too little for the training step of 8B.
MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
ORIGIN = ("devices", "small")  # numbers of a record that are no measurement
GRACE = 20.0  # seconds that a phase gets to save what it has when the minutes are over


class Phase(NamedTuple):
    """minutes: an estimate.  measure: () → JSON values; "failed" among them says why it counts as failed."""

    minutes: float
    measure: Callable[[], dict[str, Any]]


def all_phases(choices: argparse.Namespace) -> dict[str, Phase]:
    """All of them, the most informative first."""
    scale = phases.SMALL if choices.small else phases.LARGE
    sizes = ("small",) if choices.small else SIZES
    peak = choices.peak_tflops
    planned = {
        "parity": Phase(2.0, functools.partial(parity, GOLDEN, scale.golden_sets)),
        "bandwidth": Phase(0.5, functools.partial(phases.bandwidth, scale, peak)),
    }
    for point in phases.POINTS:
        measure = functools.partial(phases.train, point, sizes[0], scale, peak)
        planned[f"train-{point}"] = Phase(3.0, measure)
    for size, (kind, (measure, minutes)) in itertools.product(sizes, DECODING.items()):
        planned[f"{kind}-{size}"] = Phase(minutes, functools.partial(measure, size, scale))
    if choices.smollm2:
        flags = tuple(shlex.split(choices.recipe_flags))
        pipeline = smollm2.Pipeline(choices.smollm2, choices.output / "smollm2", flags)
        for name, (measure, minutes) in PIPELINE.items():
            planned[f"smollm2-{name}"] = Phase(minutes, functools.partial(measure, pipeline))
    return planned


def selected(choices: argparse.Namespace) -> dict[str, Phase]:
    """Those that --phases names, by their names or by their beginnings; all without it."""
    available = all_phases(choices)
    wanted = [name for name in (choices.phases or "").split(",") if name]
    if wanted == ["summary"]:
        return {}
    unknown = [name for name in wanted if not any(matches(name, phase) for phase in available)]
    if unknown:
        hint = "" if choices.smollm2 else " (and smollm2-… with --smollm2=FOLDER)"
        raise DominoError(f"--phases names {unknown[0]}, but the phases are {', '.join(available)}{hint}, summary.")
    chosen = [name for name in available if not wanted or any(matches(one, name) for one in wanted)]
    return {name: available[name] for name in chosen}


def matches(wanted: str, phase: str) -> bool:
    return phase == wanted or phase.startswith(f"{wanted}-")


# ------------------------------------------------------------------------------------------------------- one phase


def run_phase(choices: argparse.Namespace, name: str) -> None:
    """Measures a phase in this process and writes its JSON; an exception of it becomes "failed"."""
    if not choices.small:
        keep_compiled(choices.output.absolute() / "compiled")
    # The commands of the pipeline need the device for themselves, so this process takes it after them.
    described = {} if name.startswith("smollm2") else description(choices)
    begin = time.monotonic()
    try:
        result = selected(choices)[name].measure()
    except Exception as error:  # whatever one phase meets, the next one is measured
        traceback.print_exc()
        result = {"failed": first_line(error)}
    record = {"phase": name, **(described or description(choices)), "seconds": time.monotonic() - begin, **result}
    write_record(choices.output, name, record)


def description(choices: argparse.Namespace) -> dict[str, Any]:
    """Where a figure comes from.

    Raises:
        DominoError: the folder holds figures of another device or of another size of campaign.
    """
    devices = jax.devices()
    git = environment.git_state(ROOT / "domino_jax")
    here = {"device": devices[0].device_kind, "devices": len(devices), "jax": jax.__version__, "small": choices.small}
    for name, record in read_records(choices.output).items():
        apart = [key for key in here if key in record and record[key] != here[key]]
        if apart:
            key = apart[0]
            raise DominoError(
                f"{choices.output}/{name}.json was measured with {key} {record[key]}, and here it is {here[key]}.\n"
                "Name another --output: figures of different devices or versions do not belong into one table."
            )
    variables = {name: os.environ[name] for name in environment.VARIABLES if name in os.environ}
    date = str(datetime.datetime.now(datetime.UTC).date())
    return {**here, "date": date, "commit": git and git[:9], "variables": variables}


def write_record(folder: pathlib.Path, name: str, record: Mapping[str, Any]) -> None:
    write_whole(folder / f"{name}.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def read_records(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The phases' JSONs by name, failed ones too."""
    records = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}
    return {name: record for name, record in records.items() if "phase" in record}


# --------------------------------------------------------------------------------------------------- the campaign


def run_apart(choices: argparse.Namespace, name: str, left: float) -> None:
    """run_phase in a separate process, which is stopped after `left` seconds.

    A crash of it costs one phase, all its memory is given back, and the peak of that memory is the phase's.
    """
    command = [sys.executable, "-m", "benchmarks.device.campaign", *choices.arguments, f"--one={name}"]
    with (choices.output / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=MEMORY | os.environ, start_new_session=True
        )
        try:
            code = process.wait(None if math.isinf(left) else left)
        except subprocess.TimeoutExpired:
            code = f"stopped after {left:.0f} s, when the minutes were over"
        finally:
            end_group(process)
    if code == DominoError.exit_code:
        raise DominoError((choices.output / f"{name}.log").read_text().strip().removeprefix("error: "))
    if code:
        reason = code if isinstance(code, str) else f"its process ended with {code} (see {name}.log)"
        write_record(choices.output, name, {"phase": name, "small": choices.small, "failed": reason})


def end_group(process: subprocess.Popen) -> None:
    """Ends a process that is still running and all that it started; first they may save what they have."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)


def campaign(choices: argparse.Namespace, run: Callable[[argparse.Namespace, str, float], None] = run_apart) -> int:
    """Runs what is not measured yet and fits, one line for each; returns the exit code."""
    begin, chosen = time.monotonic(), selected(choices)
    choices.output.mkdir(parents=True, exist_ok=True)
    for name, phase in chosen.items():
        records = read_records(choices.output)
        if name in records and "failed" not in records[name]:
            print(f"{name}: measured before", flush=True)
            continue
        left = 60 * choices.minutes - (time.monotonic() - begin)
        if 60 * phase.minutes > left:
            print(f"{name}: left out, it takes about {phase.minutes:g} of {left / 60:.1f} minutes left", flush=True)
            continue
        run(choices, name, left)
        record = read_records(choices.output)[name]
        print(f"{name}: FAILED: {record['failed']}" if "failed" in record else f"{name}: {record['seconds']:.0f} s")
    summarize(choices)
    records = read_records(choices.output)
    return int(any("failed" in records[name] for name in chosen if name in records))


def summarize(choices: argparse.Namespace) -> None:
    """FOLDER/summary.md from all JSONs, and with --docs the page."""
    records = read_records(choices.output)
    rows = [row for name, record in records.items() for row in rows_of(name, record)]
    if not rows:
        return
    whole = [record for record in records.values() if "failed" not in record]
    origin = ""
    if whole:
        dates = ", ".join(sorted({record["date"] for record in whole}))
        commits = ", ".join(sorted({str(record["commit"]) for record in whole}))
        one = whole[0]
        origin = f"{one['devices']} × {one['device']}, jax {one['jax']}, {dates}, commit {commits}. "
    text = f"`python -m benchmarks.device.campaign`: {origin}{SAYS}"
    pages = [choices.output / "summary.md", *([DOCS / "benchmarks.md"] if choices.docs else [])]
    for page in pages:
        print(publish(page, SECTION, rows, COLUMNS, text), flush=True)


COLUMNS = {"phase": "phase", "part": "part", "ms": "ms", "of_limit": "× its limit", "break_even_tau": "break-even τ"}
COLUMNS |= {"tokens_per_second": "tokens/s", "mfu": "MFU", "tau_pooled": "τ", "peak_gb": "peak GB", "note": "note"}
SAYS = (
    "Random weights but in smollm2. A limit is the time that the bytes which must be moved take at the bandwidth of a "
    "copy, measured in the same run; break-even τ is round ÷ step."
)


def rows_of(name: str, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each part that a phase measured."""
    base = {"phase": name}
    if "failed" in record:
        return [base | {"part": "", "note": f"failed: {first_line(record['failed'])}"}]
    if "checks" in record:
        rows = []
        for part, checks in record["checks"].items():
            worst = max((one["error"] / one["limit"] for one in checks.values() if one["limit"]), default=0.0)
            rows.append(base | {"part": part, "note": f"{len(checks)} checks, worst {worst:.0%} of its tolerance"})
        return rows
    if "sizes" in record:
        rows = []
        for size, one in record["sizes"].items():
            figures = {"break_even_tau": one["break_even_tau"], "tokens_per_second": one["plain_tokens_per_second"]}
            rows.append(base | {"part": f"step, {size}", **one["step"]})
            rows.append(base | {"part": f"round, {size}", **one["round"], **figures})
        return rows
    if "modes" in record:
        return [base | {"part": mode, **figures} for mode, figures in record["modes"].items()]
    if "parts" in record:
        peak = record["peak_bytes"] and record["peak_bytes"] / 1e9
        rows = [base | {"part": part, **figures} for part, figures in record["parts"].items()]
        rows.append(base | {"part": "all", "peak_gb": peak, "break_even_tau": record.get("break_even_tau")})
        return rows
    numbers = {key: value for key, value in record.items() if isinstance(value, (int, float)) and key not in ORIGIN}
    return [base | {"part": key, "note": f"{value:.4g}"} for key, value in numbers.items()]


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=pathlib.Path, required=True, help="folder of the JSONs; continued if it exists"
    )
    parser.add_argument("--phases", help="names or their beginnings, joined by commas; summary: only the tables")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no phase that would end later")
    parser.add_argument("--small", action="store_true", help="tiny shapes in float32: a test, on any CPU")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/benchmarks.md")
    parser.add_argument("--peak-tflops", type=float, help="bfloat16 peak of a device that is not known here")
    parser.add_argument("--smollm2", type=pathlib.Path, help="folder of assets/make_smollm2.py: its pipeline as well")
    parser.add_argument("--recipe-flags", default="", help="further flags of the pipeline's commands, in quotes")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    choices = parser.parse_args(argv)
    choices.arguments = list(argv)
    if choices.docs and choices.small:
        parser.error("--small figures are no measurement, and --docs would publish them; give one of the two.")
    if choices.smollm2 and not (choices.smollm2 / "config.json").is_file():
        parser.error(f"--smollm2={choices.smollm2} holds no config.json; make it with python -m assets.make_smollm2.")
    return choices


def main(argv: Sequence[str] | None = None) -> int:
    choices = parsed(sys.argv[1:] if argv is None else argv)
    try:
        if choices.one:
            run_phase(choices, choices.one)
            return 0
        return campaign(choices)
    except DominoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a phase in progress does not outlive it
    sys.exit(main())
