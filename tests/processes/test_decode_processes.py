"""decode in several processes, of which this one pretends to be one, and decode on SIGTERM."""

import signal
import subprocess
import sys

import jax
import pytest

from domino_jax import decode
from domino_jax.recipe import cli
from domino_jax.runtime.errors import DominoError
from tests.helpers.paths import ROOT


def test_a_chat_in_several_processes_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    argv = ["decode", f"--config={ROOT / 'configs' / 'tiny.py'}", "--config.target.path=./nowhere", "--interactive"]
    with pytest.raises(DominoError, match="--interactive reads one terminal, but there are 2 processes"):
        decode.main(cli.parse(argv, ("config",), ("output", "prompts", "prompt", "interactive", "distributed")))


# The command, which blocks in C in its second group, as in a compilation.
BLOCKED = """
import ctypes, itertools, sys
from domino_jax import decode
from domino_jax.evals.run import Runner
from domino_jax.recipe import cli

calls, decode_group = itertools.count(1), Runner.decode_group

def block(*args):
    if next(calls) == 2:
        print("blocked", flush=True)
        ctypes.CDLL(None).sleep(120)
    return decode_group(*args)

Runner.decode_group = block
cli.run(decode.main, ("config",), ("output", "distributed"), sys.argv)
"""


@pytest.mark.slow
def test_sigterm_ends_a_decoding_at_once_with_its_last_whole_group_on_disk(tmp_path):
    argv = [f"--config={ROOT / 'configs' / 'tiny.py'}", "--config.decode.num_prompts=2", f"--output={tmp_path}"]
    argv += ["--config.decode.modes=('autoregressive',)", "--config.decode.max_new_tokens=8"]
    process = subprocess.Popen([sys.executable, "-c", BLOCKED, *argv], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert any(line == "blocked\n" for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == -signal.SIGTERM, printed
    assert len((tmp_path / "generations.jsonl").read_bytes().splitlines()) == 1
    assert not (tmp_path / "report.json").exists()
