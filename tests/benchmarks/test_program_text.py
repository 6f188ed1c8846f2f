"""program_text.py: what counts as moved and as launched, on programs of a few lines and on a real one."""

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks.compilers.program_text import array_bytes, launches, traffic

FETCHED = """
ENTRY %main {
  %w = bf16[64,32]{1,0} parameter(0)
  %x = bf16[8,64]{1,0} parameter(1)
  %fetched = (bf16[64,32]{1,0:T(8,128)S(1)}, bf16[64,32]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %there = bf16[64,32]{1,0:T(8,128)S(1)} copy-done(%fetched)
  ROOT %y = bf16[8,32]{1,0} convolution(%x, %there), dim_labels=bf_io->bf
}
"""
PART = """
ENTRY %main {
  %w = bf16[64,32]{1,0} parameter(0)
  %part = ((bf16[64,32]{1,0:T(8,128)}), bf16[16,32]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:16]}
}
"""
GATHER = """
%rows (p0: bf16[1000,16], p1: s32[2]) -> bf16[2,16] {
  %p0 = bf16[1000,16]{1,0} parameter(0)
  %p1 = s32[2]{0} parameter(1)
  ROOT %taken = bf16[2,16]{1,0} gather(%p0, %p1), offset_dims={1}
}
ENTRY %main {
  %table = bf16[1000,16]{1,0} parameter(0)
  %ids = s32[2]{0} parameter(1)
  ROOT %out = bf16[2,16]{1,0} fusion(%table, %ids), kind=kCustom, calls=%rows
}
"""
UPDATE = """
ENTRY %main {
  %cache = bf16[1,2,4096,128]{3,2,1,0} parameter(0)
  %new = bf16[1,2,17,128]{3,2,1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %out = bf16[1,2,4096,128]{3,2,1,0} dynamic-update-slice(%cache, %new, %at, %at, %at, %at)
}
"""
LOOP = """
%body (p: (s32[], f32[10])) -> (s32[], f32[10]) {
  %p = (s32[], f32[10]{0}) parameter(0)
  %x = f32[10]{0} get-tuple-element(%p), index=1
  %i = s32[] get-tuple-element(%p), index=0
  %y = f32[10]{0} negate(%x)
  ROOT %t = (s32[], f32[10]{0}) tuple(%i, %y)
}
%condition (p: (s32[], f32[10])) -> pred[] {
  %p = (s32[], f32[10]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %c = s32[]{:T(128)} constant(7)
  ROOT %less = pred[] compare(%i, %c), direction=LT
}
ENTRY %main {
  %start = (s32[], f32[10]{0}) parameter(0)
  ROOT %w = (s32[], f32[10]{0}) while(%start), condition=%condition, body=%body
}
"""
COUNTS = {
    "a weight fetched into vector memory counts once": (FETCHED, 2 * 64 * 32 + 2 * 8 * 64 + 2 * 8 * 32),
    "a part fetched ahead counts as that part": (PART, 2 * 16 * 32),
    "of a table the gathered rows count": (GATHER, 4 * 2 + 2 * 16 * 2 + 2 * 16 * 2),
    "of an update in place the update counts, read and written": (UPDATE, 2 * (2 * 2 * 17 * 128)),
    "a loop counts as often as its condition lets it run": (LOOP, 7 * 2 * 40),
}


@pytest.mark.parametrize(("text", "moved"), COUNTS.values(), ids=COUNTS.keys())
def test_what_counts_as_moved(text, moved):
    assert traffic(text) == moved


def test_what_a_cache_keeps_is_left_out_but_no_argument_result_or_update():
    """x 512 B and 2,048 B of weights read, a sum of 1,024 B written and read, the result of 1,024 B written."""
    text = """
ENTRY %main {
  %x = f32[8,16]{1,0} parameter(0)
  %w = f32[16,32]{1,0} parameter(1)
  %y = f32[8,32]{1,0} dot(%x, %w)
  ROOT %z = f32[8,32]{1,0} negate(%y)
}
"""
    whole = 512 + 2048 + 3 * 1024
    assert [traffic(text, cache=size) for size in (0, 1023, 1024)] == [whole, whole, whole - 2 * 1024]
    read_after = UPDATE.replace("ROOT %out", "%out").replace("%at)\n}", "%at)\n  ROOT %sum = f32[] reduce(%out)\n}")
    assert traffic(read_after, cache=2**30) == traffic(read_after)


def test_the_text_of_a_real_program_is_read():
    """On the CPU: a product reads both sides and writes its result."""
    x, w = jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((128, 256), jnp.float32)
    text = jax.jit(lambda x, w: x @ w).lower(x, w).compile().as_text()
    assert traffic(text) == 4 * (64 * 128 + 128 * 256 + 64 * 256)


SIZES = {
    **{kind: 0.5 for kind in ("int4", "uint4", "float4_e2m1fn")},
    **{kind: 1 for kind in ("bool", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e8m0fnu")},
    **{kind: 2 for kind in ("bfloat16", "float16", "uint16")},
    **{"int2": 0.25, "int32": 4, "complex64": 8},
}


@pytest.mark.parametrize(("kind", "size"), SIZES.items(), ids=SIZES.keys())
def test_numbers_of_every_kind_count_as_the_compiler_stores_them(kind, size):
    """Turned around, 63 numbers are read and written once; half a byte more is a whole one."""
    x = jax.ShapeDtypeStruct((63,), jnp.dtype(kind))
    compiled = jax.jit(lambda x: jnp.flip(x)).lower(x).compile()
    assert traffic(compiled.as_text()) == 2 * math.ceil(63 * size)


def test_a_token_holds_no_bytes():
    assert [array_bytes(kind, "") for kind in ("token", "opaque", "u32")] == [0, 0, 4]


def test_launches_of_one_turn_with_a_loop_inside():
    text = """
001: kCopy  [source]
002: kWhile [sink]
condition:
    003: kCustomKernel [source] outside a buffer
  body:
    000: kCommandBuffer [source]
        004: kCopy [source]
        005: kCustomKernel [sink]
    006: kWhile [prev=000]
condition:
        007: kCustomKernel [source]
      body:
        000: kCommandBuffer [source]
            008: kCustomKernel [source]
"""
    expected = {"kernels": 1 + 1 + 20, "copies": 1, "in_buffers": 2 + 10, "starts": 22}
    assert launches(text, trips=10) == expected
