"""The refiner of xPress (arXiv 2608.02438): a causal correction of all slots at once, in a few passes over the block.

K passes, each after the drafts of the pass before, replace the loop over the slots (rollout.draft_in_passes). Source of
the formulas, which are in docs/heads.md: speculators 0.9.0 (models/xpress) and the authors' code.
"""

import dataclasses
import logging
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from domino_jax.method.blocks import position_decay
from domino_jax.method.config import BLOCK_KEYS, DrafterConfig
from domino_jax.method.config_keys import integer, read_key, refuse_other_layout, section
from domino_jax.method.fields import LARGEST_RANK, field
from domino_jax.method.head import Head
from domino_jax.method.losses import EPSILON, Labels, Loss, Outputs, cross_entropy, total_variation
from domino_jax.method.sliced_loss import SlicedForward, Sums
from domino_jax.models.layers import Linear, SplitLinear
from domino_jax.models.shapes import Hidden, Logits

log = logging.getLogger(__name__)
MLP_RATIO = 2  # hidden units of a new head's network ÷ its rank, as in the authors' files


class XpressHead(Head):
    """Code x_k = u_k + down(silu(gate u_k) ⊙ up u_k) with u_k[c] = a_k[c] + Σ_{j≤k} L[c, k, j]·a_j[c].

    a_k = P·[D_h z_k ; D_g g ; E[y_k]], y_k the token before slot k and g the mean of all z of the block. It reads token
    ids, and slot 0 of unshifted blocks too.
    """

    def setup(self):
        c, rank, hidden = self.config, self.config.xpress_rank, self.config.xpress_mlp_hidden
        self.predecessor, self.up = self.token_table(rank), self.last_matrix()
        self.down_h, self.down_g, self.mlp_down = (Linear(rank, dtype=self.dtype) for _ in range(3))
        self.mlp_gate, self.mlp_up = (Linear(hidden, dtype=self.dtype) for _ in range(2))
        self.in_proj = SplitLinear((rank, rank, rank), rank, self.dtype)
        self.mix = self.param("mix", nn.initializers.zeros, (rank, c.block_size, c.block_size))

    def initial_state(self, *batch: int) -> jax.Array:
        """The vectors a_j of all slots, zero until they are known: float32 [*batch, G, E]."""
        return jnp.zeros((*batch, self.config.block_size, self.config.xpress_rank), jnp.float32)

    def z_terms(self, z: Hidden) -> jax.Array:
        """z [B, G, D] → [B, G, 2E + G]: D_h z_k, D_g g, and the number of the slot as a one-hot row."""
        mean = self.down_g(z.astype(jnp.float32).mean(axis=-2, keepdims=True))
        state, numbers = self.down_h(z), jnp.eye(self.config.block_size, dtype=mean.dtype)
        shared = (jnp.broadcast_to(part, (*state.shape[:-1], part.shape[-1])) for part in (mean, numbers))
        return jnp.concatenate([state, *shared], axis=-1)

    def step(self, state: jax.Array, x: jax.Array, z_terms: jax.Array) -> tuple[jax.Array, jax.Array]:
        vector, slot = self._vector(z_terms, x), z_terms[..., 2 * self.config.xpress_rank :].astype(jnp.float32)
        placed = slot[..., :, None] * vector[..., None, :]
        state = jax.lax.optimization_barrier(state + placed)  # as in the Domino head
        row = jnp.einsum("...k,ckj->...jc", slot, jnp.tril(self.mix))
        return state, self._codes(vector + jnp.sum(row * state, axis=-2))

    def codes(self, z_terms: jax.Array, x: jax.Array) -> jax.Array:
        vectors = self._vector(z_terms, x)
        slots = vectors.shape[-2]
        mix = jnp.tril(self.mix)[:, :slots, :slots]
        return self._codes(vectors + jnp.einsum("ckj,bjc->bkc", mix, vectors))

    def _vector(self, z_terms: jax.Array, x: jax.Array) -> jax.Array:
        """a_k float32 [..., E]."""
        state, mean, _ = jnp.split(z_terms, [self.config.xpress_rank, 2 * self.config.xpress_rank], axis=-1)
        inputs = enumerate((state, mean, self.look_up(x)))
        return sum(self.in_proj.part(index, part) for index, part in inputs).astype(jnp.float32)

    def _codes(self, mixed: jax.Array) -> jax.Array:
        return mixed + self.mlp_down(nn.silu(self.mlp_gate(mixed)) * self.mlp_up(mixed))


