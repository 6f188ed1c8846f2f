"""The sparse feed-forward of Qwen3 MoE: a router sends each row to k of E experts, each a SwiGLU.

The product has one form per kind of device, because what reads only the experts in use on one of them copies all of
them on another (docs/compilers.md). Every form takes

    x        [T, D]  rows in the compute type
    experts  int32 [T, k]  the experts of each row; E means none
    weights  float32 [T, k]  what each expert's output counts, 0 for none
    matrices {"gate_proj", "up_proj": [E, D, F], "down_proj": [E, F, D]}, floating or in eight bits (quantized.py)

and returns the weighted sum of the outputs, float32 [T, D].
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from domino_jax.models import gpu_experts, quantized, sharding
from domino_jax.models.decoder_config import check_size, expect, read_switch
from domino_jax.models.layers import INIT_STD, Linear, Matrix, multiply
from domino_jax.models.long_attention import REFUSED
from domino_jax.runtime.errors import ConfigError

Matrices = Mapping[str, Matrix]
LIMIT = 65_536  # of all sizes; far above any public model
ROUTER = "gate"  # never in eight bits: its float32 choices are part of the model's text


@dataclasses.dataclass(frozen=True)
class ExpertConfig:
    """The experts of a target; fields are named as in config.json.

    num_experts: E.  num_experts_per_tok: k.  moe_intermediate_size: F of an expert.
    norm_topk_prob: the weights of a row's k experts sum to 1.
    decoder_sparse_step, mlp_only_layers: which layers have a dense feed-forward instead.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def in_layer(self, index: int) -> bool:
        return index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0

    def active(self, rows: int) -> float:
        """Experts that `rows` rows use, expected, if each row chose k of E at random: E · (1 - (1 - k/E)^rows)."""
        return self.num_experts * (1 - (1 - self.num_experts_per_tok / self.num_experts) ** rows)


def read_expert_config(raw: Mapping[str, Any]) -> ExpertConfig:
    """The experts of a parsed config.json of the type qwen3_moe; a DataError names what is missing or wrong."""
    counts = {name: raw[name] for name in ("num_experts", "num_local_experts") if raw.get(name) is not None}
    if len(set(map(str, counts.values()))) > 1:
        raise ConfigError(f"has {counts}; the number of experts is one or the other.")
    sizes = {"num_experts": next(iter(counts.values()), None)}
    sizes |= {name: raw.get(name) for name in ("num_experts_per_tok", "moe_intermediate_size")}
    sizes["decoder_sparse_step"] = 1 if raw.get("decoder_sparse_step") is None else raw["decoder_sparse_step"]
    if missing := [name for name, value in sizes.items() if value is None]:
        raise ConfigError(f"says qwen3_moe but lacks {', '.join(missing)}; these are never guessed.")
    for name, value in sizes.items():
        check_size(name, value, LIMIT)
    check_size("num_experts_per_tok", sizes["num_experts_per_tok"], sizes["num_experts"])
    dense, layers = raw.get("mlp_only_layers"), raw["num_hidden_layers"]
    dense = [] if dense is None else dense
    right = isinstance(dense, list) and all(type(index) is int and 0 <= index < layers for index in dense)
    expect(right, "mlp_only_layers", dense, f"a list of layers from 0 to {layers - 1}")
    return ExpertConfig(**sizes, norm_topk_prob=read_switch(raw, "norm_topk_prob"), mlp_only_layers=tuple(dense))


class ExpertMatrices(nn.Module):
    """The matrices of one kind of all experts, [E, inputs, outputs], in `dtype` unless they are in eight bits."""

    shape: tuple[int, int, int]
    dtype: Any

    @nn.compact
    def __call__(self) -> Matrix:
        kernel = self.param("kernel", nn.initializers.normal(INIT_STD), self.shape, jnp.float32)
        return kernel if quantized.is_quantized(kernel) else kernel.astype(self.dtype)


class Experts(nn.Module):
    config: ExpertConfig
    width: int
    dtype: Any

    @nn.compact
    def __call__(self) -> Matrices:
        count, hidden = self.config.num_experts, self.config.moe_intermediate_size
        inward, outward = (count, self.width, hidden), (count, hidden, self.width)
        shapes = {"gate_proj": inward, "up_proj": inward, "down_proj": outward}
        return {name: ExpertMatrices(shape, self.dtype, name=name)() for name, shape in shapes.items()}


