"""decode in several processes, of which this one pretends to be the second: what they agree on, what is refused."""

import signal
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from domino_jax import decode
from domino_jax.evals.measure import refuse_divided_sittings
from domino_jax.recipe import cli
from domino_jax.runtime import agreement
from domino_jax.runtime.errors import DominoError
from tests.helpers.paths import ROOT


@pytest.fixture
def primary(monkeypatch):
    """Two processes; `primary.says` is what the first one broadcasts, whatever this one found."""
    found = types.SimpleNamespace(says=False, heard=[])

    def broadcast(value):
        found.heard.append(bool(value))
        return np.int32(found.says)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement.multihost_utils, "broadcast_one_to_all", broadcast)
    monkeypatch.setattr(agreement, "primary_first", lambda work: work())
    return found


def files(*records):
    return types.SimpleNamespace(records=list(records))


def test_a_run_of_several_processes_is_not_continued(primary):
    primary.says = True  # the folder of this process is a new one
    with pytest.raises(DominoError, match="--output holds an unfinished decoding.*choose another --output"):
        refuse_divided_sittings(files())


def test_a_run_of_several_processes_may_begin_and_one_process_may_go_on(primary, monkeypatch):
    refuse_divided_sittings(files())
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    refuse_divided_sittings(files({"group": 0}))


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--output=out", "--config.decode.compare=('a','b')"], r"decode\.compare writes from one process.* are 2"),
        (["--interactive"], "--interactive reads one terminal, but there are 2 processes"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_before_anything_is_loaded(primary, arguments, printed):
    optional = ("output", "prompts", "prompt", "interactive", "distributed")
    argv = ["decode", f"--config={ROOT / 'configs' / 'tiny.py'}", "--config.target.path=./nowhere", *arguments]
    with pytest.raises(DominoError, match=printed):
        decode.main(cli.parse(argv, ("config",), optional))


# The command, which blocks in its second group as in a compilation: in C, with the signal kept from the main thread.
BLOCKED = """
import ctypes, itertools, signal, sys
from domino_jax.recipe import cli
from domino_jax import decode
from domino_jax.evals import run as decode_run

calls, decode_group = itertools.count(1), decode_run.decode_group

def block(*args):
    if next(calls) == 2:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        print("blocked", flush=True)
        ctypes.CDLL(None).sleep(120)
    return decode_group(*args)

decode_run.decode_group = block
cli.run(decode.main, ("config",), ("output", "distributed"), sys.argv)
"""


@pytest.mark.slow
def test_sigterm_ends_a_decoding_with_42_after_its_last_whole_group(tmp_path):
    argv = [f"--config={ROOT / 'configs' / 'tiny.py'}", "--config.decode.num_prompts=2", f"--output={tmp_path}"]
    argv += ["--config.decode.modes=('autoregressive',)", "--config.decode.max_new_tokens=8"]
    process = subprocess.Popen([sys.executable, "-c", BLOCKED, *argv], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert any(line == "blocked\n" for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == -signal.SIGTERM, printed
    assert len((tmp_path / "generations.jsonl").read_bytes().splitlines()) == 1
    assert not (tmp_path / "report.json").exists()
