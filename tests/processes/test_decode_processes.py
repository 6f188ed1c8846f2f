"""decode in several processes, of which this one pretends to be one."""

import jax
import pytest

from domino_jax import decode
from domino_jax.recipe import cli
from domino_jax.runtime.errors import DominoError
from tests.helpers.paths import ROOT


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--output=out", "--config.decode.compare=('a','b')"], r"decode\.compare writes from one process.* are 2"),
        (["--interactive"], "--interactive reads one terminal, but there are 2 processes"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_before_anything_is_loaded(monkeypatch, arguments, printed):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    optional = ("output", "prompts", "prompt", "interactive", "distributed")
    argv = ["decode", f"--config={ROOT / 'configs' / 'tiny.py'}", "--config.target.path=./nowhere", *arguments]
    with pytest.raises(DominoError, match=printed):
        decode.main(cli.parse(argv, ("config",), optional))
