"""SIGTERM ends a run within seconds in every phase and costs no step: a checkpoint is saved, or there is one already.

with Preemption() as preemption:
    with preemption.nothing_to_lose():
        …                                # start-up, compilation: the process leaves at once
    for … in steps:
        …
        if preemption.reached(done):     # all processes agree on this step
            checkpoints.save(…)
            checkpoints.wait()
            return PREEMPTED
"""

import contextlib
import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax
from jax.experimental import multihost_utils

PREEMPTED = 42  # exit code: stopped by SIGTERM, and nothing is lost; launchers start the run again

# A closed terminal or connection (SIGHUP) is a request to stop like the scheduler's.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)

# Schedulers send the signal to a process and to its group: doubles within this many seconds are one request.
SETTLE_SECONDS = 0.3
POLL_SECONDS = 0.05
# What a process that leaves at once may take to say why: the terminal or pipe it writes to may be what hangs.
ANNOUNCE_SECONDS = 5.0

# JAX lets the processes stop at the number after the largest that any of them has queried, starting from 0. With
# the training step as that number, a signal before a resumed run's first question names a step long past, and is lost;
# so the questions are numbered instead, over the life of the process as JAX's own count is.
_QUESTIONS = itertools.count(1)


class Preempted(Exception):
    """Work that polls for the signal, and can be repeated, was interrupted by it."""


class Preemption:
    """Takes SIGTERM between `with` and its end; enter it after jax.distributed, whose service would keep the signal.

    While there is something to lose, reached() is to be asked once per step or more: it turns True at the same question
    in all processes, and the run saves and leaves. Where there is nothing to lose (nothing_to_lose()), the process
    leaves by itself with exit code 42, also when its main thread is blocked in a compilation.

    Once reached() is True the next SIGTERM or SIGINT ends the process at once, whatever it is doing: the checkpoint
    being written then does not count, the one before it is intact.
    """

    def __init__(self, report: Callable[[str], None] = print):
        self._report = report
        self._reached = False
        self._signalled = False
        self._patience: float | None = None  # seconds before the process leaves by itself; None: it must not
        self._before: dict[int, object] = {}  # the handlers that the end puts back
        self._writing: int | None = None  # the wake-up file; None: no signal is taken
        self._tell_jax: Callable[[int], None] | None = None

    def __enter__(self) -> "Preemption":
        if not _in_main_thread():  # Python allows handlers in the main thread alone
            return self
        if jax.distributed.is_initialized():
            self._tell_jax = _handler_in_c(signal.SIGTERM)
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        # Python's handlers run between two instructions of the main thread, which may be blocked in a compilation. The
        # number of a signal is written to this file at once, and another thread waits for it there.
        self._file_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup asks for
                self._before[number] = signal.signal(number, self._catch)
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._listen, args=(reading,), name="preemption", daemon=True).start()
        return self

    def _forget(self) -> None:
        """In a forked child, whose signals are none of the parent's: the wake-up file is common to both."""
        if self._writing is not None:
            self._writing = None
            signal.set_wakeup_fd(-1)
            for number in self._before:
                signal.signal(number, signal.SIG_DFL)

    def _catch(self, number: int, frame: object) -> None:
        # Again, for a loop that takes the wake-up file to itself for a while, as uvloop does in the main thread.
        with contextlib.suppress(OSError):
            os.write(self._writing, bytes([number]))

    def _listen(self, reading: int) -> None:
        """A thread's work: wait for the signal, then leave as soon as nothing would be lost."""
        while not self._signalled:
            number = os.read(reading, 1)
            if not number:  # the other end was closed: there is nothing more to wait for
                os.close(reading)
                return
            self._signalled = number[0] in SIGNALS
        if self._tell_jax:
            self._tell_jax(signal.SIGTERM)
        since = None
        while self._writing is not None:
            patience = None if self._reached else self._patience
            since = None if patience is None else since or time.monotonic()
            if since is not None and time.monotonic() - since >= patience:
                leave(PREEMPTED, self._say_why)
            time.sleep(POLL_SECONDS)
        os.close(reading)

    def _say_why(self) -> None:
        self._report(f"SIGTERM: ends with exit code {PREEMPTED}, everything is saved; start it again to continue")

    @contextlib.contextmanager
    def nothing_to_lose(self, patience: float = 0.0) -> Iterator[None]:
        """Within it the signal ends the process, also one that came before: all that was done is saved.

        Args:
          patience: seconds that the work has to notice the signal by itself, through poll(); then all processes leave
            together.
        """
        if self._writing is not None:
            signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        outer, self._patience = self._patience, patience
        try:
            yield
        finally:
            self._patience = outer

    def reached(self, step: int) -> bool:
        """True from the agreed question on. Collective: every process has to ask equally often, once a step or more.

        Args:
          step: steps done, for the line that reports where the run stops.
        """
        if self._reached:
            return True
        stop = self._signalled and jax.process_count() == 1
        if not stop and jax.distributed.is_initialized():  # which also holds a signal that came before `with`
            stop = multihost_utils.reached_preemption_sync_point(next(_QUESTIONS))
        if stop:
            self._reached = True  # from here on the run ends itself
            time.sleep(SETTLE_SECONDS)
            end_at_next_signal()
            self._report(f"SIGTERM: stops after step {step}, with a checkpoint; another signal ends it without")
        return stop

    def poll(self, step: int) -> None:
        """Raises Preempted where reached() is True: for work within a step that may be dropped and done again."""
        if self.reached(step):
            raise Preempted

    def __exit__(self, *exception) -> None:
        if self._writing is None:
            return
        signal.set_wakeup_fd(self._file_before)
        for number, handler in self._before.items():
            if not (self._reached and number == signal.SIGTERM):
                # None: a handler in C, JAX's, which would keep the signal that nobody asks about any more.
                signal.signal(number, handler or signal.SIG_DFL)
        writing, self._writing = self._writing, None
        os.close(writing)


def end_at_next_signal() -> None:
    """From now on SIGTERM and SIGINT end the process through the kernel: no handler that a blocked thread delays."""
    if _in_main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def leave(code: int, announce: Callable[[], None]) -> NoReturn:
    """Ends the process with this exit code from any thread, without clean-up: what is blocked would block that too.

    announce: prints the reason, in a thread that is waited for for a few seconds.
    """

    def say() -> None:
        announce()
        sys.stdout.flush()
        sys.stderr.flush()

    speaker = threading.Thread(target=say, name="last words", daemon=True)
    speaker.start()
    speaker.join(ANNOUNCE_SECONDS)
    os._exit(code)


def _handler_in_c(number: int) -> Callable[[int], None] | None:
    """The function that the C library calls for a signal, as Python knows nothing of it; None without one."""
    action = ctypes.create_string_buffer(1_024)  # a struct sigaction, smaller on every system; the handler is first
    ctypes.CDLL(None).sigaction(number, None, action)
    address = ctypes.c_void_p.from_buffer(action).value
    return ctypes.CFUNCTYPE(None, ctypes.c_int)(address) if address and address > 1 else None


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
