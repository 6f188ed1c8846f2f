"""The files of the golden models, to be changed and written again: tests/golden/<name>/target and .../drafter."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from domino_jax.weights.target import load_target
from tests.helpers.paths import GOLDEN

SETS = ("tied_shift", "untied_noshift")
WEIGHTS = "model.safetensors"


def folder_of(name: str, part: str) -> Path:
    """Sets of further heads share the targets of the Domino sets."""
    figures = json.loads((GOLDEN / name / "golden.json").read_text())
    return (GOLDEN / name / (figures["target"] if part == "target" and "target" in figures else part)).resolve()


def raw_config(name: str, part: str) -> dict[str, Any]:
    return json.loads((folder_of(name, part) / "config.json").read_text())


def target_config(name: str) -> Qwen3Config:
    return Qwen3Config.from_dict(raw_config(name, "target"))


def stored_tensors(name: str, part: str) -> dict[str, np.ndarray]:
    return load_file(folder_of(name, part) / WEIGHTS)


def write_model(folder: Path, raw: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A folder of this config.json and these tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / WEIGHTS)
    return folder


def check_logits(folder: Path, form: str) -> tuple[Qwen3Config, dict]:
    """Holds a target of a folder of golden ones against transformers' logits; returns its config and parameters."""
    golden = load_file(folder / "golden.safetensors")
    config, params = load_target(folder / form, "float32")
    run = jax.jit(lambda tokens: Qwen3(config).apply({"params": params}, tokens)["logits"])
    np.testing.assert_allclose(run(golden["input_ids"].astype(np.int32)), golden[form], rtol=0, atol=1e-4)
    return config, params
