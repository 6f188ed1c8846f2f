"""The conditions of a measurement, as every table states them."""

import datetime
import importlib.metadata
import os
import pathlib
from collections.abc import Iterable

from domino_jax.runtime.cores import usable

CPU = pathlib.Path("/proc/cpuinfo")


def cpu_name() -> str:
    lines = CPU.read_text().splitlines() if CPU.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def conditions(packages: Iterable[str] = ("jax",)) -> str:
    """One sentence: processor, cores, load, versions of the packages, date. Call it after the measurement."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    load = os.getloadavg()[1]  # the mean of five minutes
    cores = f"{usable()} core{'' if usable() == 1 else 's'}"
    return f"{cpu_name()}, {cores}, load average {load:.1f} while it ran; {versions}; {datetime.date.today()}."
