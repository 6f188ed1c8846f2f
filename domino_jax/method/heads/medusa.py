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

from domino_jax.method.config_keys import integer, lacks
from domino_jax.method.kind import Kind
from domino_jax.method.losses import Labels, Outputs, Parts, Sums, accepted_lengths, cross_entropy
from domino_jax.method.pair import Models, TargetRows
from domino_jax.method.row_losses import SLICE_LOGITS, RowObjective, RowSettings, numbered, shifted
from domino_jax.models.decoder_config import LIMITS, SILU, read_switch, refuse_values
from domino_jax.models.layers import Linear
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.models.shapes import Hidden
from domino_jax.models.sharding import constrain
from domino_jax.models.tables import LM_HEAD, Entry
from domino_jax.runtime.errors import DataError, quote
from domino_jax.runtime.keys import Key

MEDUSA, ARCHITECTURE = "medusa", "MedusaModel"
LARGEST_HEADS = 1_024  # far above any public drafter: more are refused before anything is allocated
# Keys that vLLM acts on, and the values with which the heads are those of this file.
_VARIANTS = {"hidden_act": SILU, "original_lm_head": (True,)}
_INTEGERS = ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers")


@dataclasses.dataclass(frozen=True)
class MedusaConfig(Kind):
    """The heads of one target.

    num_heads: K, tokens drafted per round.  num_hidden_layers: residual blocks of a head.  bias: of these blocks.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_hidden_layers: int = 1
    bias: bool = False
    draft_token_bytes: bytes = dataclasses.field(default=b"", repr=False)

    head, title, paper = MEDUSA, "Medusa", " (arXiv 2401.10774)"
    sglang = vllm = ""
    tensor_names = {"heads.": "blocks."}
    # Copies of the target's lm_head, under the names of vLLM and of FasterDecoding.
    copies = {"lm_head.weight": LM_HEAD, "lm_heads.0.weight": LM_HEAD}
    target_layer_ids = ()  # it reads the last hidden state alone
    num_key_value_heads = 0  # and keeps no cache of keys and values
    max_position_embeddings = LIMITS["max_position_embeddings"]  # nor does it know positions

    recipe_keys = {
        "num_heads": Key(5, least=1, most=LARGEST_HEADS, shape=True),  # tokens drafted per round
    }

    @property
    def num_drafts(self) -> int:
        return self.num_heads

    @property
    def block_size(self) -> int:
        """Rows of the pass that verifies a whole draft, the anchor's included."""
        return self.num_heads + 1

    @classmethod
    def matches(cls, raw: dict[str, Any], tensors: Collection[str]) -> bool:
        """True for the keys of Medusa heads."""
        stated = "Medusa" in str(raw.get("architectures")) or raw.get("model_type") == MEDUSA
        return stated or "medusa_num_heads" in raw

    @classmethod
    def from_dict(cls, raw: dict[str, Any], target: Qwen3Config | None = None) -> "MedusaConfig":
        """Reads a parsed config.json in the layout of vLLM and speculators, or with a target in that of FasterDecoding,
        which names no widths and always has biases; raises DataError naming a wrong key."""
        if target and "medusa_num_heads" in raw:
            layers = raw.get("medusa_num_layers", 1)
            sizes = (target.hidden_size, target.vocab_size, raw["medusa_num_heads"], layers)
            # Heads with separate matrices have tensors that the table does not name.
            raw = dict(zip(_INTEGERS, sizes, strict=True)) | {"medusa_fc_bias": True, "original_lm_head": True}
        refuse_values(raw, _VARIANTS)
        missing = [name for name in (*_INTEGERS, "original_lm_head") if raw.get(name) is None]
        if missing:
            raise lacks(MEDUSA, *missing)
        limits = LIMITS | {"num_heads": LARGEST_HEADS}
        sizes = [integer(name, raw[name], 1, limits[name]) for name in _INTEGERS]
        truncated = raw.get("truncated_vocab_size")
        if truncated not in (None, raw["vocab_size"]):
            raise DataError(
                f"the drafter's config.json has truncated_vocab_size {quote(truncated)} and vocab_size"
                f" {raw['vocab_size']}; only heads over the target's whole vocabulary are supported."
            )
        return cls(*sizes, bias=read_switch(raw, "medusa_fc_bias"))

    @classmethod
    def for_target(
        cls, target: Qwen3Config, *, num_heads: int, num_layers: int = 1, bias: bool = False
    ) -> "MedusaConfig":
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

    def module(self, dtype: Any, remat: bool = False) -> "Medusa":
        """The drafter; no layer of it is computed again."""
        return Medusa(self, dtype)

    def aliases(self, table: list[Entry]) -> dict[str, str]:
        """FasterDecoding's names."""
        names = {entry.name.removeprefix("blocks.").replace(".layers.", "."): entry.name for entry in table}
        return {".linear.".join(name.rsplit(".", 1)): entry for name, entry in names.items()}

    @classmethod
    def for_recipe(cls, recipe: Any, target: Qwen3Config, shared: dict[str, Any]) -> "MedusaConfig":
        return cls.for_target(target, **recipe.drafter.medusa)

    @classmethod
    def loss_settings(cls, recipe: Any, shared: dict[str, Any]) -> "MedusaSettings":
        return MedusaSettings()

    def sglang_refusal(self) -> str | None:
        return "SGLang has no Medusa heads"

    def vllm_refusal(self) -> str | None:
        return "its last release with Medusa heads is 0.32, which reads a copy of the target's lm_head from the folder"


