"""Decoder of the Qwen3 type: tokens, positions, mask, cache → logits, tapped features, the cache with new rows.

A Llama-type target is the same decoder without the norms on queries and keys, and Qwen3 MoE the same with sparse
feed-forwards (moe.py).
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from domino_jax.models.cache import Cache, init_cache
from domino_jax.models.decoder_config import (
    DecoderConfig,
    expect,
    read_decoder_fields,
    read_switch,
    refuse_unsupported,
)
from domino_jax.models.decoder_layer import DecoderLayer, cache_attention, run_layer, token_attention
from domino_jax.models.layers import INIT_STD, Linear, RMSNorm, in_use, rotary_angles, with_kernel_in_use, with_rows
from domino_jax.models.moe import ExpertConfig, read_expert_config
from domino_jax.models.shapes import Hidden, Logits, Mask, Positions, Tokens
from domino_jax.models.sharding import constrain_rows
from domino_jax.runtime.errors import ConfigError, quote

MODEL_TYPES = ("qwen3", "qwen3_moe", "llama")


@dataclasses.dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """Shapes and constants of one target, as `config.json` gives them; its model_type decides qk_norm."""

    tie_word_embeddings: bool
    # None: every layer is dense. Not in the repr either: the identities of dense targets are older.
    experts: ExpertConfig | None = dataclasses.field(default=None, kw_only=True, repr=False)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Qwen3Config":
        """Reads a parsed config.json; raises DataError for a missing field or one that changes the maths."""
        if raw.get("model_type") not in MODEL_TYPES:
            raise ConfigError(
                f"says model_type {quote(raw.get('model_type'))}, but the target must be 'qwen3',"
                " 'qwen3_moe' or 'llama'. Choose a Qwen3 or a Llama checkpoint."
            )
        llama = raw["model_type"] == "llama"
        refuse_unsupported(raw)
        kinds = raw.get("layer_types") or []
        expect(isinstance(kinds, list), "layer_types", kinds, "a list")
        other = [kind for kind in kinds if kind != "full_attention"]
        window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
        if other or window:
            raise ConfigError(
                f"has layer_types with {quote(other[:1])} and use_sliding_window {bool(window)}; the target"
                " supports full attention only."
            )
        return cls(
            **read_decoder_fields(raw, llama=llama),
            tie_word_embeddings=read_switch(raw, "tie_word_embeddings"),
            qk_norm=not llama,
            experts=read_expert_config(raw) if raw["model_type"] == "qwen3_moe" else None,
        )

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """None for a dense layer."""
        return self.experts if self.experts and self.experts.in_layer(layer) else None


class Qwen3(nn.Module):
    """The frozen target. Parameters are named as in the public checkpoints (weights/target.py has the table)."""

    config: Qwen3Config
    dtype: Any = jnp.float32

    def setup(self):
        c = self.config
        self.embed_tokens = nn.Embed(
            c.vocab_size, c.hidden_size, dtype=self.dtype, embedding_init=nn.initializers.normal(INIT_STD)
        )
        self.layers = [DecoderLayer(c, self.dtype, c.experts_of(index)) for index in range(c.num_hidden_layers)]
        self.norm = RMSNorm(c.rms_norm_eps, self.dtype)
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.vocab_size, dtype=self.dtype, logits=True)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [...] → embedding rows [..., D]."""
        return constrain_rows(self.embed_tokens(tokens))

    def with_gathered_head(self, params: dict) -> dict:
        """The parameters with the vocabulary matrix in the layout of `unembed`, so that many calls gather it once."""
        if not self.config.tie_word_embeddings:
            return with_kernel_in_use(params, "lm_head", self.dtype)
        table = in_use(params["embed_tokens"]["embedding"], "embed_tokens", self.dtype)
        return params | {"embed_tokens": {"embedding": table}}

    def unembed(self, hidden: Hidden) -> Logits:
        """Normed hidden states [..., D] → float32 logits [..., V], by lm_head or by the tied embedding."""
        if self.config.tie_word_embeddings:
            table = in_use(self.embed_tokens.embedding, "embed_tokens", self.dtype)
            product = functools.partial(jnp.einsum, "...d,vd->...v", preferred_element_type=jnp.float32)
            return with_rows(product, hidden.astype(self.dtype), table)
        return self.lm_head(hidden)

    def __call__(
        self,
        tokens: Tokens,
        positions: Positions | None = None,
        mask: Mask | None = None,
        cache: Cache | None = None,
        slots: jax.Array | None = None,
        *,
        documents: jax.Array | None = None,
        tap_layers: tuple[int, ...] = (),
        features_only: bool = False,
        with_logits: bool = True,
    ) -> dict[str, Any]:
        """One pass over tokens int32 [B, T].

        Args:
            positions: int32 [B, T], absolute, for the rotation; 0..T-1 when absent.
            mask: bool [B, T, S]; over the T tokens themselves without a cache, over all slots with one. When absent,
              attention is causal and its scores are never made whole: over the T tokens themselves, or with a cache
              over its slots up to each token's own. All rows must then have the same slots.
            cache: per layer (k, v) [B, K, S, H]; the block's rows are written at `slots` int32 [B, T], which follow one
              another, before attention reads it.
            documents: int32 [B, T] of packed rows, without a cache: a token reads its own document only.
            tap_layers: zero-based decoder layers whose OUTPUT is wanted, in the order of the list.
            features_only: stop after the last tapped layer; no norm, no logits (a training step needs no more).
            with_logits: False leaves out the lm_head; callers then put only the rows they need through `unembed`.

        Returns:
            dict with "features" [B, T, C·D] (when tapped), "cache" (when given), "hidden" [B, T, D] after the final
            norm, and "logits" float32 [B, T, V].
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.embed(tokens)
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)
        depth = max(tap_layers) + 1 if features_only else self.config.num_hidden_layers
        tapped, new_cache = {}, []
        for index, layer in enumerate(self.layers[:depth]):
            attention = cache_attention(cache[index], slots, mask) if cache else token_attention(mask, documents)
            x, layer_cache = run_layer(layer, x, angles, attention)
            new_cache.append(layer_cache)
            if index in tap_layers:
                tapped[index] = x
        out = {}
        if tap_layers:
            out["features"] = jnp.concatenate([tapped[index] for index in tap_layers], axis=-1)
        if cache is not None:
            out["cache"] = tuple(new_cache)
        if not features_only:
            out["hidden"] = self.norm(x)
            if with_logits:
                out["logits"] = self.unembed(out["hidden"])
        return out

    def init_cache(self, batch: int, slots: int) -> Cache:
        """An empty cache for `batch` rows of `slots` positions, in the compute dtype."""
        c = self.config
        return init_cache(c.num_hidden_layers, batch, slots, c.num_key_value_heads, c.head_dim, self.dtype)
