"""The tables that compile_decode.py writes into docs/benchmarks.md, from the JSON files of its folder."""

import json
import pathlib
from collections.abc import Mapping, Sequence

from domino_jax import topologies

BEGIN, END = "<!-- compile_decode: begin -->", "<!-- compile_decode: end -->"
# τ at T = 0, pooled over eight tasks, of a public rerun of the published drafters; other sizes are given the 8B's.
TAU = {"4b": 7.17, "8b": 7.33}
GB = 1e9

INTRODUCTION = """## Decoding, compiled without the hardware

`python -m benchmarks.compile_decode --folder=/tmp/compile_decode` ({date}, jax {jax}, the TPU and CUDA compilers of
that release). **Compilers' figures, none is a measurement.** Batch 1, bfloat16, caches of 4,096 slots, five draft
layers, blocks of 16 (verify 17), the head whole on every chip; tp is `mesh.tensor`. Per chip:

- **must**: bytes that no step avoids: every weight it multiplies with once (of the embedding nothing, unless it is the
  lm_head too), the whole cache read, the new rows written. A round must do this for verify, draft and head, whose
  weights count once per corrected draft (a TPU moves fewer where its vector memory can keep one of them).
- **moved**: bytes to and from main memory in the program's text, loop bodies as often as they run
  (`domino_jax/hbm_traffic.py`). **accessed** is the compiler's own count: it also has what is prefetched into vector
  memory (two or three times), all of a table of which one row is gathered, and loop bodies once. It is the larger the
  more a program prefetches, so the aims are judged by what is moved.
- **compiler's ms**: its own estimate, which follows from what it counts as accessed ("–": the compiler for GPUs gives
  neither). **floor ms**: moved bytes at the data sheet's bandwidth.
- **speed-up**: τ over (moved by a round / moved by a step), with τ of the public rerun (4B 7.17, 8B 7.33; other sizes
  are given the 8B's): what the shape allows, if both are bound by memory.
"""

HEADER = (
    "| size | chip | tp | peak GB (a round) | step: must / moved / accessed GB | moved ÷ must | compiler's ms "
    "| floor ms | round: must / moved GB | moved ÷ must | round ÷ step | verify 64 ÷ 17 | speed-up |\n"
    "|---|---|---:|---:|---|---:|---:|---:|---|---:|---:|---:|---:|"
)


def row(label: str, found: Mapping) -> str:
    """One line; a program that is not compiled yet leaves its cells empty, one that the compiler refused says so."""
    size, chip, tensor = label.split("-")
    programs, must = found["programs"], found["must"]
    kept = {part: made for part, made in programs.items() if "error" not in made}
    device = topologies.CHIPS[chip]
    step, whole = (kept.get(part) for part in ("step", "round"))
    refused = [part for part, made in programs.items() if "error" in made]
    peak = f"{whole['peak'] / GB:.1f} of {device.memory / GB:.0f}" if whole else ""
    if refused or (whole and whole["peak"] > device.memory):
        peak += " **does not fit**"
    cells = [size.upper(), chip, tensor[2:], peak.strip(), *[""] * 9]
    if step:
        accessed = f"{step['accessed'] / GB:.2f}" if step["accessed"] else "–"
        cells[4] = f"{must['step'] / GB:.2f} / {step['traffic'] / GB:.2f} / {accessed}"
        cells[5] = f"{step['traffic'] / must['step']:.2f}"
        cells[6] = f"{step['seconds'] * 1e3:.2f}" if step["seconds"] else "–"
        cells[7] = f"{step['traffic'] / device.bandwidth * 1e3:.2f}"
    if whole:
        cells[8] = f"{must['round'] / GB:.2f} / {whole['traffic'] / GB:.2f}"
        cells[9] = f"{whole['traffic'] / must['round']:.2f}"
    if step and whole:
        ratio = whole["traffic"] / step["traffic"]
        cells[10], cells[12] = f"{ratio:.2f}", f"{TAU.get(size, TAU['8b']) / ratio:.1f}"
    if "verify17" in kept and "verify64" in kept:
        cells[11] = f"{kept['verify64']['traffic'] / kept['verify17']['traffic']:.2f}"
    return "| " + " | ".join(cells) + " |"


PARTS_HEADER = (
    "| size | chip | tp | verify 17: moved / must GB | draft | head | loop's peak GB | compile s: step, round, loop |\n"
    "|---|---|---:|---|---|---|---:|---|"
)


