"""RMSNorm, rotary positions, linear maps and the SwiGLU feed-forward of Qwen3."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from domino_jax.models import quantized, sharding
from domino_jax.models.shapes import Positions

# Qwen3 configs carry initializer_range 0.02; so linears start as normal(0, 0.02) and norms as ones.
INIT_STD = 0.02
DECODED_ROWS = 256  # rows of a pass that are few enough to come from decoding, where moving weights is all the cost
MATRIX_ROWS = 8  # of a TPU's smallest tile
Matrix = jax.Array | Mapping[str, jax.Array]  # floating, or in eight bits (quantized.py)


class Linear(nn.Module):
    """x [..., in] → [..., features] in `dtype`; kernel [in, features], optional bias.

    With `logits` the results are float32, the product's own sums: rounded to bfloat16, logits between 16 and 32 would
    be 0.125 apart, and different tokens would tie.

    In decoding the kernel may be in eight bits (quantized.py).

    The kernel is stored input-first (torch stores output-first). Measured on XLA:CPU, 24 layers × 128 wide: nine rows
    cost 3.1 ms with this layout and 3.9 ms with the other; one row costs the same.
    """

    features: int
    use_bias: bool = False
    dtype: Any = jnp.float32
    kernel_init: Callable = nn.initializers.normal(INIT_STD)
    kv_heads: int | None = None  # K where the map makes keys or values, for the layout over a mesh
    whole: bool = False  # on a mesh: used as it is stored, whole on every device
    logits: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), jnp.float32)
        kernel = in_use(kernel, None if self.whole else self.name, self.dtype, self.kv_heads)
        y = multiply(x.astype(self.dtype), kernel, self.logits)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32).astype(y.dtype)
        return y


class SplitLinear(nn.Module):
    """One kernel [sum of widths, features] over joined inputs, applied part by part: what does not depend on tokens can
    leave a loop."""

    widths: tuple[int, ...]
    features: int
    dtype: Any = jnp.float32
    use_bias: bool = False

    def setup(self):
        shape = (sum(self.widths), self.features)
        self.kernel = self.param("kernel", nn.initializers.normal(INIT_STD), shape)
        if self.use_bias:
            self.bias = self.param("bias", nn.initializers.zeros, (self.features,))

    def part(self, index: int, x: jax.Array, bias: bool = False) -> jax.Array:
        """The share of input `index`, x [..., widths[index]] → [..., features]."""
        product = multiply(x.astype(self.dtype), self._rows(in_use(self.kernel, self.name, self.dtype), index))
        return product + self.bias.astype(product.dtype) if bias else product

    def matrix(self, index: int) -> Matrix:
        """The rows of input `index`, fetched once for a loop, so that their gradient is summed once, in float32."""
        return self._rows(in_loop(self.kernel, self.name, self.dtype), index)

    def _rows(self, kernel: Matrix, index: int) -> Matrix:
        rows = slice(sum(self.widths[:index]), sum(self.widths[: index + 1]))
        return {**kernel, "q": kernel["q"][rows]} if quantized.is_quantized(kernel) else kernel[rows]


def in_use(kernel: Matrix, module: str | None, dtype: Any = None, kv_heads: int | None = None) -> Matrix:
    """A stored matrix as products use it: in `dtype`, unless it is in eight bits, and laid out by sharding.gather.

    module: its name; None for a matrix that is used as it is stored.
    """
    dtype = None if quantized.is_quantized(kernel) else dtype
    if module is None:
        return kernel if dtype is None else kernel.astype(dtype)
    return jax.tree.map(lambda leaf: sharding.gather(leaf, module, dtype, kv_heads), kernel)


def in_loop(kernel: Matrix, module: str, dtype: Any) -> Matrix:
    """As in_use for the turns of a loop, fetched once before it; a floating matrix keeps its type, so that its gradient
    is summed in float32."""
    if quantized.is_quantized(kernel):
        return in_use(kernel, module)
    return sharding.gather_for_loop(kernel, module, dtype)


def with_kernel_in_use(params: dict, module: str, dtype: Any) -> dict:
    """Parameters with one module's kernel as its products use it, so that many of them gather it once."""
    return params | {module: params[module] | {"kernel": in_use(params[module]["kernel"], module, dtype)}}


