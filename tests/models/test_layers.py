"""Shared layers, attention and the cache: literal values and 0/1 pictures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.models import quantized
from domino_jax.models.attention import attend, causal_mask
from domino_jax.models.cache import (
    append,
    block_mask,
    init_cache,
    take_by_gather,
    take_by_product,
    write_rows,
    write_single_row,
)
from domino_jax.models.layers import Linear, RMSNorm, SwiGLU, one_product, rotary_angles, rotate
from tests.helpers.models import random_tokens, tiny_target


def picture(mask):
    """A 0/1 mask as lines of text."""
    return ["".join("1" if cell else "0" for cell in row) for row in np.asarray(mask)]


def test_rms_norm_computes_in_float32_for_bfloat16_input():
    x = jnp.asarray(np.random.default_rng(0).standard_normal(256), jnp.bfloat16)
    scale = {"params": {"scale": jnp.ones(256)}}
    out = RMSNorm(eps=1e-6, dtype=jnp.bfloat16).apply(scale, x)
    exact = np.asarray(x, np.float64) / np.sqrt(np.mean(np.asarray(x, np.float64) ** 2) + 1e-6)
    assert out.dtype == jnp.bfloat16
    assert (out == jnp.asarray(exact, jnp.bfloat16)).all()


def test_rotation_pairs_dimension_i_with_i_plus_half():
    angles = rotary_angles(jnp.array([[1]]), head_dim=4, theta=100.0)  # angles 1 and 0.1
    first = rotate(jnp.array([1.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4), angles)[0, 0, 0]
    second = rotate(jnp.array([0.0, 1.0, 0.0, 0.0]).reshape(1, 1, 1, 4), angles)[0, 0, 0]
    np.testing.assert_allclose(first, [np.cos(1), 0, np.sin(1), 0], atol=1e-6)
    np.testing.assert_allclose(second, [0, np.cos(0.1), 0, np.sin(0.1)], atol=1e-6)


def test_rotation_angles_tell_256_from_257_for_bfloat16_heads():
    x = jnp.ones((1, 1, 2, 4), jnp.bfloat16)
    out = rotate(x, rotary_angles(jnp.array([[256, 257]]), 4, 1e6))
    np.testing.assert_allclose(out[0, 0, 1, 0], np.cos(257) - np.sin(257), atol=0.01)
    assert abs(float(out[0, 0, 0, 0]) - float(out[0, 0, 1, 0])) > 0.1


@pytest.mark.parametrize(("in_int8", "products"), [((), 2), (("gate_proj", "up_proj"), 2), (("up_proj",), 3)])
def test_the_hidden_units_of_a_few_rows_are_one_product_on_a_gpu_and_equal(in_int8, products):
    """Not where only one of the two matrices is in eight bits."""
    layer, x = SwiGLU(6, 10, jnp.float32), jax.random.normal(jax.random.key(0), (1, 9, 6))
    parts = layer.init(jax.random.key(1), x)["params"]
    stored = parts | {name: {"kernel": quantized.quantize(parts[name]["kernel"], "int8")} for name in in_int8}
    parts |= {name: {"kernel": quantized.dequantized(stored[name]["kernel"])} for name in in_int8}
    gate, up = (x @ parts[name]["kernel"] for name in ("gate_proj", "up_proj"))
    if products == 2:
        joined = one_product(x, *(stored[name]["kernel"] for name in ("gate_proj", "up_proj")))
        for one, two in zip(joined, (gate, up), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)
    expected = (jax.nn.silu(gate) * up) @ parts["down_proj"]["kernel"]
    np.testing.assert_allclose(layer.apply({"params": stored}, x), expected, rtol=1e-5, atol=1e-7)
    text = jax.jit(layer.apply).trace({"params": stored}, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.dot_general") == products


@pytest.mark.parametrize("platform, rows", [("cpu", 1), ("tpu", 8), ("cuda", 8)])
def test_a_product_of_one_row_has_eight_on_an_accelerator(platform, rows):
    layer, x = Linear(3), jnp.ones((1, 1, 2))
    params = {"params": {"kernel": jnp.ones((2, 3))}}
    text = jax.jit(layer.apply).trace(params, x).lower(lowering_platforms=(platform,)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 1 and (f"tensor<{rows}x2xf32>" in products[0]) is (rows == 8)


def test_attention_equals_a_loop_over_queries():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, heads, 5, 6), dtype=np.float32) for heads in (4, 2, 2))
    mask = rng.random((2, 5, 5)) < 0.6
    mask[:, :, 0] = True
    expected = np.zeros_like(q)
    for b, n, t in np.ndindex(2, 4, 5):
        scores = k[b, n // 2] @ q[b, n, t] / np.sqrt(6.0)
        weights = np.exp(scores) * mask[b, t]
        expected[b, n, t] = (weights / weights.sum()) @ v[b, n // 2]
    np.testing.assert_allclose(attend(*map(jnp.asarray, (q, k, v, mask))), expected, atol=1e-6)


def test_a_query_that_may_read_nothing_returns_zero_and_a_finite_gradient():
    q, k, v = (jnp.ones((1, 1, 2, 4)),) * 3
    mask = jnp.array([[[False, False], [True, True]]])
    out = attend(q, k, v, mask)
    assert out[0, 0].tolist() == [[0.0] * 4, [1.0] * 4]
    gradient = jax.grad(lambda q: attend(q, k, v, mask).sum())(q)
    assert jnp.isfinite(gradient).all()


def test_causal_mask_picture():
    assert picture(causal_mask(jnp.arange(3), 3)[0]) == ["100", "110", "111"]
    documents = jnp.array([[1, 1, 2]])
    assert picture(causal_mask(jnp.arange(3), 3, documents, documents)[0]) == ["100", "110", "001"]


def test_block_mask_of_a_tree_hides_siblings():
    #          root a  b  child of a
    ancestors = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)
    mask = block_mask(jnp.array([1]), ancestors, slots=6)
    assert picture(mask[0]) == ["110000", "111000", "110100", "111010"]


def test_append_writes_each_row_at_its_own_slots():
    (cache,) = init_cache(layers=1, batch=2, slots=4, kv_heads=1, head_dim=1)
    k = jnp.array([[1.0, 2.0], [3.0, 4.0]]).reshape(2, 1, 2, 1)
    keys, values = append(cache, k, 10 * k, jnp.array([[0, 1], [2, 3]]))
    assert keys[:, 0, :, 0].tolist() == [[1, 2, 0, 0], [0, 0, 3, 4]]
    assert values[:, 0, :, 0].tolist() == [[10, 20, 0, 0], [0, 0, 30, 40]]


def test_a_block_that_would_run_past_the_end_is_dropped_and_never_shifted_onto_committed_rows():
    cache = (jnp.full((2, 1, 3, 1), 5.0),) * 2
    k = jnp.array([7.0, 8.0]).reshape(1, 1, 2, 1).repeat(2, axis=0)
    keys, _ = append(cache, k, k, jnp.array([[2, 3], [1, 2]]))
    assert keys[:, 0, :, 0].tolist() == [[5, 5, 5], [5, 7, 8]]


@pytest.mark.parametrize("start", [0, 3, 4, 5])
def test_one_row_written_as_for_gpus_is_the_row_written_as_elsewhere(start):
    old, new = jax.random.normal(jax.random.key(0), (2, 1, 3, 6, 4))
    block, starts = new[:, :, :2], jnp.array([[start]])
    written = write_single_row(old, block, starts)
    assert (written == write_rows(old, block, starts)).all()
    assert bool((written == old).all()) == (start > 4)


@functools.lru_cache
def target_run():
    target = tiny_target(tied=False)
    return jax.jit(
        lambda *args, **kw: target.module.apply({"params": target.params}, *args, **kw),
        static_argnames=("tap_layers", "features_only", "with_logits"),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_path_taken_by_a_product_is_the_gathered_one_to_the_last_bit(dtype):
    rows = jax.random.normal(jax.random.key(0), (2, 3, 12, 4)).astype(dtype)
    lengths, path = jnp.array([1, 6]), jnp.array([[0, 2, 4], [0, 1, 5]])
    expected = jnp.stack([rows[0, :, jnp.array([1, 3, 5])], rows[1, :, jnp.array([6, 7, 11])]]).swapaxes(1, 2)
    assert (take_by_gather(rows, lengths, path) == expected).all()
    assert (take_by_product(rows, lengths, path, 6) == expected).all()


def test_a_path_that_leaves_the_cache_takes_its_last_slot_and_nothing_that_is_not_finite():
    rows = jnp.arange(6.0).reshape(1, 1, 6, 1)
    taken = take_by_gather(rows, jnp.array([4]), jnp.array([[0, 1, 2, 9]]))
    assert taken[0, 0, :, 0].tolist() == [4, 5, 5, 5]


def test_cached_forward_equals_uncached_forward_for_rows_of_different_length():
    """Prompts of 5 and 3 tokens are prefilled together, padded; then 4 tokens are appended to each."""
    tokens, run, target = random_tokens((2, 9)), target_run(), tiny_target(tied=False)
    plain = run(tokens, tap_layers=(1, 0))
    lengths = jnp.array([5, 3])
    slots = jnp.broadcast_to(jnp.arange(6), (2, 6))
    padded = jnp.where(slots < lengths[:, None], tokens[:, :6], 0)
    mask = block_mask(jnp.zeros(2, jnp.int32), jnp.tril(jnp.ones((6, 6), bool)), 16)
    prefilled = run(padded, slots, mask, target.module.init_cache(2, 16), slots, tap_layers=(1, 0))
    slots = lengths[:, None] + jnp.arange(4)
    following = jnp.take_along_axis(tokens, slots, axis=1)
    mask = block_mask(lengths, jnp.tril(jnp.ones((4, 4), bool)), 16)
    out = run(following, slots, mask, prefilled["cache"], slots, tap_layers=(1, 0))
    for row, length in enumerate((5, 3)):
        for name in ("logits", "features"):
            np.testing.assert_allclose(prefilled[name][row, :length], plain[name][row, :length], atol=2e-5)
            np.testing.assert_allclose(out[name][row], plain[name][row, length : length + 4], atol=2e-5)


def test_stopping_after_the_last_tapped_layer_gives_the_same_features_and_nothing_more():
    tokens = random_tokens((2, 9))
    out = target_run()(tokens, tap_layers=(1, 0), features_only=True)
    assert set(out) == {"features"}
    np.testing.assert_allclose(out["features"], target_run()(tokens, tap_layers=(1, 0))["features"], atol=1e-6)


def test_a_later_token_changes_no_earlier_logits():
    tokens = random_tokens((2, 9))
    changed = tokens.at[:, 6].add(1)
    before, after = (target_run()(ids, tap_layers=(1, 0))["logits"] for ids in (tokens, changed))
    assert (before[:, :6] == after[:, :6]).all()
    assert (before[:, 6] != after[:, 6]).any()
