"""The tables that decode.py writes into docs/compile_decode.md, from the JSON files of its folder."""

import json
import pathlib
import textwrap
from collections.abc import Mapping, Sequence

from benchmarks.document import put_section
from domino_jax.forecast import topologies

PAGE = "compile_decode.md"  # in docs/
SECTION = "compile_decode"  # of the page
# τ at T = 0, pooled over eight tasks, of a public rerun of the published drafters; other sizes are given the 8B's.
TAU = {"4b": 7.17, "8b": 7.33}
GB = 1e9

ROUND = "round64"  # with the recipes' candidates
COUNTS = ("", "16", "64", "256")  # of candidates, after "head" or "round"; "" is the whole vocabulary

# Ratios of bytes moved that the project aims to stay below: (words, part, divisor, limit).
GOALS = (
    ("a step moves at most 1.15 × its lower bound", "step", "must", 1.15),
    ("a round moves at most 1.45 × a step", ROUND, "step", 1.45),
)

INTRODUCTION = """\
`python -m benchmarks.compilers.decode --folder=/tmp/compile_decode` ({date}, jax {jax}, the TPU and
CUDA compilers of that release). **These are compilers' figures; none is a measurement.** Batch 1, bfloat16, caches of
4,096 slots, five draft layers, blocks of 16 (verify 17); tp is `mesh.tensor`. The head corrects 64 candidates per slot
(`decode.head_candidates`). It is whole on every chip but for `split head` (`decode.mesh.split_head`). All figures are
per chip:

- **bound**: a lower bound on the bytes of main memory. Each weight that a pass multiplies with counts once, however
  often the pass uses it; the whole cache is read; new rows are written. The embedding counts only where it is the
  lm_head too. A round reads the lm_head twice, as verification waits for the drafts.
- **moved**: bytes to and from main memory, counted in the program's text, loop bodies as often as they run
  (`benchmarks/compilers/hbm_traffic.py`). The matrices of the head's GRU are read once per draft, 16 times per round,
  so a round moves more than its bound wherever the chip cannot keep them.
- **accessed**: the compiler's own count. It includes data prefetched into vector memory once per copy and once per use,
  and a whole table where one row is gathered, but it counts a loop's body once. The compiler for GPUs reports none (–).
- **data sheet ms**: moved bytes at the data sheet's bandwidth. **compiler's ms**: the compiler's own estimate, which
  follows from the bytes it counts as accessed. Neither bounds the other.
- **speed-up**: τ over (moved by a round / moved by a step), with τ of the public rerun (4B 7.17, 8B 7.33; the other
  sizes use the 8B's). This is what the shapes allow if both programs are bound by memory.
"""

HEADER = (
    "| size | chip | tp | peak GB (a round) | step: bound / moved / accessed GB | moved ÷ bound | data sheet ms "
    "| compiler's ms | round: bound / moved / accessed GB | round ÷ step | verify 64 ÷ 17 | speed-up |\n"
    "|---|---|---:|---:|---|---:|---:|---:|---|---:|---:|---:|"
)


def compiled_parts(found: Mapping) -> dict[str, Mapping]:
    """The programs of an entry that the compiler accepted."""
    return {part: made for part, made in found["programs"].items() if "error" not in made}


def row(label: str, found: Mapping) -> str:
    """One line. Cells of a program that is not compiled yet are empty; a refused program is marked."""
    size, chip, _ = label.split("-")
    must, kept, device = found["must"], compiled_parts(found), topologies.CHIPS[chip]
    step, whole = (kept.get(part) for part in ("step", ROUND))
    peak = f"{whole['peak'] / GB:.1f} of {device.memory / GB:.0f}" if whole else ""
    if len(kept) < len(found["programs"]) or (whole and whole["peak"] > device.memory):
        peak += " **does not fit**"
    cells = [*places(label), peak.strip(), *[""] * 8]
    if step:
        cells[4] = of_three(must["step"], step)
        cells[5] = f"{step['traffic'] / must['step']:.2f}"
        cells[6] = f"{step['traffic'] / device.bandwidth * 1e3:.2f}"
        cells[7] = f"{step['seconds'] * 1e3:.2f}" if step["seconds"] else "–"
    if whole:
        cells[8] = of_three(must[ROUND], whole)
    if step and whole:
        ratio = whole["traffic"] / step["traffic"]
        cells[9], cells[11] = f"{ratio:.2f}", f"{TAU.get(size, TAU['8b']) / ratio:.1f}"
    if "verify17" in kept and "verify64" in kept:
        cells[10] = f"{kept['verify64']['traffic'] / kept['verify17']['traffic']:.2f}"
    return "| " + " | ".join(cells) + " |"


def places(label: str) -> list[str]:
    """The cells of size, chip and tensor parallelism of an entry's name."""
    size, chip, tensor = label.split("-")
    return [size.upper(), chip, tensor[2:].replace("split", ", split head")]


def of_three(bound: int, made: Mapping) -> str:
    """ "bound / moved / accessed" in GB."""
    accessed = f"{made['accessed'] / GB:.2f}" if made["accessed"] else "–"
    return f"{bound / GB:.2f} / {made['traffic'] / GB:.2f} / {accessed}"


PARTS_HEADER = (
    "| size | chip | tp | verify 17: bound / moved / accessed GB | draft | head, 64 candidates |\n"
    "|---|---|---:|---|---|---|"
)


def parts_row(label: str, found: Mapping) -> str:
    kept = compiled_parts(found)
    cells = places(label)
    cells += [of_three(found["must"][part], kept[part]) if part in kept else "–" for part in PARTS]
    return "| " + " | ".join(cells) + " |"


PARTS = ("verify17", "draft", "head64")


