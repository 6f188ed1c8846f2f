"""How the worker processes of the data behave when the run that started them is stopped."""

import multiprocessing
import os
import signal
import threading

GRACE_SECONDS = 60


def follow_parent() -> None:
    """Called in a worker: it outlives a signal to the whole group for a while, and its parent never.

    A preemption, a closed terminal or Ctrl-C reaches every process of a job at once. The run then still has to reach
    the step at which it saves, and needs its data until there; it ends its workers itself. A run that is killed
    outright cannot.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The alarm has no handler: it ends the process.
    for request in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(request) != signal.SIG_IGN:  # as nohup asks for
            signal.signal(request, lambda number, frame: signal.alarm(GRACE_SECONDS))
    # One process is one worker here; the tokenizer's own threads would fight over the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, name="follow-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
