"""Stand-ins for the programs that launchers call: shell scripts that note their words."""

import contextlib
import os
import time

import pytest

PATIENCE = 60  # seconds: what takes one on a quiet machine can take twenty on a busy one
# Of a gcloud: states are looked at one after the other, the last one stays. "-": there is no such resource. A test may
# set AFTER_STATE, which is printed after each.
DESCRIBE = """
  *" describe "*)
    state=$(head -n 1 "$HERE/states"); [ "$(wc -l < "$HERE/states")" = 1 ] || sed -i 1d "$HERE/states"
    [ "$state" != - ] || { echo "ERROR: NOT_FOUND: no n" >&2; exit 1; }
    printf '%s\\n' "$state$AFTER_STATE" ;;
"""
# A run that saves on a signal and leaves with 42.
SAVES = """
import os, signal, sys, time
def save(*_):
    os.write(1, b"saved\\n")  # not print: the signal may come within the print below
    sys.exit(42)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, save)
assert not sys.stdout.isatty()
print("up", flush=True)
time.sleep(60)
"""


def stand_in(folder, name, script):
    """An executable of this name that appends its words to <name>.log and then does what the script says."""
    path = folder / name
    path.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >> "{folder}/{name}.log"\n{script}\n')
    path.chmod(0o755)


def calls(folder, name):
    """The words of each call so far, a text for each."""
    log = folder / f"{name}.log"
    return log.read_text().splitlines() if log.exists() else []


def gcloud(cases):
    """A script that answers `describe` from the states of states(), and the rest with these cases."""
    return f'case "$*" in{DESCRIBE}{cases}\nesac'


def cloud_in(folder, monkeypatch, cases):
    """A folder of stand-ins that comes first on the PATH: a gcloud of these cases, and a git that does nothing."""
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HERE", str(folder))
    stand_in(folder, "gcloud", gcloud(cases))
    stand_in(folder, "git", "")
    return folder


def states(folder, *names):
    (folder / "states").write_text("".join(f"{name}\n" for name in names))


def verbs(folder, *wanted):
    """The verb of each call of gcloud that changes something, or those that are wanted."""
    lines = [line for line in calls(folder, "gcloud") if " describe " not in line]
    found = [word for line in lines for word in line.split()[3:4]]
    return [verb for verb in found if verb in wanted or not wanted]


@contextlib.contextmanager
def leaves(code, capsys=None, saying=""):
    """The block ends with SystemExit(code), and its error output holds `saying`."""
    with pytest.raises(SystemExit) as left:
        yield
    assert left.value.code == code
    if capsys is not None:
        assert saying in capsys.readouterr().err


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