CANDIDATES = """\
Candidates: GB moved by the head and by a round when the head corrects the whole vocabulary, as with
`decode.head_candidates=0`, or few candidates.
"""
CANDIDATES_HEADER = (
    "| size | chip | tp | head: all, 16, 64, 256 candidates | round: all, 64 | round ÷ step: all, 64 |\n"
    "|---|---|---:|---|---|---|"
)


def candidates_row(label: str, found: Mapping) -> str:
    moved = {part: made["traffic"] / GB for part, made in compiled_parts(found).items()}
    heads = [moved.get(f"head{count}") for count in COUNTS]
    rounds = [moved.get(part) for part in ("round", ROUND)]
    ratios = [size and moved.get("step") and size / moved["step"] for size in rounds]
    shown = (", ".join(f"{size:.2f}" if size else "–" for size in sizes) for sizes in (heads, rounds, ratios))
    return "| " + " | ".join([*places(label), *shown]) + " |"


def gpu_lines(found: Mapping[str, Mapping]) -> list[str]:
    """What one round starts on a GPU, one line per entry."""
    lines = []
    for label, entry in found.items():
        counted = entry.get("launches")
        if counted:
            total = counted["kernels"] + counted["copies"]
            lines.append(
                f"- {label.split('-')[0].upper()} on one H200: a round is {counted['kernels']} kernels and "
                f"{counted['copies']} copies; {counted['in_buffers']} of these {total} are in command buffers, and "
                f"the host starts {counted['starts']}."
            )
    return lines


CACHE_HEADER = (
    "| size | chip | step ÷ bound | verify 17 ÷ bound | round ÷ bound | round ÷ step | verify 64 ÷ 17 | speed-up |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|"
)


def cache_rows(found: Mapping[str, Mapping]) -> list[str]:
    """What is left of the traffic if a chip's cache keeps what a program makes for itself, a line per entry."""
    lines = []
    for label, entry in found.items():
        moved = {part: made.get("beyond_cache") for part, made in entry["programs"].items()}
        if not all(moved.get(part) for part in ("step", "verify17", "verify64", ROUND)):
            continue
        size, chip, _ = label.split("-")
        of_must = [f"{moved[part] / entry['must'][part]:.2f}" for part in ("step", "verify17", ROUND)]
        steps, wider = moved[ROUND] / moved["step"], moved["verify64"] / moved["verify17"]
        against = [f"{steps:.2f}", f"{wider:.2f}", f"{TAU.get(size, TAU['8b']) / steps:.1f}"]
        lines.append("| " + " | ".join([size.upper(), chip, *of_must, *against]) + " |")
    if not lines:
        return []
    explained = (
        "An optimistic reading for the H200: the same, if its L2 of 50 MB kept every value of at most 25 MB that a "
        "program makes itself. Those are above all the float32 partial sums of products whose inner axis the compiler "
        "splits. The goals above count all bytes."
    )
    return [explained, "", CACHE_HEADER, *lines, ""]


def goal_lines(found: Mapping[str, Mapping], goals: Sequence[tuple[str, str, str, float]]) -> list[str]:
    """Which entries meet each goal and which miss it, by all bytes moved."""
    lines = []
    for words, part, divisor, limit in goals:
        sides: dict[str, list[str]] = {"met": [], "missed": []}
        for label, entry in found.items():
            kept = compiled_parts(entry)
            of = {name: made["traffic"] for name, made in kept.items()} | {"must": entry["must"].get(part)}
            if of.get(part) and of.get(divisor):
                ratio = of[part] / of[divisor]
                sides["met" if ratio <= limit else "missed"].append(f"{label} {ratio:.2f}")
        judged = " ".join(f"{side.title()}: {', '.join(labels)}." for side, labels in sides.items() if labels)
        lines.append(f"- Goal: {words}. {judged}")
    return [*lines, ""]


def section(found: Mapping[str, Mapping], missing: Sequence[str]) -> str:
    """The whole part, from entry name → what its JSON holds."""
    dates, versions = ({entry[key] for entry in found.values()} for key in ("date", "jax"))
    lines = [INTRODUCTION.format(date=", ".join(sorted(dates)), jax=", ".join(sorted(versions))), HEADER]
    lines += [row(label, entry) for label, entry in found.items()]
    lines += ["", PARTS_HEADER, *(parts_row(label, entry) for label, entry in found.items()), ""]
    lines += [CANDIDATES, CANDIDATES_HEADER, *(candidates_row(label, entry) for label, entry in found.items()), ""]
    lines += [*goal_lines(found, GOALS), *cache_rows(found), *gpu_lines(found), ""]
    if missing:
        lines.append(f"Not compiled yet, or not all of it: {', '.join(missing)}.")
    return "\n".join(map(wrapped, lines)).strip() + "\n"


def wrapped(line: str) -> str:
    """A sentence or an item of a list in lines of at most 120 characters; rows of tables stay whole."""
    if line.startswith("|") or "\n" in line:
        return line
    return textwrap.fill(line, 120, subsequent_indent="  " * line.startswith("- "), break_on_hyphens=False)


def write(document: pathlib.Path, folder: pathlib.Path, names: Sequence[str], programs: int) -> None:
    """Puts the part into its section of the document; `programs` of an entry make it whole."""
    found, missing = kept(folder, names, programs)
    if found:
        put_section(document, SECTION, section(found, missing))


def kept(folder: pathlib.Path, names: Sequence[str], programs: int) -> tuple[dict[str, dict], list[str]]:
    """Entry name → what its JSON in the folder holds, and the names of entries that are not whole."""
    files = {label: folder / f"{label}.json" for label in names}
    found = {label: json.loads(file.read_text()) for label, file in files.items() if file.exists()}
    return found, [label for label in names if label not in found or len(found[label]["programs"]) < programs]
