"""Throughput by the number of rows decoded together: every mode against plain decoding at the same number."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from domino_jax.evals.lanes import Lane
from domino_jax.evals.report import figures_of, identical_outputs, ratio
from domino_jax.evals.run import Measured, Speech, absorb_group, decode_group, plan_groups
from domino_jax.evals.run_files import RunFiles
from domino_jax.runtime.progress import Progress

KEPT = ("answers", "tokens", "seconds", "tokens_per_second", "prefill_seconds", "tau_pooled", "speedup", "intervals")


def measure_concurrency(
    lanes_of: Callable[[int], Sequence[Lane]],
    sizes: Sequence[int],
    rows: Sequence[Mapping[str, Any]],
    speech: Speech,
    files: RunFiles,
    facts: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """By batch size: {"modes": figures by mode, "identical_outputs": against the baseline of the same size}.

    tokens_per_second is the loop's, as everywhere; output_tokens_per_second counts all tokens and the prefills too, as
    a server's clients would. First turns only. A size that `files` holds already is not measured again.

    Args:
        lanes_of: the lanes that decode so many rows together.
    """
    rows = [{key: value for key, value in row.items() if key != "next_turns"} for row in rows]
    done = {str(record["concurrency"]): record["level"] for record in files.records if "concurrency" in record}
    for size in sizes:
        if str(size) not in done:
            level = _level(lanes_of(size), size, rows, speech, facts)
            files.append({"concurrency": size, "level": level}, [])
            done[str(size)] = level
    return {str(size): done[str(size)] for size in sizes}


def _level(lanes: Sequence[Lane], size: int, rows, speech: Speech, facts: Mapping[str, Any]) -> dict[str, Any]:
    measured = Measured.empty(lanes)
    groups = plan_groups(rows, size)
    with Progress(f"decode, {size} at a time", total=len(rows)) as progress:
        for group in groups:
            record, lines = decode_group(lanes, dataclasses.replace(group, task=None), speech, bool(facts["simulated"]))
            absorb_group(measured, lanes, record, lines)
            progress.advance(len(group.rows))
    modes = {}
    for mode, figures in figures_of(measured.runs, facts, size).items():
        seconds = figures["seconds"] + figures["prefill_seconds"]
        modes[mode] = {
            **{key: figures[key] for key in KEPT},
            "output_tokens_per_second": ratio(figures["tokens"], seconds),
        }
    return {"modes": modes, "identical_outputs": identical_outputs(measured.runs)}