def parts_row(label: str, found: Mapping) -> str:
    size, chip, tensor = label.split("-")
    kept = {part: made for part, made in found["programs"].items() if "error" not in made}
    cells = [size.upper(), chip, tensor[2:]]
    for part in ("verify17", "draft", "head"):
        moved = f"{kept[part]['traffic'] / GB:.2f}" if part in kept else "–"
        cells.append(f"{moved} / {found['must'][part] / GB:.2f}")
    cells.append(f"{kept['loop']['peak'] / GB:.1f}" if "loop" in kept else "–")
    times = [f"{kept[part]['compile_seconds']:.0f}" if part in kept else "–" for part in ("step", "round", "loop")]
    return "| " + " | ".join([*cells, ", ".join(times)]) + " |"


def gpu_lines(found: Mapping[str, Mapping]) -> list[str]:
    """What one round starts on a GPU, a line an entry."""
    lines = []
    for label, entry in found.items():
        counted = entry.get("launches")
        if counted:
            total = counted["kernels"] + counted["copies"]
            lines.append(
                f"- {label.split('-')[0].upper()} on one H200: a round of the loop is {counted['kernels']} kernels and "
                f"{counted['copies']} copies; {counted['in_buffers']} of these {total} stand in command buffers, and "
                f"the host starts {counted['starts']} things."
            )
    return lines


CACHE_HEADER = (
    "| size | chip | step ÷ must | verify 17 ÷ must | round ÷ must | round ÷ step | verify 64 ÷ 17 | speed-up |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|"
)


def cache_rows(found: Mapping[str, Mapping]) -> list[str]:
    """What is left of the traffic where a chip's cache keeps what a program makes for itself, a line an entry."""
    lines = []
    for label, entry in found.items():
        moved = {part: made.get("beyond_cache") for part, made in entry["programs"].items()}
        if not all(moved.get(part) for part in ("step", "verify17", "verify64", "round")):
            continue
        size, chip, _ = label.split("-")
        of_must = [f"{moved[part] / entry['must'][part]:.2f}" for part in ("step", "verify17", "round")]
        steps, wider = moved["round"] / moved["step"], moved["verify64"] / moved["verify17"]
        against = [f"{steps:.2f}", f"{wider:.2f}", f"{TAU.get(size, TAU['8b']) / steps:.1f}"]
        lines.append("| " + " | ".join([size.upper(), chip, *of_must, *against]) + " |")
    if not lines:
        return []
    explained = (
        "The same without the values of at most 25 MB that a program makes itself and that the H200's L2 of 50 MB can "
        "keep: above all the float32 partial sums of products whose inner axis the compiler cuts in four or eight."
    )
    return [explained, "", CACHE_HEADER, *lines, ""]


def section(found: Mapping[str, Mapping], missing: Sequence[str]) -> str:
    """The whole part, of entry name → what its JSON holds."""
    dates, versions = ({entry[key] for entry in found.values()} for key in ("date", "jax"))
    lines = [INTRODUCTION.format(date=", ".join(sorted(dates)), jax=", ".join(sorted(versions))), HEADER]
    lines += [row(label, entry) for label, entry in found.items()]
    lines += ["", PARTS_HEADER, *(parts_row(label, entry) for label, entry in found.items()), ""]
    lines += [*cache_rows(found), *gpu_lines(found), ""]
    if missing:
        lines.append(f"Not compiled yet, or not all of it: {', '.join(missing)}.")
    return "\n".join(lines).strip() + "\n"


def write(document: pathlib.Path, folder: pathlib.Path, names: Sequence[str], programs: int) -> None:
    """Puts the part between its two marks, which the document must have; `programs` of an entry make it whole."""
    found, missing = kept(folder, names, programs)
    if found:
        put(document, (BEGIN, END), section(found, missing))


def kept(folder: pathlib.Path, names: Sequence[str], programs: int) -> tuple[dict[str, dict], list[str]]:
    """Entry name → what its JSON in the folder holds, and the names of entries that are not whole."""
    files = {label: folder / f"{label}.json" for label in names}
    found = {label: json.loads(file.read_text()) for label, file in files.items() if file.exists()}
    return found, [label for label in names if label not in found or len(found[label]["programs"]) < programs]


def put(document: pathlib.Path, marks: tuple[str, str], part: str) -> None:
    """Replaces what stands between the two marks."""
    begin, end = marks
    before, rest = document.read_text().split(begin)
    after = rest.split(end)[1]
    document.write_text(f"{before}{begin}\n{part}{end}{after}")
