"""models/tpu_attention.py: the kernel's steps on this CPU against plain attention, and where it is used."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import compile_decode
from domino_jax.decoding.rounds import speculative_round
from domino_jax.models import sharding
from domino_jax.models.attention import attend, attend_cache
from domino_jax.models.tpu_attention import applies, attend_long, part_size
from tests.helpers.paths import ROOT


def arrays(batch, heads, kv_heads, length, slots, width=128, mask_rows=None, dtype=jnp.bfloat16):
    """q, k, v and a random mask in which every query reads some slots."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(batch, heads, length, width), *2 * [(batch, kv_heads, slots, width)]]
    q, k, v = (
        jax.random.normal(key, shape, jnp.float32).astype(dtype) for key, shape in zip(keys, shapes, strict=False)
    )
    return q, k, v, jax.random.bernoulli(keys[3], 0.3, (mask_rows or batch, length, slots))


@pytest.mark.parametrize(
    "shape",
    [(2, 8, 2, 17, 384), (1, 4, 4, 1, 8_192), (2, 4, 2, 70, 256), (1, 8, 1, 40, 4_096), (3, 4, 2, 5, 640, 128, 1)],
    ids=["one part", "two parts of one row", "masks of 70 rows in three words", "five parts of 320 rows", "one mask"],
)
def test_the_kernel_equals_plain_attention_to_within_bfloat16_rounding(shape):
    q, k, v, mask = arrays(*shape)
    plain = attend(*(x.astype(jnp.float32) for x in (q, k, v)), jnp.broadcast_to(mask, (len(q), *mask.shape[1:])))
    kernel = attend_long(q, k, v, mask, interpret=True).astype(jnp.float32)
    assert abs(kernel - plain).max() < 0.01 * abs(plain).max()


def test_a_query_that_reads_nothing_gets_zeros_even_beside_one_that_reads():
    q, k, v, mask = arrays(1, 4, 4, 2, 8_192)  # two parts
    mask = mask.at[0, 1].set(False).at[:, :, :4_096].set(False)  # the first part is hidden from all
    out = attend_long(q, k, v, mask, interpret=True).astype(jnp.float32)
    assert not out[0, :, 1].any() and (abs(out[0, :, 0]).sum(-1) > 0).all()
    plain = attend(q, k, v, mask).astype(jnp.float32)
    assert abs(out - plain).max() < 0.01 * abs(plain).max()


def test_products_have_the_default_precision_whatever_the_process_has_set():
    """A TPU kernel refuses "highest" for bfloat16; conftest.py sets it."""
    assert jax.config.jax_default_matmul_precision == "highest"
    text = str(jax.make_jaxpr(attend_long)(*shapes(1, 4, 4, 1, 8_192)))
    assert "HIGHEST" not in text and text.count("precision=(Precision.DEFAULT, Precision.DEFAULT)") == 2


ON_A_MESH = """
import jax, json
from domino_jax.models import sharding
from domino_jax.models.attention import attend, attend_cache
from domino_jax.models.tpu_attention import applies, attend_long
from tests.models.test_tpu_attention import arrays, shapes
given = arrays(4, 8, 2, 17, 256)
plain = attend(*given).astype("float32")
mesh = sharding.make_mesh(2, 1, 2)
found = {}
with jax.set_mesh(mesh):
    out = jax.jit(lambda *given: attend_long(*given, interpret=True))(*given)
    sizes = {"whole": (4, 8, 2, 17, 4096), "odd batch": (3, 8, 2, 17, 4096), "one head": (4, 8, 1, 17, 4096),
             "few on a chip": (4, 8, 2, 17, 1024)}
    found["applies"] = {name: applies(*shapes(*size)[:2]) for name, size in sizes.items()}
    lowered = jax.jit(attend_cache).trace(*shapes(*sizes["whole"])).lower(lowering_platforms=("tpu",))
call = next(line for line in lowered.as_text().splitlines() if "custom_call @tpu_custom_call" in line)
found["keys"] = call.split(" : (")[1].split(", ")[1]
found["difference"] = float(abs(out.astype("float32") - plain).max())
found["spec"] = [str(axis) for axis in out.sharding.spec[:2]]
print(json.dumps(found))
"""


def test_on_a_mesh_each_device_attends_for_its_requests_and_heads():
    environment = {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", ON_A_MESH]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["difference"] < 0.01 and found["spec"] == ["data", "tensor"]
    assert found["keys"] == "tensor<2x1x4096x128xbf16>"
    # Without the division by the devices the last would have enough scores.
    assert found["applies"] == {"whole": True, "odd batch": False, "one head": False, "few on a chip": False}
    q, k, *_ = shapes(4, 8, 2, 17, 1_024)
    assert applies(q, k)


def kernels(function, arguments, platform="tpu") -> int:
    return str(jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()).count(
        "tpu_custom_call"
    )


def shapes(batch, heads, kv_heads, length, slots, width=128, dtype=jnp.bfloat16):
    made = [(batch, heads, length, width), *2 * [(batch, kv_heads, slots, width)]]
    return [*(jax.ShapeDtypeStruct(shape, dtype) for shape in made), jax.ShapeDtypeStruct((batch, length, slots), bool)]


def test_it_is_used_on_tpus_for_many_scores_in_bfloat16():
    many = shapes(8, 32, 8, 17, 4_096)
    assert kernels(attend_cache, many) == 1
    assert kernels(attend_cache, many, "cuda") == kernels(attend_cache, many, "cpu") == 0
    assert kernels(attend_cache, shapes(8, 32, 8, 17, 4_096, dtype=jnp.float32)) == 0


@pytest.mark.parametrize(
    ("shape", "used"),
    [
        ((1, 32, 8, 17, 1_024), True),
        ((1, 32, 8, 17, 512), False),  # few scores
        ((8, 32, 8, 17, 21 * 128), True),  # one part
        ((8, 32, 8, 17, 37 * 128), False),  # parts of 128
        ((32, 32, 8, 17, 256), True),  # a small cache is one part
        ((8, 32, 8, 17, 4_096 + 64), False),  # no part divides the slots
        ((8, 32, 8, 17, 4_096, 64), False),  # heads that do not fill the lanes
        ((1, 32, 1, 17, 4_096), False),  # 544 rows of one head
    ],
)
def test_shapes_that_it_does_not_pay_for_or_cannot_compute_stay_plain(shape, used):
    q, k, *_ = shapes(*shape)
    assert applies(q, k) is used


@pytest.mark.parametrize(
    ("rows", "slots", "size"),
    [(68, 4_096, 2_048), (68, 2_688, 2_688), (68, 37 * 128, 128), (4, 32_768, 4_096), (512, 4_096, 512)],
)
def test_a_part_is_the_largest_multiple_of_128_that_divides_the_cache_within_the_limits(rows, slots, size):
    assert part_size(rows, slots) == size


def test_a_long_round_uses_it_in_every_layer_of_target_and_drafter():
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    models = compile_decode.models_on(mesh, "0.6b", layers=3)
    with jax.set_mesh(mesh):
        state = compile_decode.state_on(mesh, models, 4_096, rows=2)

    def whole_round(models, state, stop):
        return speculative_round(models, state, stop, compile_decode.GREEDY, compile_decode.drafting())

    arguments = (models, state, compile_decode.array(mesh, 1))
    layers = models.target.config.num_hidden_layers + models.drafter.config.num_hidden_layers
    text = jax.jit(whole_round).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == layers
