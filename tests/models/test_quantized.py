"""Products with matrices in eight bits: every form gives the product with the dequantized matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.heads.domino import GRU
from domino_jax.models import quantized
from domino_jax.models.layers import Linear, SplitLinear


def matrix(inputs: int, outputs: int, seed: int = 0) -> jax.Array:
    """Output channels of very different sizes, one of them zero."""
    random = np.random.default_rng(seed)
    kernel = random.normal(size=(inputs, outputs)) * np.exp(random.normal(size=outputs))
    kernel[:, 3] = 0
    return jnp.asarray(kernel, jnp.float32)


def tiles(inputs: int, outputs: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(1)
    q = jnp.asarray(random.normal(0, 40, (inputs, outputs)), jnp.float8_e4m3fn)
    return {"q": q, "scale": jnp.asarray(np.exp(random.normal(size=(inputs // 128, outputs // 128))), jnp.float32)}


def rows(count: int, inputs: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).normal(size=(count, inputs)), dtype)


@pytest.mark.parametrize(("dtype", "most", "step"), [("int8", 127, 0.5), ("float8_e4m3fn", 448, 16)])
def test_each_channel_is_scaled_to_the_whole_range_and_rounded_to_the_nearest_value(dtype, most, step):
    """step: half the distance of two values at the end of the range, in units of the scale."""
    kernel = matrix(48, 20)
    made = quantized.quantize(kernel, dtype)
    q, scale = np.asarray(made["q"], np.float32), np.asarray(made["scale"])
    assert made["q"].dtype == dtype and scale.shape == (1, 20)
    np.testing.assert_allclose(scale[0], abs(np.asarray(kernel)).max(axis=0) / most, rtol=1e-6)
    assert (abs(q).max(axis=0) == np.where(np.arange(20) == 3, 0, most)).all()
    assert (abs(q * scale - kernel) <= step * scale * 1.001).all()
    np.testing.assert_array_equal(quantized.dequantized(made), q * scale)


@pytest.mark.parametrize("count", [1, 17, 129])
@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn", "tiles"])
def test_a_linear_map_multiplies_with_the_dequantized_matrix(form, count):
    """One row and 129 take other paths than 17."""
    kernel = tiles(256, 384) if form == "tiles" else quantized.quantize(matrix(256, 384), form)
    x, dense = rows(count, 256), quantized.dequantized(kernel)
    y, grad = jax.value_and_grad(lambda x: Linear(384).apply({"params": {"kernel": kernel}}, x).sum())(x)
    np.testing.assert_allclose(y, (x @ dense).sum(), rtol=1e-4)
    np.testing.assert_allclose(grad, np.broadcast_to(dense.sum(axis=1), x.shape), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("inputs", [256, 640])  # in 2 shares of a tile each, and in one of five
@pytest.mark.parametrize("count", [1, 17, 128])
def test_the_kernel_for_gpus_and_the_sums_by_tiles_equal_the_product(inputs, count):
    kernel, x = tiles(inputs, 384), rows(count, inputs, jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(quantized.dequantized(kernel), np.float64)
    for y in (quantized.by_kernel(x, kernel, interpret=True), quantized.by_tiles(x, kernel)):
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, exact, rtol=0, atol=2e-6 * abs(exact).max())


def test_the_parts_of_a_head_multiply_with_the_dequantized_matrices():
    split, gru = SplitLinear((24, 40), 20), GRU(24, 16)
    kernel = quantized.quantize(matrix(64, 20), "int8")
    dense = quantized.dequantized(kernel)
    for index, start in ((0, 0), (1, 24)):
        x = rows(5, split.widths[index])
        y = split.apply({"params": {"kernel": kernel}}, index, x, method=SplitLinear.part)
        np.testing.assert_allclose(y, x @ dense[start : start + x.shape[1]], rtol=1e-4, atol=1e-4)
    params = {"weight_ih": matrix(24, 48), "weight_hh": matrix(16, 48, seed=5)}
    rounded = {name: quantized.quantize(leaf, "int8") for name, leaf in params.items()}
    floating = {name: quantized.dequantized(leaf) for name, leaf in rounded.items()}
    x, state = rows(3, 24), rows(3, 16)
    both = (gru.apply({"params": tree}, x, method=GRU.input_gates) for tree in (rounded, floating))
    np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-4)
    both = (gru.apply({"params": tree}, state, rows(3, 48), method=GRU.advance) for tree in (rounded, floating))
    np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-4)
