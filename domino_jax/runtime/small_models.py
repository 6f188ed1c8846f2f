"""How a process on a CPU computes a model of a few megabytes. A first reader may skip this file.

XLA:CPU divides every product between its threads. For a small model handing over the parts costs more than it saves, so
one thread is faster. Large pages of memory spare the core most searches for an address.
"""

import contextlib
import ctypes
import importlib.metadata
import os
import pathlib
import sys
from typing import Any

import jax
from jax.extend.backend import clear_backends

from domino_jax.runtime.environment import usable_cores

SMALL = 64 << 20  # bytes of the weights
THREADS = ("PJRT_NPROC", "NPROC")  # from which XLA:CPU takes the number of its threads
HEAP = 256 << 20  # bytes: the weights in float32, the caches and what a round computes
LARGE_PAGE = 2 << 20
# Values from glibc's malloc.h and Linux' mman.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, MADV_HUGEPAGE = -1, -3, 14


def use_one_thread(target: str) -> str | None:
    """Computes with one thread, and with large pages, if the target's folder has less than SMALL of weights.

    It has an effect on a backend of jax that starts after it. It changes nothing where the weights are not in a
    local folder, the process may use one core only, an accelerator's plug-in of jax is installed, or XLA_FLAGS or
    a variable of THREADS is set.

    Returns a line that says so and how to change it, or None.
    """
    files = list(pathlib.Path(target).expanduser().glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    if not 0 < size < SMALL or usable_cores() == 1 or _has_accelerator():
        return None
    if any(name in os.environ for name in ("XLA_FLAGS", *THREADS)):
        return None
    os.environ[THREADS[0]] = "1"
    use_large_pages()
    return f"one thread: {target} has {size / 2**20:.0f} MB of weights (set {THREADS[0]} for more threads)"


def restart_with_one_thread(target: str, params: Any) -> Any:
    """`use_one_thread` where jax runs already: it starts again, without all that is on its devices but `params`.

    Returns params, on the host if jax starts again.
    """
    note = None if jax.distributed.is_initialized() else use_one_thread(target)
    if note is None:
        return params
    print(note, flush=True)
    params = jax.device_get(params)
    clear_backends()
    return params


def has_one_thread() -> bool:
    """Whether XLA:CPU was given one thread."""
    return any(os.environ.get(name) == "1" for name in THREADS)


def use_large_pages() -> bool:
    """Lets what this process allocates next be in large pages; whether it does. Linux with glibc only.

    It has the effect of GLIBC_TUNABLES=glibc.malloc.hugetlb=1, which glibc reads only when the process starts.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # musl has no mallopt
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        libc.free.argtypes = (ctypes.c_void_p,)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        # Everything is allocated in the heap, which is not given back: so it is where the advice holds.
        if not (libc.mallopt(M_MMAP_THRESHOLD, 1 << 30) and libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)):
            return False
        start = libc.malloc(HEAP)
        first = -(-start // LARGE_PAGE) * LARGE_PAGE
        refused = libc.madvise(first, (start + HEAP - first) // LARGE_PAGE * LARGE_PAGE, MADV_HUGEPAGE)
        libc.free(start)
        return not refused
    return False


def _has_accelerator() -> bool:
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    names = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    return "libtpu" in names or bool(importlib.metadata.entry_points(group="jax_plugins"))
