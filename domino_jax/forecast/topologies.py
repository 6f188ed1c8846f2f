"""Devices that are not here, for their compilers: TPU slices by name, and GPUs of one machine.

devices_of("v5e:4x4")   the 16 chips of a TPU slice, or one with v5e:1x1: needs the libtpu wheel, not the chips; the 8
                        devices of four chips with tpu7x:2x2x1
devices_of("h100:8")    eight GPUs of a machine ("h200" is one): needs the wheels jax-cuda12-plugin and
                        jax-cuda12-pjrt of jax's version, no driver
"""

import dataclasses
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from domino_jax.runtime.errors import DominoError, first_line

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device by its public data sheet.

    memory: bytes.  bandwidth: of that memory, bytes/s.  noun: what a device is; of a tpu7x a chip has two.
    """

    memory: float
    bandwidth: float
    noun: str = "chip"


# Cloud TPU's system architecture pages (per-chip HBM and its bandwidth); NVIDIA's data sheets of
# the H100 SXM and the H200. Of a tpu7x, half of a chip, with the memory that libtpu gives to programs.
CHIPS = {
    "v4": Chip(32 * GB, 1_228 * GB),
    "v5e": Chip(16 * GB, 819 * GB),
    "v5p": Chip(95 * GB, 2_765 * GB),
    "v6e": Chip(32 * GB, 1_640 * GB),
    "tpu7x": Chip(94.75 * 2**30, 3_690 * GB, "device"),
    "h100": Chip(80 * GB, 3_350 * GB),
    "h200": Chip(141 * GB, 4_800 * GB),
}
GPU_BYTES = {"h100": 85_000_000_000, "h200": 143_000_000_000}  # that a driver reports
GPUS_OF_A_MACHINE = 8

# What the compiler asks of a GPU (a stream executor's device description). An H100 and an H200 differ in their memory.
HOPPER = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: %d l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: %d
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 5 }
device_description_str: "NVIDIA %s"
"""

# libtpu asks Google's metadata server for these on a TPU machine; anywhere else it would only print errors.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # Its lock keeps two processes from one chip; two that only compile have no chip to share.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def chip_of(topology: str) -> Chip | None:
    """The chip of a topology's name; None for one that is not in the table."""
    return CHIPS.get(topology.split(":")[0].lower())


def noun_of(topology: str) -> str:
    """The noun for one device of a topology."""
    chip = chip_of(topology)
    return chip.noun if chip else "chip"


def devices_of(topology: str) -> Sequence[jax.Device]:
    """The devices of a topology, to build a Mesh and compile for; nothing can run on them.

    Raises:
        DominoError: an unknown name, or a compiler that is not installed.
    """
    if not jax.config.jax_platforms:
        # Else jax would start every plug-in it finds, and give up at the one whose device is not here.
        jax.config.update("jax_platforms", "cpu")
    kind = topology.split(":")[0].lower()
    if kind not in CHIPS:
        raise DominoError(
            f"--topology={topology}: no such chip; name one of {', '.join(CHIPS)}, as v5e:4x4, v5p:4x4x4 or h100:8."
        )
    if kind in GPU_BYTES:
        count = topology.partition(":")[2] or "1"
        if not count.isdecimal() or not 1 <= int(count) <= GPUS_OF_A_MACHINE:
            raise DominoError(
                f"--topology={topology}: the GPUs of one machine can be compiled for, 1 to {GPUS_OF_A_MACHINE}; write"
                f" --topology={kind}:{GPUS_OF_A_MACHINE}."
            )
        gpu = HOPPER % (CHIPS[kind].bandwidth, GPU_BYTES[kind], kind.upper())
        wheels, places = "jax-cuda12-plugin jax-cuda12-pjrt", f"1x1x{int(count)}"
        return _describe(topology, "cuda", wheels, target_config=gpu, topology=places)
    for name, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # A machine has four chips or more, except the one with a single chip.
    single = {"chips_per_host_bounds": (1, 1, 1)} if topology.partition(":")[2] == "1x1" else {}
    return _describe(topology, "tpu", "libtpu", topology_name=topology, **single)


def _describe(asked: str, platform: str, wheels: str, **arguments: Any) -> Sequence[jax.Device]:
    name = {"topology_name": ""} | arguments
    try:
        return topologies.get_topology_desc(platform=platform, **name).devices
    except Exception as error:  # the plug-ins raise their own classes, and RuntimeError for all else
        raise DominoError(
            f"--topology={asked}: its compiler gives no such devices ({first_line(error, with_class=False)}).\n"
            f"Install it with `pip install -r requirements-compile.txt` ({wheels}), or correct the shape."
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGHUP, signal.SIGTERM):  # libtpu ignores the one and takes the other
                signal.signal(number, signal.getsignal(number) or signal.SIG_DFL)
