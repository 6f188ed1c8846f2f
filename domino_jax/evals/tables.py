"""Tables of what was measured, as Markdown and LaTeX: one run's figures, and the paper's form (speed-up / τ)."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from domino_jax.decoding.settings import BASELINE
from domino_jax.evals.tree_report import acceptance_table

PARTS = ("draft", "head", "verify", "other")
METHODS = {
    "autoregressive": "Target alone",
    "backbone": "Backbone alone",
    "draft": "Draft",
    "domino": "Domino",
    "tree": "Domino, tree",
}
NOTHING = "–"


def title(report: Mapping[str, Any]) -> str:
    """What was run, in one line; a simulated run says so first."""
    settings = report["settings"]
    sampling = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    what = f"{report['prompts']['count']} prompts, {sampling}, batch {report['batch_size']}"
    return f"{simulated(report)}{what}, {report['dtype']}, {report['device']}"


def simulated(report: Mapping[str, Any]) -> str:
    """The first words of a title where acceptance was forced; empty otherwise."""
    tau = report["simulated"]
    return f"SIMULATED acceptance (τ forced to {tau:g}, the text is meaningless): " if tau else ""


# ------------------------------------------------------------------------------------------------- one run


def rows_of(report: Mapping[str, Any], spread: bool = True) -> list[list[str]]:
    """Cells, heading first: one row per figure, one column per mode; `spread` adds intervals in brackets."""
    modes, prompts = report["modes"], report["prompts"]
    figure = _with_interval if spread else _bare
    labels = {
        "tokens/s": lambda mode, figures: figure(figures, "tokens_per_second", ".1f"),
        "ms per token": lambda mode, figures: say(figures["milliseconds_per_token"], ".2f"),
        "speed-up": lambda mode, figures: figure(figures, "speedup", ".2f", " ×"),
        "τ pooled": lambda mode, figures: figure(figures, "tau_pooled", ".2f"),
        "τ per prompt": lambda mode, figures: figure(figures, "tau_per_prompt", ".2f"),
        "outputs identical": lambda mode, figures: say_identical(report["identical_outputs"], mode),
        "answers right": lambda mode, figures: _say_of(figures["answers_right"], prompts["checked"]),
        "answers distinct": lambda mode, figures: _say_of(figures["distinct_answers"], figures["answers"]),
        "prefill s": lambda mode, figures: say(figures["prefill_seconds"], ".2f"),
        "compilation s": lambda mode, figures: say(figures["compile_seconds"], ".1f"),
    }
    body = [[label, *(cell(mode, figures) for mode, figures in modes.items())] for label, cell in labels.items()]
    return [["", *modes], *body]


def say(value: float | None, form: str, unit: str = "") -> str:
    return NOTHING if value is None else f"{value:{form}}{unit}"


def _with_interval(figures: Mapping[str, Any], key: str, form: str, unit: str = "") -> str:
    """The figure and, in brackets, its 95 % interval."""
    bounds = figures["intervals"][key] if key in figures["intervals"] else None
    spread = f" ({bounds[0]:{form}} to {bounds[1]:{form}})" if bounds else ""
    return say(figures[key], form, unit) + spread


def _bare(figures: Mapping[str, Any], key: str, form: str, unit: str = "") -> str:
    return say(figures[key], form, unit)


def _say_of(count: int | None, of: int) -> str:
    return NOTHING if count is None else f"{count} of {of}"


def say_identical(identical: Mapping[str, Any], mode: str) -> str:
    """ "62 of 64 (2 near ties)"; a dash for a mode that was not compared."""
    if mode not in identical:
        return NOTHING
    found = identical[mode]
    notes = [f"{found['near_ties']} near ties"] * bool(found["near_ties"])
    notes += [f"{found['violations']} UNEXPLAINED"] * bool(found["violations"])
    return f"{found['same']} of {found['of']}" + (f" ({', '.join(notes)})" if notes else "")


def step_note(step: float, bounds: Mapping[str, Any]) -> str:
    """The autoregressive step beside its two lower bounds; a bound that was too fast to time is left out."""
    note = f"An autoregressive step takes {step:.2f} ms"
    if bounds["step_over_bare"]:
        note += f"; without sampling and bookkeeping {bounds['bare_step_ms']:.2f} ms ({bounds['step_over_bare']:.2f} ×)"
    if bounds["step_over_bytes"]:
        note += (
            f"; its {bounds['bytes'] / 1e9:.2f} GB of weights and cache at the copy bandwidth of this run,"
            f" {bounds['copy_bytes_per_second'] / 1e9:,.0f} GB/s, {bounds['bytes_at_copy_bandwidth_ms']:.2f} ms"
            f" ({bounds['step_over_bytes']:.2f} ×)"
        )
    return note + "."


def notes_of(report: Mapping[str, Any], spread: bool = True) -> list[str]:
    """The sentences below the table."""
    notes = []
    if report["simulated"]:
        notes.append("Acceptance was forced: speeds are those of the shapes, outputs are not compared.")
    if report["autoregressive_step_ms"] is not None and report["step_bounds"]:
        notes.append(step_note(report["autoregressive_step_ms"], report["step_bounds"]))
    notes += [
        _round_note(mode, figures["time_split"]) for mode, figures in report["modes"].items() if figures["time_split"]
    ]
    if report["drafter"]:
        notes.append(width_note(report))
    coupling = report.get("tree_coupling")
    if coupling:
        constants = f"c = {coupling['draft_scale']:g}, spread {coupling['spread']:g}"
        notes.append(f"Trees are coupled with the target's noise: {constants}.")
    if spread and report["interval_of"]:
        notes.append("In brackets: 95 % intervals by the bootstrap over prompts.")
    if report["sittings"] > 1:
        notes.append(f"Measured in {report['sittings']} sittings: the run was interrupted and continued.")
    return notes


def _round_note(mode: str, split: Mapping[str, Any]) -> str:
    if split["draft"] is None:
        return f"A round of {mode} takes {split['round']:.2f} ms."
    parts = ", ".join(f"{name} {split[name]:.2f}" for name in PARTS)
    note = f"A round of {mode} takes {split['round']:.2f} ms: {parts} (of which commit {split['commit']:.2f})"
    if split["loop_overhead"] is not None:
        note += f"; {split['loop_overhead']:.2f} × the sum of its parts"
    if split["head_share"] is not None:
        note += f"; the head costs {split['round'] - split['without_head']:.2f} ms, {split['head_share']:.0%} of it"
    return f"{note}."


def markdown(report: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """report.md: what was run, the tables, acceptance by position, the pictures."""
    heading, *body = rows_of(report)
    drafter = report["drafter"]["path"] if report["drafter"] else "none"
    kind = " (simulated)" if report["simulated"] else ""
    lines = [f"# Decoding report{kind}", "", f"{title(report)}.", ""]
    lines += [
        f"- target: {report['target']['path']}",
        f"- drafter: {drafter}",
        f"- prompts: {report['prompts']['source']}",
        f"- date: {report['date']}",
        "",
    ]
    lines += grid(heading, body)
    lines += ["", *(f"{note}\n" for note in notes_of(report))]
    if report["tasks"]:
        lines += ["## By task", "", *markdown_table(paper_table([report])).splitlines(), ""]
    lines += acceptance_lines("## Acceptance by draft position", report["modes"], report["verify_width"])
    for task, modes in report["tasks"].items():
        lines += acceptance_lines(f"### {task}", modes, report["verify_width"])
    if "tree" in report and report["tree"]:
        lines += ["## Trees", "", *acceptance_table(report["tree"]).splitlines(), ""]
    if report["concurrency"]:
        heading, *body = concurrency_rows(report["concurrency"])
        lines += ["## Throughput by concurrency", "", *grid(heading, body), ""]
    for path in pictures:
        lines += [f"![{Path(path).stem.replace('_', ' ')}]({path})", ""]
    return "\n".join(lines).rstrip() + "\n"


def width_note(report: Mapping[str, Any]) -> str:
    widths = report.get("round_widths", {})  # a folder of an earlier version has none
    each = f"{report['verify_width']} tokens"
    if len(set(widths.values())) > 1:
        each = ", ".join(f"{width} tokens with {mode}" for mode, width in widths.items())
    return f"τ is measured with block size {report['drafter']['block_size']}: a round can emit at most {each}."


def acceptance_lines(heading: str, modes: Mapping[str, Any], width: int) -> list[str]:
    drafted = {mode: figures for mode, figures in modes.items() if figures["accept_rate_by_position"]}
    if not drafted:
        return []
    note = "Share of rounds that kept the draft (in brackets: of those that kept the one before)."
    positions = range(width - 1)
    body = [[mode, *(_rate(figures, position) for position in positions)] for mode, figures in drafted.items()]
    return [heading, "", note, "", *grid(["position", *(str(place + 1) for place in positions)], body), ""]


def _rate(figures: Mapping[str, Any], position: int) -> str:
    if position >= len(figures["accept_rate_by_position"]):
        return "–"  # a deeper tree has more positions than this chain
    conditional = figures["conditional_accept_rate_by_position"][position]
    return f"{figures['accept_rate_by_position'][position]:.2f} ({say(conditional, '.2f')})"


def concurrency_rows(concurrency: Mapping[str, Any]) -> list[list[str]]:
    """Cells, heading first: a row for each batch size; for each mode tokens/s, speed-up and equal outputs there."""
    modes = list(next(iter(concurrency.values()))["modes"])
    heading = ["rows together"]
    for mode in modes:
        heading += [f"{mode}, tokens/s", *([] if mode == BASELINE else ["speed-up", "identical"])]
    rows = [heading]
    for size, level in concurrency.items():
        cells = [size]
        for mode in modes:
            figures = level["modes"][mode]
            cells.append(say(figures["tokens_per_second"], ",.0f"))
            if mode != BASELINE:
                cells += [say(figures["speedup"], ".2f", " ×"), say_identical(level["identical_outputs"], mode)]
        rows.append(cells)
    return rows


def grid(heading: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, the first column to the left and the others to the right."""
    rule = ["---", *["---:"] * (len(heading) - 1)]
    return [f"| {' | '.join(row)} |" for row in (heading, rule, *body)]


