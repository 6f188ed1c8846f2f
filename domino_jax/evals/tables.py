"""A report as rows of cells, which the console, report.html and model cards print."""

from collections.abc import Mapping, Sequence
from typing import Any

PARTS = ("draft", "head", "verify", "other")
METHODS = {"autoregressive": "Target alone", "backbone": "Backbone alone"}  # other modes have their own name
# {label: key, format and unit of a figure}
FIGURES = {
    "tokens/s": ("tokens_per_second", ".1f"),
    "ms per token": ("milliseconds_per_token", ".2f"),
    "speed-up": ("speedup", ".2f", " ×"),
    "end-to-end speed-up": ("speedup_end_to_end", ".2f", " ×"),
    "τ pooled": ("tau_pooled", ".2f"),
    "τ per prompt": ("tau_per_prompt", ".2f"),
    "break-even τ": ("break_even_tau", ".2f"),
    "drafts per round": ("drafts_per_round", ".3g"),
    "outputs identical": ("identical",),
    "prefill s": ("prefill_seconds", ".2f"),
    "compilation s": ("compile_seconds", ".1f"),
}
NOTHING = "–"
THROUGHPUT = "Tokens per second / speed-up / outputs identical, by the rows that are decoded together."
POSITIONS = "Share of rounds that kept the draft (in brackets: of those that kept the one before)."


def title(report: Mapping[str, Any]) -> str:
    """The run in one line."""
    prompts = report["prompts"]
    # Reports before 2026-11-29 have the temperature of the settings alone.
    sampling = say_sampling(prompts.get("temperatures", [report["settings"]["temperature"]]))
    parts = f"{prompts['count']} prompts", sampling, f"batch {report['batch_size']}", report["dtype"], report["device"]
    return ", ".join(parts)


def say_sampling(temperatures: Sequence[float]) -> str:
    """temperatures: of all prompts, each once."""
    return f"temperature {', '.join(f'{value:g}' for value in temperatures)}" if any(temperatures) else "greedy"


