"""The part that tree.py writes into docs/compile_tree.md, from the JSON files of its folder."""

import pathlib
from collections.abc import Mapping, Sequence

from benchmarks.compilers import decode_tables as compile_decode_tables
from benchmarks.document import put_section
from domino_jax.forecast import topologies

PAGE = "compile_tree.md"  # in docs/
SECTION = "compile_tree"  # of the page
GB = 1e9
NODES = (16, 32, 64, 128)
GOALS = (
    ("verify of 64 rows moves at most 1.15 × verify of 17", "verify64", "verify17", 1.15),
    ("the proposal of 64 nodes moves at most 2 × the head", "tree64", "head", 2.0),
)

INTRODUCTION = """\
`python -m benchmarks.compilers.tree --folder=/tmp/compile_tree` ({date}, jax {jax}, the TPU and CUDA compilers of
that release). **These are compilers' figures; none is a measurement.** Shapes and words as in [the table of
chains](compile_decode.md): batch 1, bfloat16, 4,096 slots, blocks of 16, per chip; trees of 16 lanes and 64
candidates per depth. The **head** is the chain's rollout and the **proposal** its counterpart, both from the
backbone's output and base logits. **Verify** takes depths and ancestors as arguments; verify 17 is the chain's.
**Commit** is everything after it: it accepts a path, moves the path's rows to the front of the target's cache, and
adds to the drafter's context and the text. GB are bytes moved, loop bodies as often as they run. For the H200 the
ratios in brackets leave out what its L2 could keep. A sort counts as one read and one write. **Cycles** are the TPU
compiler's own, loop bodies as often as they run; it gives none for a sort or for waiting on memory.
"""

VERIFY_HEADER = (
    "| size | chip | tp | verify 17 GB | verify 16, 32, 64, 128 ÷ verify 17 | cycles, 64 ÷ 17 "
    "| commit of 64: bound / moved GB | ÷ verify 64 | round: chain / 64 nodes GB | peak GB (64 nodes) |\n"
    "|---|---|---:|---:|---|---:|---|---:|---|---:|"
)
PROPOSAL_HEADER = (
    "| size | chip | tp | head GB | proposal: bound / of 16, 32, 64, 128 moved GB | 64 ÷ head | cycles, 64 ÷ head |\n"
    "|---|---|---:|---:|---|---:|---:|"
)


def moved(entry: Mapping, part: str) -> float | None:
    """GB of a part; None where it is not compiled."""
    made = entry["programs"].get(part, {"error": ""})
    return None if "error" in made else made["traffic"] / GB


def beyond_cache(entry: Mapping, part: str) -> float | None:
    """GB of a part without what an L2 could keep; None for a chip without one, or where nothing is compiled."""
    made = entry["programs"].get(part, {"error": ""})
    return None if "error" in made or not made["beyond_cache"] else made["beyond_cache"] / GB


def of(entry: Mapping, part: str, key: str) -> float | None:
    return entry["programs"].get(part, {}).get(key)


def shown(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def over(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


def both(entry: Mapping, part: str, other: str) -> str:
    """How much more one part moves than another, and in brackets the same without what an L2 could keep."""
    without = over(beyond_cache(entry, part), beyond_cache(entry, other))
    return shown(over(moved(entry, part), moved(entry, other))) + (f" ({without:.2f})" if without else "")


def verify_row(label: str, entry: Mapping) -> str:
    device = topologies.CHIPS[label.split("-")[1]]
    cycles = over(of(entry, "verify64", "cycles"), of(entry, "verify17", "cycles"))
    peak = of(entry, "round_tree64", "peak")
    cells = [
        *compile_decode_tables.places(label),
        shown(moved(entry, "verify17")),
        ", ".join(both(entry, f"verify{nodes}", "verify17") for nodes in NODES),
        shown(cycles),
        f"{entry['must']['commit64'] / GB:.2f} / {shown(moved(entry, 'commit64'))}",
        shown(over(moved(entry, "commit64"), moved(entry, "verify64")), 3),
        f"{shown(moved(entry, 'round'))} / {shown(moved(entry, 'round_tree64'))}",
        f"{peak / GB:.1f} of {device.memory / GB:.0f}" if peak else "–",
    ]
    return "| " + " | ".join(cells) + " |"


def proposal_row(label: str, entry: Mapping) -> str:
    cycles = over(of(entry, "tree64", "turned_cycles"), of(entry, "head", "turned_cycles"))
    trees = ", ".join(shown(moved(entry, f"tree{nodes}")) for nodes in NODES)
    cells = [
        *compile_decode_tables.places(label),
        shown(moved(entry, "head")),
        f"{entry['must']['tree64'] / GB:.2f} / {trees}",
        both(entry, "tree64", "head"),
        shown(cycles),
    ]
    return "| " + " | ".join(cells) + " |"


def launch_lines(found: Mapping[str, Mapping]) -> list[str]:
    """What a GPU starts, one line per entry."""
    names = {"head": "head", "tree64": "proposal of 64", "commit64": "its commit", "round": "chain's round"}
    names["round_tree64"] = "round of 64"
    lines = []
    for label, entry in found.items():
        parts = []
        for part, words in names.items():
            made = of(entry, part, "launches")
            if made:
                parts.append(f"{words} {made['kernels']} + {made['copies']} ({made['starts']})")
        if parts:
            lines.append(f"- {label.split('-')[0].upper()}: {', '.join(parts)}.")
    title = (
        "Kernels + copies on the H200, with the number of launches by the host in brackets (a command buffer is one):"
    )
    return [title, "", *lines, ""] if lines else []


def section(found: Mapping[str, Mapping], missing: Sequence[str]) -> str:
    """The whole part, from entry name → what its JSON holds."""
    dates, versions = ({entry[key] for entry in found.values()} for key in ("date", "jax"))
    lines = [INTRODUCTION.format(date=", ".join(sorted(dates)), jax=", ".join(sorted(versions))), VERIFY_HEADER]
    lines += [verify_row(label, entry) for label, entry in found.items()]
    lines += ["", PROPOSAL_HEADER, *(proposal_row(label, entry) for label, entry in found.items()), ""]
    lines += [*launch_lines(found), *compile_decode_tables.goal_lines(found, GOALS)]
    if missing:
        lines.append(f"Not compiled yet, or not all of it: {', '.join(missing)}.")
    return "\n".join(lines).strip() + "\n"


def write(document: pathlib.Path, folder: pathlib.Path, names: Sequence[str], programs: int) -> None:
    """Puts the part into its section of the document; `programs` of an entry make it whole."""
    found, missing = compile_decode_tables.kept(folder, names, programs)
    if found:
        put_section(document, SECTION, section(found, missing))
