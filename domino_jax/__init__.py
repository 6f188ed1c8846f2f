"""domino_jax: Domino speculative decoding (arXiv 2605.29707) for Qwen3 models, trained and run in JAX."""

import atexit
import os
import signal
import sys
from typing import Any

__version__ = "0.1.0"
__all__ = ["Answer", "Decoder", "LoadSettings", "TextPiece", "TreeSettings", "load"]


def __getattr__(name: str) -> Any:
    # Imported at the first use: a command's misspelt flag is reported before jax starts.
    if name in __all__:
        from domino_jax.decoding import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def leave_at_once(*_) -> None:
    """Handler of Ctrl-C while a command starts or ends: nothing is at stake then, and a traceback would help nobody."""
    os._exit(130)


# So Python calls a package whose module it is about to run (python -m domino_jax.X); cli.run hands the signal to main.
# Imported in any other way, the package leaves signals alone.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, leave_at_once)
    # Python removes handlers in its last moments, in which the signal would replace the command's exit code.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
