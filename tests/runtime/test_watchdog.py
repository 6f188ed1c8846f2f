"""watchdog.py: a run that hangs is reported with the stacks of all threads, and ended; slow is not hung."""

import subprocess
import sys
import threading
import time

import pytest

from domino_jax.runtime.watchdog import HUNG, Watchdog


class Log:
    """What a watchdog reported, and the code with which it would have ended the process."""

    def __init__(self):
        self.text, self.codes = [], []

    def watchdog(self, seconds):
        return Watchdog(seconds, report=self.text.append, end=self.codes.append)


def blocked_in_a_step(seconds):
    time.sleep(seconds)


def test_a_blocked_step_puts_all_stacks_in_the_log_once():
    """Blocked for 2 s with a limit of 0.5 s."""
    log, other = Log(), threading.Event()
    waiting = threading.Thread(target=other.wait, name="loader")
    waiting.start()
    with log.watchdog(0.5) as watchdog:
        watchdog.beat()
        blocked_in_a_step(2)
        watchdog.beat()
    other.set()
    waiting.join()
    assert len(log.text) == 1 and log.codes == [HUNG]
    assert "warning: a step has not ended for" in log.text[0]
    assert "blocked_in_a_step" in log.text[0] and 'thread "MainThread"' in log.text[0]
    assert 'thread "loader"' in log.text[0]


@pytest.mark.parametrize("seconds", [0.5, 0], ids=["steps in time", "off"])
def test_steps_in_time_are_not_reported(seconds):
    log = Log()
    with log.watchdog(seconds) as watchdog:
        for _ in range(10):
            watchdog.beat()
            time.sleep(0.1)
    assert log.text == []


def test_what_is_no_step_may_take_longer_and_the_step_after_it_may_not():
    log = Log()
    with log.watchdog(0.2) as watchdog:
        with watchdog.slow("an evaluation"):
            for _ in range(3):  # two seconds each
                time.sleep(1)
                watchdog.renew()
        assert log.text == []
        time.sleep(0.6)
    assert len(log.text) == 1 and "a step has" in log.text[0]


def test_what_is_no_step_may_not_take_ten_times_as_long():
    log = Log()
    with log.watchdog(0.1) as watchdog, watchdog.slow("an evaluation"):
        time.sleep(1.5)
    assert len(log.text) == 1 and "an evaluation has" in log.text[0]


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
