"""The environment of a run, and env.json. Only the variables listed here are read, so no token can get into it."""

import datetime
import hashlib
import importlib.metadata
import io
import os
import pathlib
import platform
import re
import subprocess
import sys
from typing import Any

import jax

import domino_jax

# Variables that change what is computed or where, and none that could hold a secret.
VARIABLES = (
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "JAX_PLATFORMS",
    "JAX_NUM_CPU_DEVICES",
    "JAX_NUM_PROCESSES",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "PJRT_NPROC",
    "NPROC",
)

# What variables such as JAX_ENABLE_X64 set for all programs of a user: in ours other values would change random numbers
# or types, or end in a traceback.
SETTINGS = {"jax_enable_x64": False, "jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
SETTINGS |= {"jax_default_prng_impl": "threefry2x32", "jax_threefry_partitionable": True, "jax_random_seed_offset": 0}
SETTINGS |= {"jax_high_dynamic_range_gumbel": False}


def settle() -> None:
    """Makes a command independent of a user's SETTINGS, and of an output that cannot show τ, such as a Latin-1 log."""
    for name in SETTINGS.keys() & jax.config.values.keys():  # a release may not have all of them
        jax.config.update(name, SETTINGS[name])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def environment() -> dict[str, Any]:
    """The content of env.json; JSON values only. Starts jax's backend, for the devices."""
    devices = jax.devices()
    kinds = [device.device_kind for device in devices]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "domino_jax": domino_jax.__version__,
        "git": git_state(pathlib.Path(__file__).resolve().parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages(),
        "backend": devices[0].platform,
        "device_kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "device_count": jax.device_count(),
        "local_device_count": jax.local_device_count(),
        "process_count": jax.process_count(),
        "cores": os.cpu_count(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def mappings_in_use() -> float:
    """This process' memory mappings, as a share of the number that Linux allows (vm.max_map_count); 0.0 elsewhere."""
    mappings, limit = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/sys/vm/max_map_count")
    return mappings.read_bytes().count(b"\n") / int(limit.read_text()) if limit.exists() else 0.0


def packages() -> dict[str, str]:
    """Every installed distribution and its version, without where it came from: an index's address can hold a token."""
    versions = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    return dict(sorted((name, version) for name, version in versions.items() if name))


def code_digest() -> str:
    """Tells versions of this package apart: of the text of all its modules."""
    folder = pathlib.Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def git_state(folder: pathlib.Path) -> str | None:
    """The commit of the checkout that tracks this package, followed by -dirty where tracked files differ; else None."""
    # An installed copy may be inside somebody else's checkout, which does not track it.
    tracked = ["ls-files", "--error-unmatch", "__init__.py"]
    describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        for arguments in (tracked, describe):
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or no answer in time
        return None
    return done.stdout.decode().strip()


def usable_cores() -> int:
    """How many cores the calling thread may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name() -> str:
    """A file name for what compiled programs depend on: the kind and number of devices, the versions of JAX and the
    compiler, and of CPUs the instructions that they have. Starts jax's backend."""
    device = jax.devices()[0]
    facts = [jax.__version__, device.client.platform_version]
    if device.platform == "cpu":  # a program for one CPU may not run on another
        cpus = pathlib.Path("/proc/cpuinfo")
        instructions = re.search(r"(?m)^(?:flags|Features)\s*:.*", cpus.read_text() if cpus.exists() else "")
        facts += [platform.machine(), instructions[0] if instructions else platform.node()]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
    return re.sub(r"\W+", "_", f"{device.device_kind} x{jax.device_count()} {digest}")
