"""The behaviour of data worker processes when their run is stopped."""

import multiprocessing
import os
import signal
import threading

GRACE_SECONDS = 60


def follow_parent() -> None:
    """Makes this worker survive a signal to the whole group for a minute, but never survive its parent.

    A preemption, a closed terminal or Ctrl-C reaches every process of a job at once. The run then still needs data
    until the step at which it saves, and ends its workers itself. A killed run cannot, so the worker watches for that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The alarm has no handler, so it ends the process.
    for request in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(request) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(request, lambda number, frame: signal.alarm(GRACE_SECONDS))
    # The tokenizer's threads would compete with the other workers for cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, name="follow-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
