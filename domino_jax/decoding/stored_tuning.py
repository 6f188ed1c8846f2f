"""What `domino_jax.tune` measured for a drafter on one kind of device: <drafter>/decoding.<device>.json.

{"drafts": {"1": 8, "2": 4}, "tree": {"nodes": 16, "depth": 8, "lanes": 12, "candidates": 64, "beta": -0.3}}

drafts: the fastest number of drafts by the rows of a batch.  tree: the fastest tree; null where none was measured.
"""

import dataclasses
import json
import os
import re
from pathlib import Path

import jax

from domino_jax.method.settings import BASELINE, DecodeSettings, DraftSettings, TreeSettings
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.runtime.files import write_whole
from domino_jax.weights import hf

NAMES = r"decoding\.[a-z0-9-]+\.json"  # of these files, as a regular expression


def file_name() -> str:
    """The name for the device of this process."""
    kind = re.sub("[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")
    return f"decoding.{kind}.json"


def tuned(settings: DecodeSettings, drafter_path: str | None) -> DecodeSettings:
    """The settings with what was measured in place of what they leave open: num_drafts, and the tree's default shape.

    In fixed shape all rounds have one width, and a simulated run times the recipe's: both ignore what was measured.

    Raises:
        DataError: a damaged file.
    """
    plain = set(settings.modes) == {BASELINE}
    if not drafter_path or plain or settings.fixed_shape or settings.simulate_tau:
        return settings
    measured, drafting = read_tuning(hf.drafter_folder(drafter_path)), settings.drafting
    if drafting.num_drafts is None:
        drafting = dataclasses.replace(drafting, widths=measured.widths)
    if drafting.tree == TreeSettings():
        drafting = dataclasses.replace(drafting, tree=measured.tree or drafting.tree)
    return dataclasses.replace(settings, drafting=drafting)


def read_tuning(folder: Path) -> DraftSettings:
    """The widths and the tree that are stored in a drafter's folder for this device; neither where there is no file.

    Raises:
        DataError: a damaged file.
    """
    name = file_name()
    raw = hf.read_json(folder, name, required=False)
    if not raw:
        return DraftSettings()
    try:
        widths = tuple(sorted((int(rows), drafts) for rows, drafts in raw["drafts"].items()))
        tree = raw["tree"] and TreeSettings(**raw["tree"])
        counts = [count for pair in widths for count in pair]
        if not counts or not all(type(count) is int and count >= 0 for count in counts) or (tree and tree.problem()):
            raise ValueError("a value out of range")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder}/{name} is damaged; remove it and run domino_jax.tune.") from error
    return DraftSettings(widths=widths, tree=tree)


def check_writable(folder: Path) -> None:
    """Fails before a long measurement where `store_tuning` would fail after it.

    Raises:
        DominoError: a folder that cannot be written.
    """
    if not os.access(folder, os.W_OK):
        raise DominoError(f"{folder} cannot be written, and the tuning is stored there; copy the drafter and name it.")


def store_tuning(folder: Path, widths: tuple[tuple[int, int], ...], tree: TreeSettings | None) -> Path:
    """Writes the file of this device, which is returned."""
    values = {
        "drafts": {str(rows): drafts for rows, drafts in widths},
        "tree": tree and dataclasses.asdict(tree),
    }
    write_whole(folder / file_name(), json.dumps(values, indent=2) + "\n")
    return folder / file_name()
