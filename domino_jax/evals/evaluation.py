"""The report of drafters that are judged on the same answers: evaluation.json, evaluation.html and one table."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from domino_jax.decoding.answers import TargetAnswer
from domino_jax.evals.acceptance_figures import acceptance_figures, pairs, speedups
from domino_jax.evals.page import write_page
from domino_jax.evals.plots import COLOURS, OTHER, draw_lines
from domino_jax.evals.report import print_tables, report_header
from domino_jax.evals.server_check import server_lines
from domino_jax.evals.tables import NOTHING, brackets, fmt, say_sampling, target_name
from domino_jax.method.exact import Accepted
from domino_jax.runtime.errors import DominoError

EVALUATION = "evaluation.json"
FORMAT = 1  # of evaluation.json
LINES = (*dict.fromkeys(COLOURS.values()), OTHER, "#CC79A7", "#D55E00")  # each once: draft and domino share one
PAIRED = "τ of the first drafter minus τ of the second, with 95 % intervals by the bootstrap over answers."
POSITIONS = "Share of rounds that kept the draft, with all drafts of a round."
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
        {"tau.png": _picture(shown)},
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
    sampling = say_sampling(answers["temperatures"])
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
    drafters = evaluation["drafters"]
    cells = {
        name: {
            width: fmt(tau, ".3f") + brackets(figures["intervals"][width] if spread else None, ".2f")
            for width, tau in figures["tau"].items()
        }
        for name, figures in drafters.items()
    }
    heading, *rows = _rows_by_width("τ by drafts of a round", cells)
    alone = [fmt(figures["tau_backbone"], ".3f") for figures in drafters.values()]
    return [[*heading, "backbone alone"], *([*row, cell] for row, cell in zip(rows, alone, strict=True))]


def _rows_by_width(heading: str, cells: Mapping[str, Mapping[str, str]]) -> list[list[str]]:
    """cells: by the name of a row and the drafts of a round."""
    widths = sorted({width for row in cells.values() for width in row}, key=int)
    return [
        [heading, *widths],
        *([name, *(row.get(width, NOTHING) for width in widths)] for name, row in cells.items()),
    ]


def sections(evaluation: Mapping[str, Any]) -> list[tuple[str, str, list[list[str]]]]:
    """(heading, a sentence, cells) of the tables after the first one."""
    drafters, parts = evaluation["drafters"], []
    if evaluation["pairs"]:
        cells = {" − ".join(pair["drafters"]): _differences(pair["tau"]) for pair in evaluation["pairs"]}
        parts.append(("Differences", PAIRED, _rows_by_width("drafters", cells)))
    parts.append(("Acceptance by draft position", POSITIONS, position_rows(drafters)))
    if any(figures["tasks"] for figures in drafters.values()):
        parts.append(("By task", "τ with all drafts of a round.", task_rows(drafters)))
    if any(figures["speedup"] for figures in drafters.values()):
        speedups = {name: figures["speedup"] or {} for name, figures in drafters.items()}
        cells = {name: {width: f"{gain:.2f} ×" for width, gain in row.items()} for name, row in speedups.items()}
        rows = _rows_by_width("drafts of a round", cells)
        parts.append(("Speed-up over plain decoding by drafts of a round", SPEEDUPS, rows))
    return parts


def _differences(taus: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {
        width: fmt(value["difference"], "+.3f") + brackets(value["interval"], "+.2f") for width, value in taus.items()
    }


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


def _picture(evaluation: Mapping[str, Any]) -> Figure:
    """τ by the drafts of a round, of every drafter."""
    drafters = evaluation["drafters"]
    colours = dict(zip(drafters, itertools.cycle(LINES), strict=False))
    taus = {name: [(int(width), tau) for width, tau in figures["tau"].items()] for name, figures in drafters.items()}
    axes = {"title": "τ by the drafts of a round", "xlabel": "drafts of a round", "ylabel": "tokens per round"}
    return draw_lines(taus, colours, **axes)
