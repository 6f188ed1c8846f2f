"""Medusa-1 (arXiv 2401.10774): heads on the target's last hidden state, with the target's own lm_head, frozen.

A head is a few residual blocks. Head i predicts the token i + 2 places after the row whose state it reads: the token
right after the row is the target's own choice. All drafts of a round come from the state before the anchor, so they do
not depend on the anchor or on each other.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from domino_jax.method.names import LARGEST_HEADS, MEDUSA
from domino_jax.method.passed import Passed
from domino_jax.models.decoder_config import LIMITS, SILU, read_switch, refuse_values
from domino_jax.models.layers import Linear
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.models.shapes import Hidden
from domino_jax.models.sharding import constrain
from domino_jax.runtime.errors import DataError, quote

ARCHITECTURE = "MedusaModel"
# Keys that vLLM acts on, and the values with which the heads are those of this file.
_VARIANTS = {"hidden_act": SILU, "original_lm_head": (True,)}
_FIRST_TENSOR, _FIRST_OF_FASTER_DECODING = "blocks.0.layers.0.weight", "0.0.linear.weight"
_INTEGERS = ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers")


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """The heads of one target.

    num_heads: K, tokens drafted per round.  num_hidden_layers: residual blocks of a head.  bias: of these blocks.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_hidden_layers: int = 1
    bias: bool = False

    head = MEDUSA
    has_backbone = False
    has_head = False  # no correction of base logits
    target_layer_ids = ()  # it reads the last hidden state alone
    num_key_value_heads = 0  # and keeps no cache of keys and values
    max_position_embeddings = LIMITS["max_position_embeddings"]  # nor does it know positions

    @property
    def num_drafts(self) -> int:
        return self.num_heads

    @property
    def most_drafts(self) -> int:
        return self.num_heads

    @property
    def block_size(self) -> int:
        """Rows of the pass that verifies a whole draft, the anchor's included."""
        return self.num_heads + 1

    @staticmethod
    def matches(raw: dict[str, Any], tensors: Collection[str]) -> bool:
        """True for the keys, or the tensors, of Medusa heads."""
        stated = "Medusa" in str(raw.get("architectures")) or raw.get("model_type") == MEDUSA
        return stated or "medusa_num_heads" in raw or not {_FIRST_TENSOR, _FIRST_OF_FASTER_DECODING}.isdisjoint(tensors)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "MedusaConfig":
        """Reads a parsed config.json in the layout of vLLM and speculators; raises DataError naming a wrong key."""
        refuse_values(raw, _VARIANTS)
        missing = [name for name in (*_INTEGERS, "original_lm_head") if raw.get(name) is None]
        if missing:
            raise DataError(
                f"the drafter's config.json ({MEDUSA}) lacks {', '.join(missing)}; these are never guessed: add the"
                " values it was trained with."
            )
        for name in _INTEGERS:
            limit = LARGEST_HEADS if name == "num_heads" else LIMITS[name]
            if type(raw[name]) is not int or not 0 < raw[name] <= limit:
                raise DataError(
                    f"the drafter's config.json has {name} = {quote(raw[name])}; expected an integer from 1 to {limit}."
                )
        truncated = raw.get("truncated_vocab_size")
        if truncated not in (None, raw["vocab_size"]):
            raise DataError(
                f"the drafter's config.json has truncated_vocab_size {quote(truncated)} and vocab_size"
                f" {raw['vocab_size']}; only heads over the target's whole vocabulary are supported."
            )
        return cls(*(raw[name] for name in _INTEGERS), bias=read_switch(raw, "medusa_fc_bias"))

    @classmethod
    def for_target(cls, target: Qwen3Config, *, num_heads: int, num_layers: int, bias: bool) -> "MedusaConfig":
        """New heads for a target."""
        return cls(target.hidden_size, target.vocab_size, num_heads, num_layers, bias)

    def to_dict(self) -> dict[str, Any]:
        """The public config.json."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": MEDUSA,
            **{name: getattr(self, name) for name in _INTEGERS},
            "truncated_vocab_size": self.vocab_size,
            "medusa_fc_bias": self.bias,
            "original_lm_head": True,
            "dtype": "bfloat16",
        }


class ResidualBlock(nn.Module):
    """x + SiLU(A x + b), A and b starting as zeros."""

    config: MedusaConfig
    dtype: Any = jnp.float32

    def setup(self):
        c = self.config
        self.linear = Linear(c.hidden_size, c.bias, self.dtype, kernel_init=nn.initializers.zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.silu(self.linear(x))


class MedusaHead(nn.Module):
    """The residual blocks of one head; each has its own weights."""

    config: MedusaConfig
    dtype: Any = jnp.float32

    def setup(self):
        self.layers = [ResidualBlock(self.config, self.dtype) for _ in range(self.config.num_hidden_layers)]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


class Medusa(nn.Module):
    """All heads. With A and b zero each of them is the target's own next-token head."""

    config: MedusaConfig
    dtype: Any = jnp.float32

    def setup(self):
        self.heads = [MedusaHead(self.config, self.dtype) for _ in range(self.config.num_heads)]

    def __call__(self, hidden: Hidden) -> jax.Array:
        """The target's last hidden states [..., D] → the heads' states [..., K, D], to be put through its lm_head."""
        return jnp.stack([head(hidden.astype(self.dtype)) for head in self.heads], axis=-2)

    def example(self) -> tuple:
        """What `init` traces."""
        return (jnp.zeros((1, 1, self.config.hidden_size)),)

    def init_cache(self, batch: int, slots: int) -> tuple[jax.Array]:
        """What a round needs of those before it: the target's last hidden state before the anchor, [B, D]."""
        return (jnp.zeros((batch, self.config.hidden_size), self.dtype),)

    def extend_context(self, cache: tuple[jax.Array], passed: Passed, slots: jax.Array) -> tuple[jax.Array]:
        return (passed.last(passed.hidden.astype(self.dtype), cache[0]),)

    def draft_hidden(self, cache: tuple[jax.Array]) -> Hidden:
        """[B, K, D], the states whose logits are the drafts'."""
        return constrain(self(cache[0]), "batch")