class SparseFeedForward(nn.Module):
    """[..., D] → [..., D] by k of E experts for each row (Qwen3 technical report, arXiv 2505.09388, section 2)."""

    config: ExpertConfig
    width: int
    dtype: Any = jnp.float32

    def setup(self):
        self.gate = Linear(self.config.num_experts, dtype=self.dtype, logits=True)
        self.experts = Experts(self.config, self.width, self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(self.dtype)
        weights, experts = route(self.gate(x), self.config)
        return over_mesh(x, experts, weights, self.experts()).astype(self.dtype)


def route(logits: jax.Array, config: ExpertConfig) -> tuple[jax.Array, jax.Array]:
    """float32 logits [..., E] → weights float32 and experts int32, [..., k]; ties go to the earlier expert."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), config.num_experts_per_tok)
    if config.norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights, experts


# ---------------------------------------------------------------------------------------------- mesh and device


def over_mesh(x: jax.Array, experts: jax.Array, weights: jax.Array, matrices: Matrices) -> jax.Array:
    """The product for x [B, T, D], experts and weights [B, T, k]. On a mesh every device computes the outputs of its
    share of the experts for its rows, and they are summed over the tensor axis."""
    if not sharding.on_mesh():
        return _by_device(x, experts, weights, matrices)
    sharding.check_experts(jax.sharding.get_abstract_mesh(), jax.tree.leaves(matrices)[0].shape[0])

    def local(x, experts, weights, matrices):
        count = jax.tree.leaves(matrices)[0].shape[0]
        experts = experts - jax.lax.axis_index("tensor") * count
        here = (experts >= 0) & (experts < count)
        out = _by_device(x, jnp.where(here, experts, count), jnp.where(here, weights, 0.0), matrices)
        return jax.lax.psum(out, "tensor")

    rows = sharding.layout(x, "batch")
    places = (rows, rows, rows, PartitionSpec("tensor"))
    return jax.shard_map(local, in_specs=places, out_specs=rows, check_vma=False)(x, experts, weights, matrices)


def _by_device(x: jax.Array, experts: jax.Array, weights: jax.Array, matrices: Matrices) -> jax.Array:
    """The product of rows [..., D] by the form for the device that runs it."""
    rows = x.reshape(-1, x.shape[-1])
    experts, weights = (leaf.reshape(len(rows), -1) for leaf in (experts, weights))
    in_eight_bits = quantized.is_quantized(matrices["up_proj"])
    forms: dict[str, Callable] = {"cpu": dense, "default": grouped}
    if in_eight_bits and len(rows) <= quantized.FEW_ROWS:
        forms["default"] = one_after_another
    if f"experts in {jax.tree.leaves(matrices)[0].dtype}" not in REFUSED and gpu_experts.applies(rows, matrices):
        forms["cuda"] = functools.partial(gpu_experts.by_kernel, interpret=False)
    if len(rows) == 1 and not in_eight_bits:
        forms["cuda"] = take_experts
    return jax.lax.platform_dependent(rows, experts, weights, matrices, **forms).reshape(x.shape)


# ------------------------------------------------------------------------------------------------------- forms


def dense(x: jax.Array, experts: jax.Array, weights: jax.Array, matrices: Matrices) -> jax.Array:
    """Every expert for every row: the plain form, for CPUs."""
    gate, up, down = _floating(x, matrices)
    hidden = _swiglu(*(_sums("td,edf->tef", x, each) for each in (gate, up)))
    hidden = hidden * _weights_by_expert(experts, weights, len(gate))[:, :, None]
    return _sums("tef,efd->td", hidden.astype(x.dtype), down)


def grouped(x: jax.Array, experts: jax.Array, weights: jax.Array, matrices: Matrices) -> jax.Array:
    """Rows sorted by expert, and one ragged product per matrix: on TPUs it reads the experts in use alone."""
    gate, up, down = _floating(x, matrices)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.zeros(len(gate), jnp.int32).at[flat].add(1, mode="drop")
    product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes, preferred_element_type=jnp.float32)
    rows = x[order // experts.shape[1]]
    hidden = _swiglu(product(rows, gate), product(rows, up)) * weights.reshape(-1)[order][:, None]
    out = product(hidden.astype(x.dtype), down)[jnp.argsort(order)]
    # Rows of no expert are after the last group, where the product is not defined.
    return jnp.where((experts < len(gate))[:, :, None], out.reshape(*experts.shape, -1), 0).sum(axis=1)


def take_experts(x: jax.Array, experts: jax.Array, weights: jax.Array, matrices: Matrices) -> jax.Array:
    """One row on a GPU: the matrices of its experts, and products with the expert as the first axis of a batch.

    The compiler reads each expert once for that; for several rows it copies the gathered matrices.
    """
    gate, up, down = (jnp.take(each, experts[0], axis=0, mode="clip") for each in _floating(x, matrices))
    rows = jnp.broadcast_to(x, (len(gate), *x.shape))
    hidden = _swiglu(*(_sums("ktd,kdf->ktf", rows, each) for each in (gate, up))) * weights[0][:, None, None]
    return _sums("ktf,kfd->ktd", hidden.astype(x.dtype), down).sum(axis=0)


def one_after_another(x: jax.Array, experts: jax.Array, weights: jax.Array, matrices: Matrices) -> jax.Array:
    """A loop over the experts in use, each for all rows: reads them in eight bits, once. For few rows on a TPU."""
    count = jax.tree.leaves(matrices)[0].shape[0]
    table = _weights_by_expert(experts, weights, count)
    used = jnp.zeros(count, bool).at[experts].set(True, mode="drop")
    order = jnp.argsort(~used, stable=True)

    def add(turn, out):
        expert = order[turn]
        take = functools.partial(jax.lax.dynamic_index_in_dim, index=expert, keepdims=False)
        gate, up, down = (jax.tree.map(take, matrices[name]) for name in ("gate_proj", "up_proj", "down_proj"))
        hidden = _swiglu(multiply(x, gate, logits=True), multiply(x, up, logits=True))
        hidden = hidden * jax.lax.dynamic_index_in_dim(table, expert, axis=1)
        return out + multiply(hidden.astype(x.dtype), down, logits=True)

    return jax.lax.fori_loop(0, used.sum(), add, jnp.zeros(x.shape, jnp.float32))


def _floating(x: jax.Array, matrices: Matrices) -> list[jax.Array]:
    """gate, up and down in x's type."""
    parts = (matrices[name] for name in ("gate_proj", "up_proj", "down_proj"))
    return [(quantized.dequantized(part) if quantized.is_quantized(part) else part).astype(x.dtype) for part in parts]


def _sums(formula: str, x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum(formula, x, matrix, preferred_element_type=jnp.float32)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _weights_by_expert(experts: jax.Array, weights: jax.Array, count: int) -> jax.Array:
    """float32 [T, E]."""
    rows = jnp.arange(len(experts))[:, None]
    return jnp.zeros((len(experts), count), jnp.float32).at[rows, experts].add(weights, mode="drop")