# ----------------------------------------------------------------------------------------------------------------- loss


@dataclasses.dataclass(frozen=True)
class XpressLoss(Loss):
    """T(F⁰) + c·(1/J)·Σ_j T(Fʲ) + d·T(U), with T(F) = Σ w·decay·(a·CE(F) + b·TV(F)) / Σ w.

    U are the base logits, F⁰ the final ones after the true tokens, F¹ those after the choices of U, and Fʲ those after
    the choices of Fʲ⁻¹, as in decoding. CE is against the target's likeliest token, TV = ½ Σ |q - p| against its p.
    Every term trains head and backbone; nothing flows through the choices. It does not read dpace_alpha.

    contiguous: False, as in the public trainer: a block may run on into the next turn.
    weights: a, b, c, d.  rounds: J.
    """

    contiguous: bool = False
    weights: tuple[float, float, float, float] = (0.1, 0.9, 0.3, 0.6)
    rounds: int = 3

    reads_target, divides_by_labels, mixes = True, True, False

    @property
    def round_names(self) -> list[str]:
        """The sums of the rounds' terms."""
        return [f"consistency_round{index}_loss" for index in range(self.rounds)]

    @property
    def figures(self) -> dict[str, tuple[str, str]]:
        """The terms of the loss and their parts, without weights (docs/heads.md); over all labels the accept rates,
        Σ min(p, q) of F⁰ and U."""
        terms = ("tf_loss", "ce_loss", "tv_loss", "consistency_loss", "base_anchor_loss", *self.round_names)
        rates = {name: (name, "labels") for name in ("accept_rate", "base_accept_rate")}
        return Loss.figures | {name: (name, "divisor") for name in terms} | rates

    @property
    def blocks_at_once(self) -> int:
        return max(1, 3 * self.slice_blocks // (3 + self.rounds))

    def forward(
        self, default: SlicedForward, models: Any, base_logits: Any, labels: Labels, previous_tokens: jax.Array
    ) -> SlicedForward:
        config = models.drafter.config
        decay = position_decay(config.block_size, config.first_slot, self.gamma)

        def refined(params: dict, z: Hidden, codes: jax.Array, frozen: tuple) -> Outputs:
            states, prefix_tokens = frozen
            outputs = default.outputs_of(params, z, codes, states)
            drafter, logits = models.replace(drafter_params={"head": params}).bound, [outputs.base]
            for _ in range(self.rounds):
                choices = jnp.argmax(logits[-1], axis=-1)[..., config.first_slot : -1]
                codes = drafter.codes(z, jnp.concatenate([prefix_tokens, choices], axis=-1))
                logits.append(outputs.base.at[..., config.first_slot :, :].add(drafter.head.residual(codes)))
            return outputs._replace(extra=(logits[1:], jnp.broadcast_to(decay, z.shape[:-1])))

        states = (default.states, previous_tokens[..., : 1 + config.extra_slots])
        return default._replace(outputs_of=refined, states=states)

    def block_sums(self, outputs: Outputs, labels: Labels) -> Sums:
        valid, (rounds, decay) = labels.mask, outputs.extra
        token, weights = jnp.argmax(outputs.target, axis=-1), valid * decay

        def parts(logits: Logits) -> tuple[jax.Array, jax.Array]:
            return cross_entropy(logits, token), total_variation(logits, outputs.target)

        def term(losses: tuple[jax.Array, jax.Array]) -> jax.Array:
            return jnp.sum(weights * (self.weights[0] * losses[0] + self.weights[1] * losses[1]))

        forced, base = parts(outputs.final), parts(outputs.base)
        terms = {name: term(parts(logits)) for name, logits in zip(self.round_names, rounds, strict=True)}
        return {
            **super().block_sums(outputs, labels),
            **terms,
            "consistency_loss": sum(terms.values()) / self.rounds,
            "tf_loss": term(forced),
            "base_anchor_loss": term(base),
            "ce_loss": jnp.sum(weights * forced[0]),
            "tv_loss": jnp.sum(weights * forced[1]),
            "accept_rate": jnp.sum(valid * (1.0 - forced[1])),
            "base_accept_rate": jnp.sum(valid * (1.0 - base[1])),
        }

    def total(self, sums: Sums) -> jax.Array:
        consistency, base = self.weights[2:]
        total = sums["tf_loss"] + consistency * sums["consistency_loss"] + base * sums["base_anchor_loss"]
        return total / (self.divisor + EPSILON)


# ---------------------------------------------------------------------------------------------------------------- files


@dataclasses.dataclass(frozen=True)
class XpressConfig(DrafterConfig):
    """xpress_rank: E.  xpress_mlp_hidden: hidden units of its network.  xpress_num_passes: K of decoding."""

    # A new head's network has MLP_RATIO times as many hidden units.
    xpress_rank: int = field(least=1, most=LARGEST_RANK // MLP_RATIO, recipe=256, recipe_name="rank", shape=True)
    xpress_mlp_hidden: int = field(least=1, most=LARGEST_RANK)
    xpress_num_passes: int = field(6, least=1, most=LARGEST_RANK)

    head, title, paper, architecture = "xpress", "xPress", " (arXiv 2608.02438)", "Qwen3XPressModel"
    known_by, module, loss = ("XPress",), XpressHead, XpressLoss
    tensor_names = DrafterConfig.tensor_names | {
        "head.predecessor": "xpress_head.w1",
        "head.up": "xpress_head.w2",
        "head.mix": "xpress_head.mix.L",
        **{f"head.mlp_{part}": f"xpress_head.mlp.{part}_proj" for part in ("gate", "up", "down")},
        "head.": "xpress_head.",
    }
    reads = (*BLOCK_KEYS, "frozen_backbone")
    extra_slots = property(lambda self: self.first_slot)
    passes = property(lambda self: self.xpress_num_passes)

    @classmethod
    def recipe_fields(cls, recipe: Any) -> dict[str, Any]:
        fields = super().recipe_fields(recipe)
        return fields | {"xpress_mlp_hidden": MLP_RATIO * fields["xpress_rank"]}

    @classmethod
    def from_dict(cls, raw: dict[str, Any], target: Any = None) -> DrafterConfig:
        config, nested = super().from_dict(raw, target), section(raw, "dflash_config")
        # A mixer of another size, and drafts among a few candidates alone, as the authors' code has them too.
        fixed = {"xpress_block_size": config.block_size, "xpress_candidate_topc": 0}
        refuse_other_layout(raw, nested, cls.title, fixed)
        candidates = read_key(raw, nested, "xpress_topc")
        if candidates is not None and integer("xpress_topc", candidates):
            log.warning("xpress_topc %d is vLLM's; here decode.head_candidates says how many are scored", candidates)
        return config

    def head_keys(self) -> tuple[dict[str, Any], dict[str, Any]]:
        # Without xpress_topc vLLM corrects only the 512 tokens of each slot that the backbone scores best.
        keys = {"sample_from_anchor": self.shift_label, "xpress_block_size": self.block_size, "xpress_topc": 0}
        return keys | self.head_fields(), {}
