"""The check of the Pallas kernels on the devices of this process. Skip this file at first reading.

Interpreters and compilers for absent devices are most of what vouches for the kernels. So each kernel is run once on
each kind of device, on small random inputs, and compared with XLA's form.
"""

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from domino_jax.models import attention, gpu_experts, moe, quantized
from domino_jax.models.long_attention import REFUSED
from domino_jax.runtime.agreement import from_primary
from domino_jax.runtime.environment import code_digest, device_name
from domino_jax.runtime.errors import first_line
from domino_jax.runtime.json_files import read_json, write_json

SECONDS = 300  # of a trial with its compilation
ROUNDING = 2**-6  # that two forms may differ by, of the largest value: a few roundings to bfloat16
Trial = tuple[Callable, Callable, tuple]  # the kernel, XLA's form, and the arguments of both
log = logging.getLogger(__name__)


@functools.cache
def refuse_faulty() -> None:
    """Fills REFUSED, the same in every process, before the first program is traced. Nothing is run on CPUs."""
    platform = jax.default_backend()
    if platform != "cpu":
        REFUSED.update(from_primary(lambda: judge(trials(platform))))
    for name, reason in REFUSED.items():
        device = jax.devices()[0]
        versions = f"jax {jax.__version__}, {' '.join(device.client.platform_version.split())}"
        log.warning("The kernel for %s is not used on %s: %s (%s).", name, device.device_kind, reason, versions)


def judge(trials: dict[str, Trial]) -> dict[str, str]:
    """{kernel that fails: why}. Verdicts are stored beside the compiled programs, by devices, versions and code."""
    folder = jax.config.jax_compilation_cache_dir
    file = epath.Path(folder) / f"kernels-{device_name()}-{code_digest()}.json" if folder else None
    known = read_json(file) if file and file.exists() else {}
    for name in trials.keys() - known.keys():
        # The first verdict is for the next start, if the trial ends this process.
        for verdict in (lambda *_: "its trial did not end", fault_of):
            known[name] = verdict(*trials[name])
            if file:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, known)
    return {name: reason for name, reason in known.items() if reason}


def fault_of(kernel: Callable, plain: Callable, arguments: tuple) -> str:
    """Describes what is wrong with a kernel; "" if it is right. It runs in a thread, which can be left running."""
    results = []

    def run() -> None:
        try:
            ours, theirs = (np.asarray(jax.jit(form)(*arguments), np.float32) for form in (kernel, plain))
            share = np.abs(ours - theirs).max() / np.abs(theirs).max()
            results.append("" if share <= ROUNDING else f"it is {share:.2g} of the largest value off")
        except Exception as error:  # compilers and devices raise classes of their own
            results.append(f"it failed ({first_line(error)})")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return results[0] if results else f"its trial did not end in {SECONDS} s"


def trials(platform: str, interpret: bool = False) -> dict[str, Trial]:
    """The trials of a platform's kernels, by the names under which REFUSED is read."""
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)

    def in_eight_bits(dtype: str, scales: tuple[int, ...], *shape: int) -> dict[str, np.ndarray]:
        return {"q": (9 * floats(*shape)).astype(dtype), "scale": rng.random(scales, np.float32)}

    def experts(make: Callable, *choices: Any) -> Trial:
        matrices = {name: make(*choices, 8, 256, 256) for name in ("gate_proj", "up_proj", "down_proj")}
        rows = (floats(24, 256), np.arange(48).reshape(24, 2) % 7, rng.random((24, 2), np.float32))
        return functools.partial(gpu_experts.by_kernel, interpret=interpret), moe.grouped, (*rows, matrices)

    form = attention.KERNELS["tpu" if platform == "tpu" else "cuda"].kernel_call
    cache = (floats(1, 2, 6_400, 128), floats(1, 2, 6_400, 128), floats(1, 17, 6_400) > 0)
    attend = functools.partial(attention.attend_long, form, interpret=interpret)
    of_attention = {"attention": (attend, attention.attend, (floats(1, 8, 17, 128), *cache))}
    if platform == "tpu":
        return of_attention
    tiles = (floats(17, 512), in_eight_bits("float8_e4m3fn", (4, 2), 512, 256))
    return of_attention | {
        "matrices in tiles": (functools.partial(quantized.by_kernel, interpret=interpret), quantized.by_tiles, tiles),
        "experts in bfloat16": experts(floats),
        "experts in int8": experts(in_eight_bits, "int8", (8, 1, 256)),
        "experts in float8_e4m3fn": experts(in_eight_bits, "float8_e4m3fn", (8, 2, 2)),
    }
