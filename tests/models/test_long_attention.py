"""The kernels for attention over a long cache: against plain attention on this CPU, and where they run."""

import functools
import json
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from domino_jax.models import gpu_attention, tpu_attention
from domino_jax.models.attention import KERNELS, attend, attend_cache
from domino_jax.models.long_attention import attend_long
from tests.helpers.attention import arrays, shapes
from tests.helpers.paths import ROOT

both = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def relative_error(found: jax.Array, plain: jax.Array) -> float:
    """The largest difference, as a share of the largest value."""
    found, plain = (x.astype(jnp.float32) for x in (found, plain))
    return abs(found - plain).max() / abs(plain).max()


BOTH = [(2, 8, 2, 17, 384), (1, 4, 4, 1, 8_192), (2, 4, 2, 60, 256), (1, 8, 2, 16, 4_096), (3, 4, 2, 5, 640, 128, 1)]
SHAPES = {
    # Masks of three words; five parts of 320 rows.
    tpu_attention: [*BOTH, (2, 4, 2, 70, 256), (1, 8, 1, 40, 4_096)],
    # Heads of 64 numbers, rows that are no power of two; masks of four words; tiles of 64 and 16 rows, 27 steps for two
    # programs.
    gpu_attention: [*BOTH, (1, 6, 2, 9, 1_024, 64), (2, 2, 2, 100, 256), (1, 4, 1, 17, 1_728)],
}


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "shape"), [(kernel, shape) for kernel in SHAPES for shape in SHAPES[kernel]])
def test_a_kernel_equals_plain_attention_to_within_bfloat16_rounding(kernel, shape):
    q, k, v, mask = arrays(*shape)
    plain = attend(*(x.astype(jnp.float32) for x in (q, k, v)), jnp.broadcast_to(mask, (len(q), *mask.shape[1:])))
    assert relative_error(attend_long(kernel.kernel_call, q, k, v, mask, interpret=True), plain) < 0.01


@pytest.mark.long
@both
def test_a_query_that_reads_nothing_gets_zeros_even_beside_one_that_reads(kernel):
    q, k, v, mask = arrays(1, 4, 4, 2, 8_192)
    mask = mask.at[0, 1].set(False).at[:, :, :4_096].set(False)  # whole parts are hidden from all
    out = attend_long(kernel.kernel_call, q, k, v, mask, interpret=True)
    assert not out[0, :, 1].any() and (abs(out[0, :, 0]).astype(jnp.float32).sum(-1) > 0).all()
    assert relative_error(out, attend(q, k, v, mask)) < 0.01


@both
def test_products_have_the_default_precision_whatever_the_process_has_set(kernel):
    """A TPU kernel refuses "highest" for bfloat16; conftest.py sets it."""
    assert jax.config.jax_default_matmul_precision == "highest"
    text = str(jax.make_jaxpr(functools.partial(attend_long, kernel.kernel_call))(*shapes(1, 4, 4, 1, 8_192)))
    assert "HIGHEST" not in text and text.count("precision=(Precision.DEFAULT, Precision.DEFAULT)") == 2


ON_A_MESH = """
import jax, json
from domino_jax.models import sharding
from domino_jax.models.attention import KERNELS, attend, attend_cache
from domino_jax.models.long_attention import attend_long
from tests.helpers.attention import arrays, shapes
given = arrays(4, 8, 2, 17, 256)
plain = attend(*given).astype("float32")
mesh = sharding.make_mesh(2, 1, 2)
sizes = {"whole": (4, 8, 2, 17, 4096), "odd batch": (3, 8, 2, 17, 4096), "one head": (4, 8, 1, 17, 4096),
         "few on a chip": (4, 8, 2, 17, 1024), "large": (4, 32, 8, 17, 16384), "less": (4, 32, 8, 17, 8192)}
found = {}
with jax.set_mesh(mesh):
    for name, kernel in KERNELS.items():
        out = jax.jit(lambda *given: attend_long(kernel.kernel_call, *given, interpret=True))(*given)
        found[name] = {
            "difference": float(abs(out.astype("float32") - plain).max()),
            "spec": [str(axis) for axis in out.sharding.spec[:2]],
            "applies": {size: kernel.applies(*shapes(*shape)[:2]) for size, shape in sizes.items()},
        }
    program = jax.jit(attend_cache).trace(*shapes(*sizes["whole"])).lower(lowering_platforms=("tpu",))
call = next(line for line in program.as_text().splitlines() if "custom_call @tpu_custom_call" in line)
found["tpu"]["keys"] = call.split(" : (")[1].split(", ")[1]
print(json.dumps(found))
"""


@pytest.mark.long
def test_on_a_mesh_each_device_attends_for_its_requests_and_heads():
    environment = {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", ON_A_MESH]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert all(one["difference"] < 0.01 and one["spec"] == ["data", "tensor"] for one in found.values())
    assert found["tpu"]["keys"] == "tensor<2x1x4096x128xbf16>"
    # Without the division by the devices "few on a chip" and "less" would have enough scores.
    used = {name: {size for size, applies in one["applies"].items() if applies} for name, one in found.items()}
    assert used == {"tpu": {"whole", "large", "less"}, "cuda": {"large"}}
    assert tpu_attention.applies(*shapes(4, 8, 2, 17, 1_024)[:2])
    assert gpu_attention.applies(*shapes(4, 32, 8, 17, 8_192)[:2])


def kernel_calls(jaxpr, platform: str = "any") -> Counter[str]:
    """How many kernels a program calls, by the platform of the branch that they are in."""
    found = Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found[platform] += 1
        for name, value in equation.params.items():
            inner = [one for one in (value if isinstance(value, tuple) else (value,)) if hasattr(one, "eqns")]
            places = equation.params.get("branches_platforms") if name == "branches" else None
            for one, place in zip(inner, places or [(platform,)] * len(inner), strict=True):
                found += kernel_calls(getattr(one, "jaxpr", one), (place or ("other",))[0])
    return found


def calls(function, arguments) -> Counter[str]:
    return kernel_calls(jax.make_jaxpr(function)(*arguments).jaxpr)


def test_each_kernel_is_used_on_its_platform_for_many_scores_in_bfloat16():
    assert calls(attend_cache, shapes(8, 32, 8, 17, 4_096)) == {"tpu": 1, "cuda": 2}
    assert calls(attend_cache, shapes(1, 32, 8, 17, 4_096)) == {"tpu": 1}
    assert not calls(attend_cache, shapes(8, 32, 8, 17, 4_096, dtype=jnp.float32))


def lowered(function, arguments, platform: str) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="a newer jax lowers for a GPU only beside one")
@pytest.mark.parametrize(
    "shape",
    [
        (8, 32, 8, 17, 4_096),
        (1, 32, 8, 1, 40_000),  # 625 steps for 32 programs
        (8, 8, 8, 100, 4_096),  # masks of four words
        (2, 6, 2, 33, 8_192, 64),  # rows that are no power of two, masks of two words, heads of 64 numbers
        (8, 32, 8, 32, 4_096),  # the most rows
    ],
)
def test_the_kernel_for_gpus_is_lowered_by_its_compiler(shape):
    """Interpreted, a kernel may do what Triton cannot."""
    by_kernel = functools.partial(attend_long, gpu_attention.kernel_call)
    assert lowered(by_kernel, shapes(*shape), "cuda").count("@__gpu$xla.gpu.triton") == 2
