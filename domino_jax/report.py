"""What a decoding run measured, as report.json for programs, report.md for people, and a table on the console.

Definitions, the same wherever a figure is shown:
  round            one draft and one verification by the target; it emits the accepted drafts and one token more
  tau_pooled       tokens emitted in rounds / rounds, over all prompts;  tau_per_prompt: mean of each prompt's own mean
  tokens_per_second  tokens behind the first of each answer (that one is the prefill's), over the time of the loop alone
  accept rate k    share of all rounds that emitted more than k tokens, that is, kept draft k; the conditional twin has
                   only the rounds that kept draft k-1 below the line. A last round cut by a stop id or by
                   max_new_tokens counts what was kept.
"""

import datetime
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import rich.console
import rich.table

import domino_jax
from domino_jax.decoding.generate import BASELINE, Generation
from domino_jax.decoding.measure import (
    Divergence,
    ModeRun,
    accept_histogram,
    accept_rates,
    tau_per_prompt,
    tau_pooled,
)
from domino_jax.errors import DataError
from domino_jax.plots import write_plots

REPORT = "report.json"

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers")
PARTS = ("draft", "head", "verify", "other", "round")


def build_report(
    runs: Mapping[str, ModeRun],
    *,
    batch_size: int,
    divergences: Mapping[str, Sequence[Divergence]],
    split: Mapping[str, Mapping[str, float]],
    straight_step: float,
    answers_right: Mapping[str, int] | None,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """The report of one run; JSON values only.

    Args:
        batch_size: rows decoded together.
        divergences: by mode, the places where its texts differ from the autoregressive ones.
        split: by mode, seconds of a round's parts (measure.round_split).
        straight_step: seconds of one single-token forward without a loop.
        answers_right: by mode, how many answers the checkers accept; None when the prompts have no checker.
        facts: what else the report says at top level, "verify_width" above all (tokens a round can emit at most).
    """
    width = facts["verify_width"]
    modes = {mode: _mode_figures(run, width, batch_size) for mode, run in runs.items()}
    base = modes.get(BASELINE)
    for mode, figures in modes.items():
        figures["speedup"] = _ratio(figures["tokens_per_second"], base["tokens_per_second"]) if base else None
        parts = split.get(mode)
        figures["time_split"] = _milliseconds(parts) if parts else None
        figures["answers_right"] = answers_right[mode] if answers_right else None
    identical = {}
    for mode, found in divergences.items():
        ties = sum(divergence.near_tie for divergence in found)
        of = len(runs[mode].generations)
        identical[mode] = {
            "same": of - len(found),
            "of": of,
            "near_ties": ties,
            "violations": len(found) - ties,
            "first_divergences": [_divergence(divergence) for divergence in found],
        }
    straight = straight_step * 1e3
    step = base["milliseconds_per_step"] if base else None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **facts,
        "versions": versions(),
        "device": device(),
        "batch_size": batch_size,
        "modes": modes,
        "identical_outputs": identical,
        "straight_step_ms": straight,
        "autoregressive_step_ms": step,
        "autoregressive_over_straight": _ratio(step, straight) if base else None,
    }


def _mode_figures(run: ModeRun, width: int, batch_size: int) -> dict[str, Any]:
    answers, clock = run.generations, run.clock
    histogram = accept_histogram(answers, width)
    plain, conditional = accept_rates(histogram)
    steps = loop_steps(answers, batch_size)
    return {
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "decode_tokens": clock.decode_tokens,
        "seconds": clock.decode_seconds,
        "tokens_per_second": _ratio(clock.decode_tokens, clock.decode_seconds),
        "milliseconds_per_token": _ratio(clock.decode_seconds * 1e3, clock.decode_tokens),
        "milliseconds_per_step": _ratio(clock.decode_seconds * 1e3, steps),
        "prefill_seconds": clock.prefill_seconds,
        "compile_seconds": clock.compile_seconds,
        "rounds": sum(histogram.values()),
        "tau_pooled": tau_pooled(answers) if any(histogram.values()) else None,
        "tau_per_prompt": tau_per_prompt(answers) if any(histogram.values()) else None,
        "accept_histogram": histogram,
        "accept_rate_by_position": plain,
        "conditional_accept_rate_by_position": conditional,
        "stopped": sum(answer.finish_reason == "stop" for answer in answers),
        "distinct_answers": len({tuple(answer.token_ids) for answer in answers}),
    }


