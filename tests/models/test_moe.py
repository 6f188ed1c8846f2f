"""Sparse feed-forwards: every form of the product gives the plain one, floating and in eight bits, whole and split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.models import gpu_experts, moe, quantized
from domino_jax.models.moe import ExpertConfig, SparseFeedForward

EXPERTS, WIDTH, HIDDEN = 6, 256, 128


def matrices(form: str) -> dict:
    """Each expert has another scale, so that a product with a wrong one shows."""
    random = np.random.default_rng(0)
    shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    made = {}
    for name, (inputs, outputs) in shapes.items():
        kernel = random.normal(size=(EXPERTS, inputs, outputs)) * inputs**-0.5
        kernel = jnp.asarray(kernel * np.exp(random.normal(size=(EXPERTS, 1, outputs))), jnp.bfloat16)
        made[name] = kernel if form == "floating" else quantized.quantize(kernel, "int8")
        if form == "tiles":
            scale = np.exp(random.normal(size=(EXPERTS, inputs // 128, outputs // 128))) / 64
            q = jnp.asarray(random.normal(0, 4, kernel.shape), jnp.float8_e4m3fn)
            made[name] = {"q": q, "scale": jnp.asarray(scale, jnp.float32)}
    return made


def routed(rows: int, dtype, per_row: int = 3) -> tuple[jax.Array, ...]:
    """x, experts, weights. Expert 0 has no row, and some choices are for none, as on a device of a mesh."""
    random = np.random.default_rng(1)
    x = jnp.asarray(random.normal(size=(rows, WIDTH)), dtype)
    experts = np.array([random.permutation(EXPERTS)[:per_row] + 1 for _ in range(rows)], np.int32)
    weights = np.where(experts == EXPERTS, 0, random.uniform(0.1, 1, experts.shape)).astype(np.float32)
    return x, jnp.asarray(experts), jnp.asarray(weights)


@functools.lru_cache
def exact(form: str, rows: int, dtype) -> np.ndarray:
    """One row and one expert at a time, in float64."""
    x, experts, weights = (np.asarray(each, np.float64) for each in routed(rows, dtype))
    floating = {
        name: np.asarray(quantized.dequantized(each) if quantized.is_quantized(each) else each, np.float64)
        for name, each in matrices(form).items()
    }
    out = np.zeros(x.shape)
    for row, (ids, counts) in enumerate(zip(experts.astype(int), weights, strict=True)):
        for expert, weight in zip(ids, counts, strict=True):
            if expert < EXPERTS:
                gate, up = (x[row] @ floating[name][expert] for name in ("gate_proj", "up_proj"))
                out[row] += weight * (gate / (1 + np.exp(-gate)) * up) @ floating["down_proj"][expert]
    return out


FORMS = {
    "dense": moe.dense,
    "grouped": moe.grouped,
    "one after another": moe.one_after_another,
    "kernel": functools.partial(gpu_experts.by_kernel, interpret=True),
}


@pytest.mark.parametrize("rows", [17, 150])  # 150: blocks of 64 rows, several of one expert
@pytest.mark.parametrize("form", ["floating", "channels", "tiles"])
@pytest.mark.parametrize("product", FORMS)
def test_every_form_is_the_weighted_sum_of_the_experts(product, form, rows):
    dtype = jnp.bfloat16 if product == "kernel" else jnp.float32
    # The hidden units are rounded to the compute type between the products.
    tolerance = 4e-3 if product == "kernel" else 3e-6
    out, expected = jax.jit(FORMS[product])(*routed(rows, dtype), matrices(form)), exact(form, rows, dtype)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance * abs(expected).max())


def test_one_row_on_a_gpu_gathers_its_experts():
    out, expected = moe.take_experts(*routed(1, jnp.float32), matrices("floating")), exact("floating", 1, jnp.float32)
    np.testing.assert_allclose(out, expected, rtol=0, atol=3e-6 * abs(expected).max())


def test_all_rows_may_choose_the_same_expert():
    """The most rows of one expert, and blocks that no expert fills."""
    x, experts, weights = routed(150, jnp.bfloat16, per_row=1)
    experts = jnp.full_like(experts, 2)
    expected = moe.dense(x, experts, weights, matrices("floating"))
    for product in FORMS.values():
        out = jax.jit(product)(x, experts, weights, matrices("floating"))
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-2 * float(abs(expected).max()))


def test_the_weights_of_a_row_sum_to_one_if_the_config_says_so():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]]))
    for normed, expected in ((False, [0.4, 0.3]), (True, [4 / 7, 3 / 7])):
        weights, experts = moe.route(logits, ExpertConfig(4, 2, 8, normed))
        np.testing.assert_array_equal(experts, [[1, 3]])
        np.testing.assert_allclose(weights, [expected], rtol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
@pytest.mark.parametrize("rows", [1, 17])
def test_each_device_gets_its_form_and_a_float32_router(rows, platform):
    if platform == "cuda" and jax.__version_info__ >= (0, 11):
        pytest.skip("a newer jax lowers for a GPU only beside one")
    config = ExpertConfig(EXPERTS, 2, HIDDEN, True)
    layer = SparseFeedForward(config, WIDTH, jnp.bfloat16)
    x = jnp.zeros((1, rows, WIDTH), jnp.bfloat16)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)
    text = jax.jit(layer.apply).trace(params, x).lower(lowering_platforms=(platform,)).as_text()
    assert ("ragged_dot" in text) == (platform == "tpu")
    assert ("triton" in text) == (platform == "cuda" and rows > 1)
    assert f"tensor<{rows}x{EXPERTS}xf32>" in text.replace("1x17x", "17x").replace("1x1x", "1x")
