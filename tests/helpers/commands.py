"""The commands in this process, with the flags that their own last lines state."""

import pytest

from domino_jax import decode, evaluate, export, regenerate, serve, train
from domino_jax.recipe import cli

# Name → its module, required flags, optional flags.
COMMANDS = {
    "train": (train, ("config", "workdir"), ("allow_config_change", "distributed", "dry_run", "topology")),
    "decode": (
        decode,
        ("config",),
        ("output", "prompts", "prompt", "interactive", "distributed", "dry_run", "topology"),
    ),
    "evaluate": (
        evaluate,
        ("config", "output"),
        ("answers", "server", "requests", "drafters", "round_seconds", "distributed"),
    ),
    "serve": (serve, ("config",), ("host", "port")),
    "regenerate": (regenerate, ("config", "prompts", "output"), ("distributed",)),
    "export": (export, ("workdir", "output"), ()),
}


def run(name: str, *words: object) -> int:
    """Runs a command with these words after its name and returns its exit code."""
    module, required, optional = COMMANDS[name]
    with pytest.raises(SystemExit) as left:
        cli.run(module.main, required, optional, [name, *map(str, words)])
    return left.value.code or 0