def loop_steps(answers: Sequence[Generation], batch_size: int) -> int:
    """Rounds, or single-token steps, that the loop ran: a batch runs until its longest row ends."""
    steps = [len(answer.accept_lengths) or len(answer.token_ids) - 1 for answer in answers]
    return sum(max(steps[start : start + batch_size]) for start in range(0, len(steps), batch_size))


def _ratio(above: float, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _milliseconds(parts: Mapping[str, float]) -> dict[str, Any]:
    return {"unit": "milliseconds per round", **{name: parts[name] * 1e3 for name in PARTS if name in parts}}


def _divergence(divergence: Divergence) -> dict[str, Any]:
    # A text that ends early has no margin, and JSON no infinity.
    margin = divergence.margin if math.isfinite(divergence.margin) else None
    return {
        "prompt": divergence.prompt,
        "position": divergence.position,
        "margin": margin,
        "near_tie": bool(divergence.near_tie),
    }


def versions() -> dict[str, str]:
    """Versions of what computed the figures."""
    found = {"domino_jax": domino_jax.__version__, "python": platform.python_version()}
    return {**found, **{name: importlib.metadata.version(name) for name in PACKAGES}}


def device() -> str:
    """Kind and number of the devices, and of the host's cores where those are the device."""
    devices = jax.devices()
    cores = f", {os.cpu_count()} cores" if devices[0].platform == "cpu" else ""
    return f"{len(devices)} × {devices[0].device_kind} ({devices[0].platform}{cores})"


# ------------------------------------------------------------------------------------------------------ files


def write_report(folder: str | os.PathLike, report: Mapping[str, Any]) -> None:
    """plots/, report.md and, last, report.json, each whole or not there: a folder with a report.json is finished."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = write_plots(folder / "plots", report)
    write_text(folder / "report.md", markdown(report, [f"plots/{name}" for name in pictures]))
    write_text(folder / REPORT, json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file under another name first and renames it, so that no reader meets half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_report(folder: str | os.PathLike) -> dict[str, Any] | None:
    """The report of a finished run, None when there is none."""
    path = Path(folder) / REPORT
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}); remove it, or choose another folder.") from error


# ------------------------------------------------------------------------------------------------------ tables


def rows_of(report: Mapping[str, Any]) -> list[list[str]]:
    """The table's cells, heading first: one row a figure, one column a mode."""
    modes = report["modes"]
    labels = {
        "tokens/s": lambda mode, figures: _say(figures["tokens_per_second"], ".1f"),
        "ms per token": lambda mode, figures: _say(figures["milliseconds_per_token"], ".2f"),
        "speed-up": lambda mode, figures: _say(figures["speedup"], ".2f", " ×"),
        "τ pooled": lambda mode, figures: _say(figures["tau_pooled"], ".2f"),
        "τ per prompt": lambda mode, figures: _say(figures["tau_per_prompt"], ".2f"),
        "outputs identical": lambda mode, figures: _say_identical(report, mode),
        "answers right": lambda mode, figures: _say_of(figures["answers_right"], report["prompts"]["checked"]),
        "answers distinct": lambda mode, figures: _say_of(figures["distinct_answers"], report["prompts"]["count"]),
        "prefill s": lambda mode, figures: _say(figures["prefill_seconds"], ".2f"),
        "compilation s": lambda mode, figures: _say(figures["compile_seconds"], ".1f"),
    }
    body = [[label, *(cell(mode, figures) for mode, figures in modes.items())] for label, cell in labels.items()]
    return [["", *modes], *body]


def _say(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def _say_of(count: int | None, of: int) -> str:
    return "–" if count is None else f"{count} of {of}"


def _say_identical(report: Mapping[str, Any], mode: str) -> str:
    if mode not in report["identical_outputs"]:
        return "–"
    found = report["identical_outputs"][mode]
    notes = [f"{found['near_ties']} near ties"] * bool(found["near_ties"])
    notes += [f"{found['violations']} UNEXPLAINED"] * bool(found["violations"])
    return f"{found['same']} of {found['of']}" + (f" ({', '.join(notes)})" if notes else "")


def notes_of(report: Mapping[str, Any]) -> list[str]:
    """The sentences that stand below the table."""
    notes = []
    if report["autoregressive_step_ms"] is not None:
        step, straight = report["autoregressive_step_ms"], report["straight_step_ms"]
        notes.append(
            f"The yardstick: an autoregressive step takes {step:.2f} ms, a straight-line forward of one token"
            f" {straight:.2f} ms ({report['autoregressive_over_straight']:.2f} ×)."
        )
    for mode, figures in report["modes"].items():
        if figures["time_split"]:
            parts = ", ".join(f"{name} {figures['time_split'][name]:.2f}" for name in PARTS[:-1])
            notes.append(f"A round of {mode} takes {figures['time_split']['round']:.2f} ms: {parts}.")
    if report["drafter"]:
        notes.append(
            f"τ is measured with block size {report['drafter']['block_size']}: a round can emit at most"
            f" {report['verify_width']} tokens."
        )
    return notes


def console_table(report: Mapping[str, Any], console: rich.console.Console | None = None) -> None:
    """Prints the table and its notes."""
    console = console or rich.console.Console()
    heading, *body = rows_of(report)
    table = rich.table.Table()
    for index, name in enumerate(heading):
        table.add_column(name, justify="right" if index else "left", no_wrap=index == 0)
    for row in body:
        table.add_row(*row)
    console.print(_title(report), highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    for note in notes_of(report):
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def _title(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    sampling = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    what = f"{report['prompts']['count']} prompts, {sampling}, batch {report['batch_size']}"
    return f"{what}, {report['dtype']}, {report['device']}"


def markdown(report: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """report.md: what was run, the table, acceptance by position, the pictures."""
    heading, *body = rows_of(report)
    lines = ["# Decoding report", "", f"{_title(report)}.", ""]
    drafter = report["drafter"]["path"] if report["drafter"] else "none"
    lines += [
        f"- target: {report['target']['path']}",
        f"- drafter: {drafter}",
        f"- prompts: {report['prompts']['source']}",
    ]
    lines += [f"- date: {report['date']}", ""]
    lines += _markdown_table(heading, body)
    lines += ["", *(f"{note}\n" for note in notes_of(report))]
    drafted = {mode: figures for mode, figures in report["modes"].items() if figures["accept_rate_by_position"]}
    if drafted:
        lines += [
            "## Acceptance by draft position",
            "",
            "Share of rounds that kept the draft (in brackets: of those that kept the one before).",
            "",
        ]
        positions = range(report["verify_width"] - 1)
        lines += _markdown_table(
            ["position", *(str(position + 1) for position in positions)],
            [[mode, *(_rate(figures, position) for position in positions)] for mode, figures in drafted.items()],
        )
        lines += [""]
    for path in pictures:
        lines += [f"![{Path(path).stem.replace('_', ' ')}]({path})", ""]
    return "\n".join(lines).rstrip() + "\n"


def _rate(figures: Mapping[str, Any], position: int) -> str:
    conditional = figures["conditional_accept_rate_by_position"][position]
    return f"{figures['accept_rate_by_position'][position]:.2f} ({_say(conditional, '.2f')})"


def _markdown_table(heading: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(heading) - 1)]
    return [f"| {' | '.join(row)} |" for row in (heading, rule, *body)]