def multiply(x: jax.Array, kernel: Matrix, logits: bool = False, once: bool = False) -> jax.Array:
    """x [..., in] times a matrix → [..., out] in x's type, or in float32 with `logits`. once: of quantized.product."""
    if quantized.is_quantized(kernel):
        y = with_rows(functools.partial(quantized.product, once=once), x, kernel)
        return y if logits else y.astype(x.dtype)
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32 if logits else None)
    return with_rows(product, x, kernel.astype(x.dtype))


def with_rows(product: Callable, x: jax.Array, matrix: Matrix) -> jax.Array:
    """product(x [..., in], matrix) → [..., out], on an accelerator with at least MATRIX_ROWS rows, the added ones zero.

    XLA makes a product of one row into an elementwise product and a sum. That leaves a TPU's matrix unit idle (its
    compiler counts 2.1 times the cycles for a step of Qwen3-8B), and on a GPU writes all [in, out] elementwise products
    to memory where `out` is small (keys and values).
    """
    rows = math.prod(x.shape[:-1])
    if rows >= MATRIX_ROWS:
        return product(x, matrix)

    def padded(x, matrix):
        y = product(jnp.pad(x.reshape(rows, x.shape[-1]), ((0, MATRIX_ROWS - rows), (0, 0))), matrix)
        return y[:rows].reshape(*x.shape[:-1], y.shape[-1])

    return jax.lax.platform_dependent(x, matrix, cpu=product, default=padded)


def apart_on_gpus(x: jax.Array) -> jax.Array:
    """x, of which the compiler for GPUs does not know that it is x, so that it joins no products of the two.

    Two such copies of the same x count as one.
    """
    return jax.lax.platform_dependent(x, cuda=jax.lax.optimization_barrier, default=lambda x: x)


class RMSNorm(nn.Module):
    """w · x / sqrt(mean x² + eps) over the last axis, computed in float32, no "+1" on the weight."""

    eps: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        x = x.astype(jnp.float32)
        normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (scale.astype(jnp.float32) * normed).astype(self.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)): [..., D] → [..., D] through F hidden units."""

    width: int
    hidden: int
    dtype: Any = jnp.float32

    def setup(self):
        self.gate_proj = Linear(self.hidden, dtype=self.dtype)
        self.up_proj = Linear(self.hidden, dtype=self.dtype)
        self.down_proj = Linear(self.width, dtype=self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self._gate_up(x)
        return self.down_proj(jax.nn.silu(gate) * up)

    def _gate_up(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        many = self.is_initializing() or math.prod(x.shape[:-1]) > DECODED_ROWS or sharding.on_mesh()
        kernels = [] if many else [m.variables["params"]["kernel"] for m in (self.gate_proj, self.up_proj)]
        if many or not quantized.joinable(kernels):
            return self.gate_proj(x), self.up_proj(x)
        forms = {"cuda": one_product, "default": lambda x, *kernels: tuple(multiply(x, each) for each in kernels)}
        return jax.lax.platform_dependent(x.astype(self.dtype), *kernels, **forms)


def one_product(x: jax.Array, *kernels: Matrix) -> tuple[jax.Array, ...]:
    """x [..., in] times each matrix, in one kernel: the compiler for GPUs reads the joined matrix from its parts."""
    kernel = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *kernels)
    return tuple(jnp.split(multiply(x, kernel, once=True), len(kernels), axis=-1))


def rotary_angles(positions: Positions, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos | cos and -sin | sin, float32 [B, 1, T, H], of position · theta^(-2i/H).

    Always float32: in bfloat16 position 257 would round to 256. The compiler for GPUs would compute them again in each
    layer, and takes twice as long to decide about fusions there; the fence costs one kernel a pass.
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions.astype(jnp.float32)[:, None, :, None] / jnp.power(jnp.float32(theta), exponent)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return tuple(jnp.split(apart_on_gpus(jnp.concatenate([cos, cos, -sin, sin], axis=-1)), 2, axis=-1))


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Half-rotation RoPE of x [B, heads, T, H]: pairs are (i, i + H/2). Computed in float32, returned in x's dtype."""
    cos, sin = angles
    x32 = x.astype(jnp.float32)
    swapped = jnp.roll(x32, x.shape[-1] // 2, axis=-1)
    # Two products over the whole width, not two over each half: for nine rows XLA:CPU's kernel of those takes 6 µs.
    return (x32 * cos + swapped * sin).astype(x.dtype)
