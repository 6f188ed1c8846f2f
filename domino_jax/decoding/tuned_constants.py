"""The constants that `domino_jax.tune` found for a drafter, in <drafter>/decoding.json: per kind of draft and sampling.

{"tuned": [{"temperature": 1.0, "top_k": 0, …, "draft_scale": "inf", "tau": 6.58, "prompts": 64}],   chains
 "trees": [{"temperature": 1.0, "top_k": 0, …, "draft_scale": 2.0, "spread": 1.0, "tau": …, "prompts": …}]}
"""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from domino_jax.decoding.sampling import SamplingParams
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.runtime.files import write_whole
from domino_jax.weights import hf

FILE = "decoding.json"
CHAINS, TREES = "tuned", "trees"
NUMBERS = {CHAINS: ("draft_scale",), TREES: ("draft_scale", "spread")}  # what a row of each kind has to hold


@dataclasses.dataclass(frozen=True)
class Coupling:
    """How drafts share the target's noise (propose.DraftSettings.scale; TreeSettings for both).

    draft_scale: c, inf where they do not.  spread: of trees alone.
    """

    draft_scale: float = math.inf
    spread: float = 1.0


def check_writable(folder: Path) -> None:
    """What `store` would say after a long measurement, before it.

    Raises:
        DataError: a damaged file.  DominoError: a folder that cannot be written.
    """
    for kind in NUMBERS:
        _rows(folder, kind)
    if not os.access(folder, os.W_OK):
        raise DominoError(
            f"{folder} cannot be written, and what is tuned is kept there; copy the drafter to a folder of yours."
        )


def store(folder: Path, kind: str, sampling: SamplingParams, best: Coupling, tau: float, prompts: int) -> None:
    """Writes the constants beside those of the other kind and of other sampling settings.

    Raises:
        DominoError: a folder that cannot be written.  DataError: what stands there is no such file.
    """
    rows = {each: _rows(folder, each) for each in NUMBERS}
    found = {name: getattr(best, name) for name in NUMBERS[kind]}
    shown = {name: "inf" if math.isinf(value) else value for name, value in found.items()}
    row = {**dataclasses.asdict(sampling), **shown, "tau": tau, "prompts": prompts}
    rows[kind] = [*(other for other in rows[kind] if not _same(other, sampling)), row]
    held = {each: some for each, some in rows.items() if some}
    try:
        write_whole(folder / FILE, json.dumps(held, indent=2) + "\n")
    except OSError as error:
        keys = "config.decode" if kind == CHAINS else "config.decode.tree"
        by_hand = " ".join(f"--{keys}.{name}={value}" for name, value in shown.items())
        raise DominoError(
            f"{folder} cannot be written ({error.strerror}); copy the drafter to a folder of yours, or set {by_hand} by"
            " hand."
        ) from error


def stored(drafter_path: str | None, kind: str, sampling: SamplingParams) -> Coupling:
    """As tuned for these sampling settings with this drafter; not coupled where nothing is stored.

    Raises:
        DataError: a damaged file.
    """
    if not drafter_path or sampling.greedy:
        return Coupling()
    found = [row for row in _rows(hf.drafter_folder(drafter_path), kind) if _same(row, sampling)]
    return Coupling(*(float(found[0][name]) for name in NUMBERS[kind])) if found else Coupling()


def _same(row: dict[str, Any], sampling: SamplingParams) -> bool:
    return all(row[name] == value for name, value in dataclasses.asdict(sampling).items())


def _is_constant(name: str, value: Any) -> bool:
    if value == "inf":
        return name == "draft_scale"
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    raw = hf.read_json(folder, FILE, required=False)
    rows = raw.get(kind, [])
    names = {*NUMBERS[kind], *dataclasses.asdict(SamplingParams())}
    fine = isinstance(rows, list) and all(isinstance(row, dict) and names <= set(row) for row in rows)
    if not fine or not all(_is_constant(name, row[name]) for row in rows for name in NUMBERS[kind]):
        raise DataError(f"{folder}/{FILE} is damaged; remove it, or tune again with python -m domino_jax.tune.")
    return rows
