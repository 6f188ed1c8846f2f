"""Paths of the repository and of its stored models."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "domino_jax"
ASSETS = ROOT / "assets"
GOLDEN = ROOT / "tests" / "golden"