# -------------------------------------------------------------------------------------------- the paper's form


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """columns: tasks, then "average" where there are several.  rows: (method, per column (speed-up, τ) or None)."""

    caption: str
    columns: list[str]
    rows: list[tuple[str, list[tuple[float | None, float | None]]]]


def paper_table(reports: Sequence[Mapping[str, Any]]) -> PaperTable:
    """One or several drafters' reports of the same prompts; with several, a method is named after its drafter."""
    first = reports[0]
    columns = [*first["tasks"], *(["average"] if len(first["tasks"]) > 1 else [])] or ["all prompts"]
    rows = []
    for report in reports:
        for mode in report["modes"]:
            if mode == BASELINE and report is not first:
                continue  # all drafters share the plain run
            name = METHODS[mode]
            if mode != BASELINE and len(reports) > 1:
                name = f"{report['drafter']['name']}: {name}"
            cells = [_cell(report, mode, column) for column in columns]
            rows.append((name, cells))
    caption = (
        f"{title(first)}; target {first['target']['path']}. Speed-up against the target alone / τ over all rounds."
    )
    return PaperTable(caption, columns, rows)


def _cell(report: Mapping[str, Any], mode: str, column: str) -> tuple[float | None, float | None]:
    if column in report["tasks"]:
        figures = report["tasks"][column][mode]
    else:
        figures = report["average"][mode] if column == "average" else report["modes"][mode]
    return figures["speedup"], figures["tau_pooled"]


