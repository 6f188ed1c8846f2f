"""SIGTERM costs a run no step. Only the training loop uses this; everywhere else the signal ends the process at once.

    with Preemption() as preemption:
        for … in steps:
            …
            if preemption.reached(done):     # all processes agree on this step
                checkpoints.save(…)
                checkpoints.wait()
                raise Preempted              # exit code 42
            with preemption.nothing_to_lose():
                …                            # a compilation: everything is saved already

A closed terminal or connection (SIGHUP) counts as SIGTERM.
"""

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

PREEMPTED = 42  # exit code: stopped by SIGTERM with everything saved; launchers start the run again

# JAX agrees on the number after the largest one that any process has asked about, counted from 0. A resumed run would
# begin with a step long past that number and miss the signal, so the questions are numbered instead of the steps.
_QUESTIONS = itertools.count(1)


class Preempted(Exception):
    """SIGTERM ended the run, and everything is saved."""


class Preemption:
    """Takes SIGTERM and SIGHUP between `with` and its end.

    In a run of several processes JAX's preemption service takes SIGTERM and tells the other processes; a process that
    is busy elsewhere hears of it at its next question.
    """

    def __init__(self, report: Callable[[str], None] = print):
        self._report = report
        self._signalled = False
        self._before: dict[int, object] = {}  # the handlers that the end puts back

    def __enter__(self) -> "Preemption":
        handlers = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), self._set)
        if jax.process_count() > 1:
            handlers = {signal.SIGHUP: _as_sigterm}
        for number, handler in handlers.items():
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, handler)
        return self

    def _set(self, number: int, frame: object) -> None:
        self._signalled = True

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def reached(self, step: int) -> bool:
        """Whether to save and leave. Collective: every process asks equally often, once a step or more.

        step: steps done, for the line that reports where the run stops.
        """
        if jax.process_count() > 1:
            stop = multihost_utils.reached_preemption_sync_point(next(_QUESTIONS))
        else:
            stop = self._signalled
        if stop:
            self._report(f"SIGTERM: stops after step {step}, with a checkpoint")
        return stop

    @contextlib.contextmanager
    def nothing_to_lose(self) -> Iterator[None]:
        """Within it the signal ends a lone process at once, also while it is blocked in a compilation.

        Raises Preempted at the beginning when the signal came before.
        """
        if self._signalled:
            raise Preempted
        handlers = {} if jax.process_count() > 1 else {number: signal.getsignal(number) for number in self._before}
        for number in handlers:
            signal.signal(number, signal.SIG_DFL)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _as_sigterm(number: int, frame: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
