"""The report of drafters that are judged on the same answers: evaluation.json, evaluation.html and one table."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from domino_jax.decoding.answers import TargetAnswer
from domino_jax.evals.acceptance_figures import acceptance_figures, pairs, speedups
from domino_jax.evals.page import write_page
from domino_jax.evals.plots import COLOURS, OTHER, draw_lines
from domino_jax.evals.report import print_tables, report_header
from domino_jax.evals.server_check import server_lines
from domino_jax.evals.tables import NOTHING, brackets, fmt, target_name
from domino_jax.method.exact import Accepted
from domino_jax.runtime.errors import DominoError

EVALUATION = "evaluation.json"
FORMAT = 1  # of evaluation.json
LINES = (*dict.fromkeys(COLOURS.values()), OTHER, "#CC79A7", "#D55E00")  # each once: draft and domino share one
PAIRED = "τ of the first drafter minus τ of the second, with 95 % intervals by the bootstrap over answers."
POSITIONS = "Share of rounds that kept the draft, with all drafts of a round."
CALIBRATED = "Mean probability that a drafter gives to its drafts so far / share that was accepted."
SPEEDUPS = "τ × seconds of a plain step ÷ seconds of a round."


def build_evaluation(
    answers: Sequence[TargetAnswer],
    accepted: Mapping[str, Sequence[Accepted]],
    drafters: Mapping[str, Mapping[str, Any]],
    origin: Mapping[str, Any],
    round_seconds: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """The content of evaluation.json.

    Args:
        accepted, drafters: by path, what each has accepted, and its head and block_size.
        origin: "target", "dtype", "answers" and "server", where everything comes from.
        round_seconds: by path, seconds of a round by its drafts, of a plain step under "0"; {} where none are known.
    """
    figures = {}
    for path, drafts in accepted.items():
        figures[path] = {**drafters[path], **acceptance_figures(answers, drafts), "speedup": None}
        if path in round_seconds:
            figures[path]["round_seconds"] = dict(round_seconds[path])
            figures[path]["speedup"] = speedups(figures[path]["tau"], round_seconds[path])
    tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        **report_header(FORMAT),
        **origin,
        "answers": {**origin["answers"], "count": len(answers), "tokens": tokens},
        "drafters": figures,
        "pairs": pairs(accepted),
    }


def drafter_names(paths: Sequence[str]) -> list[str]:
    """A short name for each folder of a drafter: its last part, with earlier ones where two have the same one.
    DominoError where a folder is named twice."""
    folders = [Path(path).expanduser().resolve() for path in paths]
    different = {folder.parent if folder.name == "export" else folder for folder in folders}  # a run is its export
    for depth in range(1, 20):
        names = ["-".join(folder.parts[1:][-depth:]) for folder in folders]
        if len(set(names)) == len(different) == len(paths):
            return names
    raise DominoError(f"--drafters names a folder twice: {', '.join(paths)}; name each once.")


def write_evaluation(folder: Path, evaluation: Mapping[str, Any]) -> None:
    """Writes plots/, evaluation.html and, last, evaluation.json, each whole or not at all."""
    shown = with_short_names(evaluation)
    facts = {name: evaluation[name] for name in ("device", "dtype", "date")}
    write_page(
        folder,
        "evaluation",
        evaluation,
        _pictures(shown),
        heading="Evaluation of drafters",
        title=headline(evaluation),
        facts={"target": target_name(evaluation["target"]), **facts, "answers": evaluation["answers"]["source"]},
        rows=tau_rows(shown),
        notes=[*(server_lines(shown) if shown["server"] else []), _note(evaluation)],
        sections=sections(shown),
    )


def with_short_names(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """The same for tables and plots, in which a drafter has the last part of its path for a name."""
    paths = list(evaluation["drafters"])
    names = dict(zip(paths, drafter_names(paths), strict=True))
    drafters = {names[path]: figures for path, figures in evaluation["drafters"].items()}
    pairs = [{**pair, "drafters": [names[path] for path in pair["drafters"]]} for pair in evaluation["pairs"]]
    return {**evaluation, "drafters": drafters, "pairs": pairs}


def console_evaluation(evaluation: Mapping[str, Any]) -> None:
    shown = with_short_names(evaluation)
    lines = server_lines(shown) if shown["server"] else []
    parts = [headline(evaluation), *lines, tau_rows(shown, spread=False), _note(evaluation)]
    for heading, note, rows in sections(shown):
        parts += [f"{heading}. {note}", rows] if len(rows) > 1 else []
    print_tables(parts)


def headline(evaluation: Mapping[str, Any]) -> str:
    answers = evaluation["answers"]
    temperatures = answers["temperatures"]
    sampling = f"temperature {', '.join(f'{value:g}' for value in temperatures)}" if any(temperatures) else "greedy"
    return f"{answers['count']} answers, {answers['tokens']:,} tokens, {sampling}, {evaluation['dtype']}"


def _note(evaluation: Mapping[str, Any]) -> str:
    share = evaluation["answers"]["chosen"]
    return (
        "τ is that of decoding these answers, from one pass over them. Brackets: 95 % intervals by the bootstrap over"
        f" answers. The target's choice in this pass: {share:.2%} of the answers' tokens."
    )


# ------------------------------------------------------------------------------------------------------- tables


def tau_rows(evaluation: Mapping[str, Any], spread: bool = True) -> list[list[str]]:
    """Cells, heading first: a row for each drafter, a column for each number of drafts; `spread` adds intervals."""
    widths = _all_widths(evaluation)
    rows = [["τ by drafts of a round", *widths, "backbone alone"]]
    for name, figures in evaluation["drafters"].items():
        bounds = figures["intervals"] if spread else {}
        cells = (fmt(figures["tau"].get(width), ".3f") + brackets(bounds.get(width), ".2f") for width in widths)
        rows.append([name, *cells, fmt(figures["tau_backbone"], ".3f")])
    return rows


def _all_widths(evaluation: Mapping[str, Any]) -> list[str]:
    return sorted({width for figures in evaluation["drafters"].values() for width in figures["tau"]}, key=int)


def sections(evaluation: Mapping[str, Any]) -> list[tuple[str, str, list[list[str]]]]:
    """(heading, a sentence, cells) of the tables after the first one."""
    drafters = evaluation["drafters"]
    parts = [("Acceptance by draft position", POSITIONS, position_rows(drafters))]
    if evaluation["pairs"]:
        parts.insert(0, ("Differences", PAIRED, pair_rows(evaluation["pairs"])))
    if any(figures["tasks"] for figures in drafters.values()):
        parts.append(("By task", "τ with all drafts of a round.", task_rows(drafters)))
    if any(figures["speedup"] for figures in drafters.values()):
        parts.append(("Speed-up over plain decoding by drafts of a round", SPEEDUPS, speedup_rows(evaluation)))
    return [*parts, ("Calibration", CALIBRATED, calibration_rows(drafters))]


def pair_rows(table: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    widths = sorted({width for pair in table for width in pair["tau"]}, key=int)
    rows = [["drafters", *widths]]
    for pair in table:
        values = [pair["tau"].get(width, {"difference": None, "interval": None}) for width in widths]
        cells = (fmt(value["difference"], "+.3f") + brackets(value["interval"], "+.2f") for value in values)
        rows.append([" − ".join(pair["drafters"]), *cells])
    return rows


def position_rows(drafters: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    most = max(len(figures["accept_by_position"]) for figures in drafters.values())
    rows = [["position", *(str(place + 1) for place in range(most))]]
    for name, figures in drafters.items():
        shares = [f"{share:.2f}" for share in figures["accept_by_position"]]
        rows.append([name, *shares, *[NOTHING] * (most - len(shares))])
    return rows


def task_rows(drafters: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    rows = [["task", "answers", *drafters]]
    for task, first in next(iter(drafters.values()))["tasks"].items():
        taus = [list(figures["tasks"][task]["tau"].values())[-1] for figures in drafters.values()]
        rows.append([task, str(first["answers"]), *(fmt(value, ".3f") for value in taus)])
    return rows


def speedup_rows(evaluation: Mapping[str, Any]) -> list[list[str]]:
    widths = _all_widths(evaluation)
    rows = [["drafts of a round", *widths]]
    for name, figures in evaluation["drafters"].items():
        speedup = figures["speedup"] or {}
        rows.append([name, *(fmt(speedup.get(width), ".2f", " ×") for width in widths)])
    return rows


def calibration_rows(drafters: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    rows = [["probability", *drafters]]
    columns = [
        {min(int(10 * part["predicted"]), 9): part for part in figures["calibration"]} for figures in drafters.values()
    ]
    for tenth in sorted(set().union(*columns)):
        bins = [column.get(tenth) for column in columns]
        cells = (f"{part['predicted']:.2f} / {part['accepted']:.2f}" if part else NOTHING for part in bins)
        rows.append([f"{tenth / 10:.1f} to {(tenth + 1) / 10:.1f}", *cells])
    return rows


# ----------------------------------------------------------------------------------------------------- pictures


def _pictures(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """τ by the drafts of a round, and the calibration, of every drafter."""
    drafters = evaluation["drafters"]
    colours = dict(zip(drafters, itertools.cycle(LINES), strict=False))
    taus = {name: [(int(width), tau) for width, tau in figures["tau"].items()] for name, figures in drafters.items()}
    shares = {
        name: [(part["predicted"], part["accepted"]) for part in figures["calibration"]]
        for name, figures in drafters.items()
    }
    axes = {"title": "τ by the drafts of a round", "xlabel": "drafts of a round", "ylabel": "tokens per round"}
    pictures = {"tau.png": draw_lines(taus, colours, **axes)}
    axes = {"title": "Calibration", "xlabel": "probability of the drafts so far", "ylabel": "share accepted"}
    pictures["calibration.png"] = draw_lines(shares, colours, **axes)
    pictures["calibration.png"].axes[0].plot([0, 1], [0, 1], color="#999999", linewidth=1, zorder=1)
    return pictures
