"""SIGTERM ends a run at a step that all its processes agree on, so that a scheduler's eviction costs no step.

with Preemption() as preemption:
    for … in steps:
        …
        if preemption.reached(done):
            checkpoints.save(…)
            checkpoints.wait()
            return PREEMPTED
"""

import itertools
import signal
import threading
import time
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

PREEMPTED = 42  # exit code: stopped by SIGTERM with a checkpoint of the last step; launchers start the run again

# Schedulers send the signal to a process and to its group: doubles within this many seconds are one request.
SETTLE_SECONDS = 0.3

# JAX lets the processes stop at the number after the largest that any of them has asked about, starting from 0. With
# the training step as that number, a signal before a resumed run's first question names a step long past, and is lost;
# so the questions are numbered instead, over the life of the process as JAX's own count is.
_QUESTIONS = itertools.count(1)


class Preemption:
    """Whether to stop now: asked once per step by every process, between `with` and its end.

    With jax.distributed (also of one process) JAX's preemption service catches SIGTERM, within a second, and reached()
    turns True at the same question in all processes. Without it this process catches SIGTERM itself.

    Once reached() is True the next SIGTERM or SIGINT ends the process at once, whatever it is doing: the checkpoint
    being written then does not count, the one before it is intact.
    """

    def __init__(self, report: Callable[[str], None] = print):
        self._report = report
        self._reached = False
        self._signalled = False
        self._before = None

    def __enter__(self) -> "Preemption":
        if not jax.distributed.is_initialized() and _in_main_thread():
            self._before = signal.signal(signal.SIGTERM, self._catch)
        return self

    def _catch(self, *_) -> None:
        self._signalled = True

    def reached(self, step: int) -> bool:
        """True from the agreed question on. Collective: every process has to ask equally often, once a step or more.

        Args:
          step: steps done, for the line that says where the run stops.
        """
        if self._reached:
            return True
        if jax.distributed.is_initialized():
            self._reached = multihost_utils.reached_preemption_sync_point(next(_QUESTIONS))
        else:
            self._reached = self._signalled
        if self._reached:
            time.sleep(SETTLE_SECONDS)
            end_at_next_signal()
            self._report(f"SIGTERM: stops after step {step}, with a checkpoint; another signal ends it without")
        return self._reached

    def __exit__(self, *exception) -> None:
        # What follows the steps (export, decoding) asks no more, so a signal has to end it: JAX would swallow it.
        if not self._reached and _in_main_thread():
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)


def end_at_next_signal() -> None:
    """From now on SIGTERM and SIGINT end the process through the kernel: no handler that a blocked thread delays."""
    if _in_main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
