"""watchdog.py: a run that hangs is reported with the stacks of all threads, and ended; slow is not hung."""

import subprocess
import sys
import time

import pytest

from domino_jax.runtime import watchdog as module
from domino_jax.runtime.watchdog import HUNG, Watchdog


@pytest.fixture
def codes(monkeypatch):
    """The codes with which a process would have been ended, each as soon as its report is written."""
    monkeypatch.setattr(module, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(module, "STACKS_SECONDS", 0.1)
    return []


@pytest.mark.parametrize("seconds", [0.5, 0], ids=["steps in time", "off"])
def test_steps_in_time_are_not_reported(codes, seconds, capfd):
    with Watchdog(seconds, end=codes.append) as watchdog:
        for _ in range(10):
            watchdog.beat()
            time.sleep(0.1)
    assert codes == [] and "has not ended" not in capfd.readouterr().out


def test_what_is_no_step_may_take_ten_times_as_long_and_the_step_after_it_may_not(codes, capfd):
    with Watchdog(0.2, end=codes.append) as watchdog:
        with watchdog.slow("an evaluation"):
            for _ in range(3):  # two seconds each
                time.sleep(1)
                watchdog.renew()
        with watchdog.slow("anything", times=0):
            time.sleep(0.5)
        assert codes == []
        time.sleep(0.6)
    assert codes == [HUNG] and "a step has not ended" in capfd.readouterr().out
    with Watchdog(0.1, end=codes.append) as watchdog, watchdog.slow("a checkpoint"):
        time.sleep(1.5)
    assert codes == [HUNG] * 2 and "a checkpoint has not ended for 1 seconds" in capfd.readouterr().out


HANGS = """
import sys, threading
from domino_jax.runtime import watchdog
watchdog.REPORT_SECONDS = 1
held = threading.Lock(); held.acquire()
threading.Thread(target=held.acquire, name="loader").start()
if STUCK:
    sys.stdout.write = lambda text: held.acquire()
with watchdog.Watchdog(0.2) as watching:
    watching.beat(); held.acquire()
"""


@pytest.mark.parametrize("stuck", [False, True], ids=["free", "stuck"])
def test_it_ends_the_process_with_all_stacks_also_when_what_it_would_write_to_hangs(stuck):
    command = [sys.executable, "-c", HANGS.replace("STUCK", str(stuck))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == HUNG == 43, ended.stderr
    assert ended.stderr.count("Thread 0x") >= 3 and 'File "<string>", line 10' in ended.stderr
    assert ("a step has not ended for 0 seconds: exit code 43" in ended.stdout) != stuck
