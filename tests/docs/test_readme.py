"""The README's file tree and commands name what is there."""

import pathlib
import re

import pytest

from domino_jax import decode, export, regenerate, train, tune
from domino_jax.recipe import cli
from tests.helpers.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = {
    "train": (train, ("config", "workdir"), ("allow_config_change", "distributed", "dry_run", "topology")),
    "decode": (decode, ("config",), ("output", "prompts", "prompt", "interactive", "distributed")),
    "tune": (tune, ("config",), ("prompts",)),
    "regenerate": (regenerate, ("config", "prompts", "output"), ()),
    "export": (export, ("workdir", "output"), ()),
}


def test_every_module_is_in_the_file_tree():
    tree = README.split("## Files")[1].split("```")[1]
    modules = [path for path in (ROOT / "domino_jax").rglob("*.py") if path.name != "__init__.py"]
    missing = [str(path) for path in modules if not re.search(rf"(?<![\w]){re.escape(path.name)}", tree)]
    assert not missing


def test_every_file_in_the_tree_exists():
    tree = README.split("## Files")[1].split("```")[1]
    named = set(re.findall(r"\b\w+\.py\b", tree))
    there = {
        path.name
        for folder in ("domino_jax", "configs", "benchmarks", "assets", "launch")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert named <= there


@pytest.mark.parametrize("line", re.findall(r"python -m domino_jax\.\w+ .*", README))
def test_every_command_of_the_readme_parses(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = line.split(" && ")[0].split()
    command = words[2].split(".")[1]
    module, required, optional = COMMANDS[command]
    source = pathlib.Path(module.__file__).read_text(encoding="utf-8")
    assert all(f'"{flag}"' in source.rsplit("cli.run(", 1)[1] for flag in (*required, *optional))
    assert cli.parse([command, *words[3:]], required, optional)