def paper_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Cells of one report's paper table, heading first, without marks for the best."""
    table = paper_table([report])
    body = [
        [name, *(f"{say(speedup, '.2f', ' ×')} / {say(tau, '.2f')}" for speedup, tau in cells)]
        for name, cells in table.rows
    ]
    return [["method", *table.columns], *body]


def markdown_table(table: PaperTable) -> str:
    """The caption and the table, best figures of a column in bold."""
    best = _best(table)
    body = []
    for name, cells in table.rows:
        texts = []
        for column, (speedup, tau) in enumerate(cells):
            fast, long = best[column]
            texts.append(f"{_bold(speedup, fast, ' ×')} / {_bold(tau, long)}")
        body.append([name, *texts])
    return "\n".join([table.caption, "", *grid(["method", *table.columns], body)]) + "\n"


def _best(table: PaperTable) -> list[tuple[float | None, float | None]]:
    """By column the highest speed-up and τ; None where fewer than two methods draft."""
    found = []
    for column in range(len(table.columns)):
        drafted = [cells[column] for _, cells in table.rows if cells[column][1] is not None]
        highest = [max((pair[side] or 0.0 for pair in drafted), default=None) for side in (0, 1)]
        found.append(tuple(highest) if len(drafted) > 1 else (None, None))
    return found


