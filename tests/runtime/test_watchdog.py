"""watchdog.py: a run that hangs is reported with the stacks of all threads, and ended; slow is not hung."""

import subprocess
import sys
import threading
import time

import pytest

from domino_jax.runtime.watchdog import HUNG, Watchdog


def watching(seconds):
    """(a watchdog, what it reported, the codes with which it would have ended the process)."""
    text, codes = [], []
    return Watchdog(seconds, report=text.append, end=codes.append), text, codes


def test_a_blocked_step_puts_all_stacks_in_the_log_once():
    other = threading.Event()
    waiting = threading.Thread(target=other.wait, name="loader")
    waiting.start()
    watchdog, text, codes = watching(0.5)
    with watchdog:
        watchdog.beat()
        time.sleep(2)
        watchdog.beat()
    other.set()
    waiting.join()
    assert len(text) == 1 and codes == [HUNG]
    assert "warning: a step has not ended for" in text[0] and "time.sleep(2)" in text[0]
    assert 'thread "MainThread"' in text[0] and 'thread "loader"' in text[0]


@pytest.mark.parametrize("seconds", [0.5, 0], ids=["steps in time", "off"])
def test_steps_in_time_are_not_reported(seconds):
    watchdog, text, _ = watching(seconds)
    with watchdog:
        for _ in range(10):
            watchdog.beat()
            time.sleep(0.1)
    assert text == []


def test_what_is_no_step_may_take_ten_times_as_long_and_the_step_after_it_may_not():
    watchdog, text, _ = watching(0.2)
    with watchdog:
        with watchdog.slow("an evaluation"):
            for _ in range(3):  # two seconds each
                time.sleep(1)
                watchdog.renew()
        assert text == []
        time.sleep(0.6)
    assert len(text) == 1 and "a step has" in text[0]
    watchdog, text, _ = watching(0.1)
    with watchdog, watchdog.slow("a checkpoint"):
        time.sleep(1.5)
    assert len(text) == 1 and "a checkpoint has" in text[0]


ABORTS = """
import threading
from domino_jax.runtime.watchdog import Watchdog
held = threading.Lock(); held.acquire()
with Watchdog(0.2, report=REPORT) as watchdog:
    watchdog.beat(); held.acquire()
"""


@pytest.mark.parametrize("report", ["print", "lambda text: held.acquire()"], ids=["free", "stuck"])
def test_it_ends_the_process_also_when_what_it_would_write_to_hangs(report):
    started = time.monotonic()
    command = [sys.executable, "-c", ABORTS.replace("REPORT", report)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == HUNG == 43, ended.stderr
    assert time.monotonic() - started < 40
    assert report != "print" or "<string>" in ended.stdout