def page_parts(report: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of report.html (page.page_of) but its versions and pictures."""
    facts = {
        "target": target_name(report["target"]),
        "drafter": report["drafter"]["path"] if report["drafter"] else "none",
        "prompts": report["prompts"]["source"],
        "date": report["date"],
    }
    parts = {"title": title(report), "rows": rows_of(report), "notes": notes_of(report), "sections": sections(report)}
    return {"heading": "Decoding report", "facts": facts, **parts}


def target_name(target: Mapping[str, Any]) -> str:
    """The path of a target, and what target.quantize made of it."""
    return f"{target['path']} in {target['quantize']}" if target["quantize"] else target["path"]


def rows_of(report: Mapping[str, Any], spread: bool = True, labels: Sequence[str] = tuple(FIGURES)) -> list[list[str]]:
    """Cells, heading first: a row for each figure of `labels`, a column for each mode; `spread` adds intervals."""
    modes = report["modes"]
    rows = [[label, *(cell(figures, label, spread) for figures in modes.values())] for label in labels]
    return [["", *modes], *rows]


def fmt(value: float | None, form: str, unit: str = "") -> str:
    return NOTHING if value is None else f"{value:{form}}{unit}"


def brackets(bounds: Sequence[float] | None, form: str) -> str:
    return f" ({bounds[0]:{form}} to {bounds[1]:{form}})" if bounds else ""


def cell(figures: Mapping[str, Any], label: str, spread: bool = True) -> str:
    """A figure of FIGURES and, with `spread`, its 95 % interval in brackets, if it has one."""
    key, *form = FIGURES[label]
    if key == "identical":
        return same_count(figures[key])
    return fmt(figures[key], *form) + brackets(figures["intervals"].get(key) if spread else None, form[0])


def same_count(counts: Mapping[str, Any] | None) -> str:
    """As "62 of 64 (2 near ties)"; a dash for a mode that was not compared."""
    if counts is None:
        return NOTHING
    ties = counts["near_ties"]
    notes = [f"{ties} near tie{'s' * (ties > 1)}"] * bool(ties)
    notes += [f"{counts['violations']} UNEXPLAINED"] * bool(counts["violations"])
    return f"{counts['same']} of {counts['of']}" + (f" ({', '.join(notes)})" if notes else "")


def notes_of(report: Mapping[str, Any], spread: bool = True) -> list[str]:
    """The sentences below the table."""
    notes = [_round_note(mode, figures) for mode, figures in report["modes"].items() if figures["time_split"]]
    if report["drafter"]:
        notes.append(width_note(report))
    if spread:
        notes.append(f"In brackets: 95 % intervals by the bootstrap over {report['interval_of']['over']}.")
    return notes


def _round_note(mode: str, figures: Mapping[str, Any]) -> str:
    split = figures["time_split"]
    note = f"A round of {mode} takes {split['round']:.2f} ms"
    if split["draft"] is not None:
        parts = ", ".join(f"{name} {split[name]:.2f}" for name in PARTS)
        note += f": {parts} (of which commit {split['commit']:.2f})"
    note += f". It verifies {split['drafts']} drafts"
    if figures["break_even_tau"] is not None:
        note += f" and pays off from τ {figures['break_even_tau']:.2f} on: a plain step takes {split['step']:.2f} ms"
    return f"{note}."


def sections(report: Mapping[str, Any]) -> list[tuple[str, str, list[list[str]]]]:
    """(heading, a sentence or nothing, cells) of the tables after the first one, of what the report holds."""
    parts = []
    if tasks := report["tasks"]:
        columns = tasks | ({"average": report["average"]} if len(tasks) > 1 else {})
        parts.append(("By task", "Speed-up / τ.", column_rows(report["modes"], columns, ("speed-up", "τ pooled"))))
    if any(figures["accept_rate_by_position"] for figures in report["modes"].values()):
        rows = position_rows(report["modes"], report["verify_width"])
        parts.append(("Acceptance by draft position", POSITIONS, rows))
    if report["concurrency"]:
        rows = column_rows(report["modes"], report["concurrency"], ("tokens/s", "speed-up", "outputs identical"))
        parts.append(("Throughput by concurrency", THROUGHPUT, rows))
    return parts


def width_note(report: Mapping[str, Any]) -> str:
    widths = report["round_widths"]
    each = f"{report['verify_width']} tokens"
    if len(set(widths.values())) > 1:
        each = ", ".join(f"{width} tokens with {mode}" for mode, width in widths.items())
    return f"τ is measured with block size {report['drafter']['block_size']}: a round can emit at most {each}."


def position_rows(modes: Mapping[str, Any], width: int) -> list[list[str]]:
    """Cells, heading first: a row for each mode that drafts, a column for each draft position."""
    rows = [["position", *(str(place) for place in range(1, width))]]
    for mode, figures in modes.items():
        rates = zip(figures["accept_rate_by_position"], figures["conditional_accept_rate_by_position"], strict=True)
        cells = [f"{rate:.2f} ({fmt(conditional, '.2f')})" for rate, conditional in rates]
        if cells:
            # A deeper tree has more positions than a chain.
            rows.append([mode, *cells, *[NOTHING] * (width - 1 - len(cells))])
    return rows


def column_rows(modes: Sequence[str], columns: Mapping[str, Any], labels: Sequence[str]) -> list[list[str]]:
    """Cells, heading first: a row for each mode, a column for each task or batch size; figures joined by " / ".

    columns: {name: figures by mode}.
    """
    rows = [["", *columns]]
    for mode in modes:
        figures = [column[mode] for column in columns.values()]
        cells = (" / ".join(cell(part, label, spread=False) for label in labels) for part in figures)
        rows.append([METHODS.get(mode, mode.capitalize()), *cells])
    return rows