def _bold(value: float | None, best: float | None, unit: str = "") -> str:
    text = say(value, ".2f", unit)
    return f"**{text}**" if value is not None and value == best else text


def latex_table(table: PaperTable) -> str:
    """A table environment for booktabs, two columns a task, best figures in bold."""
    best = _best(table)
    count = len(table.columns)
    tops = " & ".join(f"\\multicolumn{{2}}{{c}}{{{_escape(column)}}}" for column in table.columns)
    rules = " ".join(f"\\cmidrule(lr){{{2 * place + 2}-{2 * place + 3}}}" for place in range(count))
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}[t]",
        "\\centering",
        f"\\caption{{{_escape(table.caption)}}}",
        f"\\begin{{tabular}}{{l{'rr' * count}}}",
        "\\toprule",
        f" & {tops} \\\\",
        rules,
        " & ".join(["Method", *["Speed-up & $\\tau$"] * count]) + " \\\\",
        "\\midrule",
    ]
    for name, cells in table.rows:
        texts = []
        for column, (speedup, tau) in enumerate(cells):
            fast, long = best[column]
            texts += [_latex_figure(speedup, fast, "$\\times$"), _latex_figure(tau, long)]
        lines.append(f"{_escape(name)} & {' & '.join(texts)} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}"]) + "\n"


def _latex_figure(value: float | None, best: float | None, unit: str = "") -> str:
    if value is None:
        return "--"
    return f"\\textbf{{{value:.2f}}}{unit}" if value == best else f"{value:.2f}{unit}"


def _escape(text: str) -> str:
    text = re.sub(r"([#$%&_{}])", r"\\\1", text)
    return text.replace("τ", "$\\tau$").replace("×", "$\\times$").replace("~", "\\textasciitilde{}")


def comparison_lines(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown: a row for each drafter and mode, over all prompts, with intervals."""
    body = []
    for name, report in reports.items():
        for mode, figures in report["modes"].items():
            if mode == BASELINE and body:
                continue
            body.append(
                [
                    METHODS[mode] if mode == BASELINE else f"{name}: {METHODS[mode]}",
                    _with_interval(figures, "tokens_per_second", ".1f"),
                    _with_interval(figures, "speedup", ".2f", " ×"),
                    _with_interval(figures, "tau_pooled", ".2f"),
                    _with_interval(figures, "tau_per_prompt", ".2f"),
                    say(figures["time_split"] and figures["time_split"]["round"], ".2f"),
                    say_identical(report["identical_outputs"], mode),
                ]
            )
    return grid(
        ["method", "tokens/s", "speed-up", "τ pooled", "τ per prompt", "ms per round", "outputs identical"], body
    )
