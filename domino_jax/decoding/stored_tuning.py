"""What `domino_jax.tune` measured for a drafter, in <drafter>/decoding.json: one row per setup.

{"tuned": [{"dtype": "float32", "batch_size": 2, "head_candidates": 64, "head_rank": 0, "confidence": 0.0,
            "parity": "near_tie",
            "device": "cpu", "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "mode": "draft",
            "block_size": 8, "num_drafts": 4, "draft_scale": "inf", "tree": null, "widths": [[1, 8], [2, 4]],
            "prompts": 64,
            "measured": [{"rows": 1, "mode": "draft", "num_drafts": 8, "tau": 3.1, "break_even_tau": 1.6, …}, …]}]}
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from domino_jax.decoding.decode_settings import DecodeSettings, Tuning, decode_settings, json_scale
from domino_jax.method.settings import BASELINE, DRAFT, TREE, SamplingParams, TreeSettings
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.runtime.files import write_whole
from domino_jax.weights import hf

FILE = "decoding.json"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a tuning holds for. batch_size: of the largest batch.  head_candidates: None for any, the newest tuning
    first.  device: jax's device_kind."""

    dtype: str
    batch_size: int
    sampling: SamplingParams
    _: dataclasses.KW_ONLY
    head_candidates: int | None = 0
    confidence: float = 0.0
    head_rank: int = 0
    parity: str = "near_tie"
    device: str = dataclasses.field(default_factory=lambda: jax.devices()[0].device_kind)

    @classmethod
    def of(cls, settings: DecodeSettings) -> "Setup":
        return cls(
            settings.dtype,
            settings.batch_size,
            settings.sampling,
            head_candidates=settings.head_candidates,
            confidence=settings.confidence,
            head_rank=settings.head_rank,
            parity=settings.parity,
        )

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "sampling"} | vars(self.sampling)


def tuned_settings(decode, head: str, drafter_path: str | None) -> DecodeSettings:
    """The recipe's decode section, completed by the tuning that is stored with the drafter for this setup.

    head: of the drafter.

    Raises:
        DataError: a damaged file.
    """
    settings = decode_settings(decode, head)
    if set(settings.modes) <= {BASELINE} or settings.simulate_tau:
        return settings
    largest = max((settings.batch_size, *settings.concurrency))
    return decode_settings(decode, head, stored_tuning(drafter_path, Setup.of(settings), largest))


def stored_tuning(drafter_path: str | None, setup: Setup, largest: int = 0) -> Tuning | None:
    """The tuning for this setup, perhaps with a larger batch_size; None where none is stored.

    Args:
        largest: rows that a tuning should reach. Of those that do the smallest is taken, else the largest of all.

    Raises:
        DataError: a damaged file.
    """
    if not drafter_path:
        return None
    folder = hf.drafter_folder(drafter_path)
    rows = [row for row in reversed(_rows(folder)) if row["batch_size"] >= setup.batch_size]
    rows = [row for row in rows if _matches(row, dataclasses.replace(setup, batch_size=row["batch_size"]))]
    enough = [row for row in rows if row["batch_size"] >= largest]
    if enough:
        return _tuning(folder, min(enough, key=lambda row: row["batch_size"]))
    return _tuning(folder, max(rows, key=lambda row: row["batch_size"])) if rows else None


def check_writable(folder: Path) -> None:
    """Fails before a long measurement where `store_tuning` would fail after it.

    Raises:
        DataError: a damaged file.  DominoError: a folder that cannot be written.
    """
    _rows(folder)
    if not os.access(folder, os.W_OK):
        raise DominoError(f"{folder} cannot be written, and the tuning is stored there; copy the drafter and name it.")


def store_tuning(
    folder: Path, setup: Setup, tuning: Tuning, prompts: int, measured: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Writes the tuning next to those of other setups.

    Raises:
        DominoError: a folder that cannot be written.  DataError: a damaged file.
    """
    tree = tuning.tree and dataclasses.asdict(tuning.tree)
    values = {
        **dataclasses.asdict(tuning),
        "draft_scale": json_scale(tuning.draft_scale),
        "tree": tree and {**tree, "draft_scale": json_scale(tuning.tree.draft_scale)},
    }
    del values["break_even"], values["head_candidates"]  # read from what was measured, and from the setup
    row = {**setup.as_json(), **values, "prompts": prompts, "measured": list(measured)}
    rows = [*(other for other in _rows(folder) if not _matches(other, setup)), row]
    try:
        write_whole(folder / FILE, json.dumps({"tuned": rows}, indent=2) + "\n")
    except OSError as error:
        raise DominoError(
            f"{folder} cannot be written ({error.strerror}); copy the drafter and name it, or set"
            f" --config.decode.num_drafts={tuning.num_drafts}."
        ) from error


def _matches(row: Mapping[str, Any], setup: Setup) -> bool:
    return all(row[name] == value for name, value in setup.as_json().items() if value is not None)


def _rows(folder: Path) -> list[dict[str, Any]]:
    raw = hf.read_json(folder, FILE, required=False)
    rows = raw.get("tuned", [])
    names = {field.name for kind in (Setup, SamplingParams) for field in dataclasses.fields(kind)} - {"sampling"}
    whole = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if whole:
        rows = [{"head_rank": 0, **row} for row in rows]  # earlier tunings are of whole heads and do not say so
        whole = all(names <= set(row) for row in rows)
    if not whole or not all(type(row["batch_size"]) is int for row in rows):
        raise _damaged(folder)
    return rows


def _tuning(folder: Path, row: Mapping[str, Any]) -> Tuning:
    try:
        tree = row["tree"]
        if tree is not None:
            constant = tree["draft_scale"]
            tree = TreeSettings(**{**tree, "draft_scale": None if constant is None else float(constant)})
        widths = tuple((rows, drafts) for rows, drafts in row["widths"])
        scale, break_even = float(row["draft_scale"]), _break_even(row)
        candidates = row["head_candidates"]
        found = Tuning(row["mode"], row["block_size"], row["num_drafts"], scale, tree, widths, break_even, candidates)
        counts = (found.block_size, found.num_drafts, *((tree.nodes, tree.lanes, tree.candidates) if tree else ()))
        fine = all(isinstance(count, int) and count >= 1 for count in counts) and found.draft_scale > 0
        fine = fine and _fine_widths(widths, found.block_size) and type(candidates) is int and candidates >= 0
        modes = (DRAFT, TREE) if tree else (DRAFT,)
        if not fine or found.mode not in modes or (tree and tree.problem()):
            raise ValueError("a value out of range")
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(folder) from error
    return found


def _break_even(row: Mapping[str, Any]) -> tuple[tuple[int, int, float | None], ...]:
    chains = [one for one in row["measured"] if (one["block_size"], one["nodes"]) == (row["block_size"], 0)]
    found = tuple((one["rows"], one["num_drafts"], one["break_even_tau"]) for one in chains)
    if not all(type(rows) is type(drafts) is int and type(tau) in (float, type(None)) for rows, drafts, tau in found):
        raise ValueError("a value of the wrong kind")
    return tuple(sorted(found))


def _fine_widths(widths: tuple[tuple[int, int], ...], block_size: int) -> bool:
    rows = [count for count, _ in widths]
    whole = all(type(value) is int for pair in widths for value in pair)
    rising = bool(rows) and whole and rows == sorted({*rows}) and rows[0] >= 1
    return rising and all(0 <= drafts <= block_size for _, drafts in widths)


def _damaged(folder: Path) -> DataError:
    return DataError(f"{folder}/{FILE} is damaged or of an earlier version; remove it and run domino_jax.tune.")
