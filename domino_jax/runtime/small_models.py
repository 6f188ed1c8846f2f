"""One thread for a model of a few megabytes on a CPU. A first reader may skip this file.

XLA:CPU divides every product between its threads. For a small model handing over the parts costs more than it saves.
"""

import os
import pathlib
from importlib.metadata import entry_points
from importlib.util import find_spec

from domino_jax.runtime.environment import usable_cores

SMALL = 64 << 20  # bytes of the weights
THREADS = ("PJRT_NPROC", "NPROC")  # from which XLA:CPU takes the number of its threads


def use_one_thread(target: str) -> str | None:
    """Computes with one thread if the target's local folder has less than SMALL of weights.

    It has an effect on a backend of jax that starts after it, and none where an accelerator's plug-in of jax is
    installed, or XLA_FLAGS or a variable of THREADS is set.

    Returns a line that says so and how to change it, or None.
    """
    size = sum(file.stat().st_size for file in pathlib.Path(target).expanduser().glob("*.safetensors"))
    chosen = any(name in os.environ for name in ("XLA_FLAGS", *THREADS))
    plugged = find_spec("libtpu") or entry_points(group="jax_plugins")
    if chosen or not 0 < size < SMALL or usable_cores() == 1 or (plugged and os.environ.get("JAX_PLATFORMS") != "cpu"):
        return None
    os.environ[THREADS[0]] = "1"
    return f"one thread: {target} has {size / 2**20:.0f} MB of weights (set {THREADS[0]} for more threads)"


def has_one_thread() -> bool:
    """Whether XLA:CPU was given one thread."""
    return any(os.environ.get(name) == "1" for name in THREADS)