class ResidualBlock(Linear):
    """x + SiLU(A x + b)."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.silu(super().__call__(x))


class Medusa(nn.Module):
    """All heads. With A and b zero each of them is the target's own next-token head."""

    config: MedusaConfig
    dtype: Any = jnp.float32

    def setup(self):
        c, zeros = self.config, nn.initializers.zeros

        def block() -> ResidualBlock:
            return ResidualBlock(c.hidden_size, c.bias, self.dtype, kernel_init=zeros)

        self.heads = [nn.Sequential([block() for _ in range(c.num_hidden_layers)]) for _ in range(c.num_heads)]

    def __call__(self, hidden: Hidden) -> jax.Array:
        """The target's last hidden states [..., D] → the heads' states [..., K, D], to be put through its lm_head."""
        return jnp.stack([head(hidden.astype(self.dtype)) for head in self.heads], axis=-2)

    def example(self) -> tuple:
        """What `init` traces."""
        return (jnp.zeros((1, 1, self.config.hidden_size)),)

    def init_cache(self, batch: int, slots: int) -> tuple[jax.Array]:
        """What a round needs of those before it: the target's last hidden state before the anchor, [B, D]."""
        return (jnp.zeros((batch, self.config.hidden_size), self.dtype),)

    def extend_context(self, cache: tuple[jax.Array], text: TargetRows, slots: jax.Array) -> tuple[jax.Array]:
        return (text.last(text.hidden.astype(self.dtype), cache[0]),)

    def draft_hidden(self, cache: tuple[jax.Array]) -> Hidden:
        """[B, K, D], the states whose logits are the drafts'."""
        return constrain(self(cache[0]), "batch")


# ----------------------------------------------------------------------------------------------------------------- loss


@dataclasses.dataclass(frozen=True)
class MedusaSettings(RowSettings):
    """decay: head i counts decay^i (speculators: 0.8; FasterDecoding's trainer: 1)."""

    decay: float = 0.8

    def labels(self, config: MedusaConfig, batch: dict[str, jax.Array]) -> Labels:
        """Arrays [B, S, K]: head i at row t is labelled by the token at t+2+i, if it is in the same document."""
        tokens, places = batch["tokens"], range(2, 2 + config.num_heads)
        documents = batch["documents"] if "documents" in batch else jnp.ones_like(tokens)
        counts = (batch["loss_mask"] > 0.5) & (documents > 0)

        def weight(place: int) -> jax.Array:
            return (shifted(counts, -place) & (shifted(documents, -place) == documents)).astype(jnp.float32)

        weights = jnp.stack([weight(place) for place in places], axis=2)
        return Labels(jnp.stack([shifted(tokens, -place) for place in places], axis=2), weights, weights)

    def objective(self, config: MedusaConfig, labels: Labels) -> "MedusaObjective":
        decay = self.decay ** jnp.arange(config.num_heads, dtype=jnp.float32)
        scale = decay / jnp.maximum(labels.label_weights.sum((0, 1)), 1.0)
        return MedusaObjective(self, scale, max(SLICE_LOGITS // config.num_heads, 1))


class MedusaObjective(RowObjective):
    """Per head the mean cross-entropy over its labels; heads added up with their weights."""

    def parts(self, models: Models, unembed: Any, features: None, batch: dict, hidden: Hidden) -> Parts:
        z = models.drafter.apply({"params": models.drafter_params}, hidden)
        return Parts(lambda _, z, states: Outputs(unembed(z), None), {}, (z,))

    def block_sums(self, outputs: Outputs, labels: Labels) -> Sums:
        weights = labels.label_weights
        correct = jnp.argmax(outputs.base, axis=-1) == labels.ids
        has_label = weights.max(-1) > 0
        return {
            "losses": (weights * cross_entropy(outputs.base, labels.ids)).sum(0),
            "correct": (weights * correct).sum(0),
            "labels": weights.sum(0),
            "rows": has_label.sum().astype(jnp.float32),
            "accepted": jnp.sum(accepted_lengths(correct, weights) * has_label),
        }

    def metrics(self, sums: Sums) -> dict[str, jax.Array]:
        """The metrics of the step: "loss", "accuracy" over all labels, "accept_len" as of blocks (losses.py), and for
        each head "loss_1", … (its mean) and "accuracy_1", …."""
        counts = jnp.maximum(sums["labels"], 1.0)
        return {
            "loss": self.loss(sums),
            "accuracy": sums["correct"].sum() / jnp.maximum(sums["labels"].sum(), 1.0),
            "accept_len": sums["accepted"] / jnp.maximum(sums["rows"], 1.0),
            **numbered("loss", sums["losses"] / counts),
            **numbered("accuracy", sums["correct"] / counts),
        }
