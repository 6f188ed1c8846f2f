"""The Markov heads of DSpark: a correction that follows from the token before a slot, and a confidence in each slot.

A token's row v of a table [V, E] is the code itself (vanilla), or is gated by the slot's z (gated), or goes through a
small recurrence over the block (rnn). The loss is a cross-entropy, the distance to the target's distribution, and the
cross-entropy of the confidence. Source of the formulas: DSpark as SpecForge and DeepSpec publish it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from domino_jax.method.config import BLOCK_KEYS, DrafterConfig
from domino_jax.method.config_keys import number, read_key, read_switch, section
from domino_jax.method.fields import LARGEST_RANK, field
from domino_jax.method.head import Head
from domino_jax.method.losses import EPSILON, Labels, Loss, Outputs, total_variation
from domino_jax.method.sliced_loss import SlicedForward, Sums
from domino_jax.models.layers import Matrix, SplitLinear, multiply
from domino_jax.models.shapes import Hidden

MARKOV_KINDS = (VANILLA, GATED, RNN) = ("vanilla", "gated", "rnn")
PROJECTOR = "dspark"  # as projector_type
CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov")


class MarkovHead(Head):
    """Code of a slot, with v the table's row of the token before it. It reads token ids.

    vanilla: v.
    gated: σ(G·[z ; v] + g) ⊙ v.
    rnn: tanh(o) of p, c, o = J·[s ; v ; z] + j; after the slot s ← σ(p) ⊙ s + (1 - σ(p)) ⊙ tanh(c), s = 0 at first.
    """

    def setup(self):
        c = self.config
        width, rank = c.hidden_size, c.markov_rank
        self.predecessor = self.token_table(rank)
        self.up = self.last_matrix()
        if c.markov_head_type == GATED:
            self.gate = SplitLinear((width, rank), rank, self.dtype, use_bias=True)
        if c.markov_head_type == RNN:
            self.joint = SplitLinear((rank, rank, width), 3 * rank, self.dtype, use_bias=True)
        if c.enable_confidence_head:
            widths = (width, rank) if c.confidence_head_with_markov else (width,)
            self.confidence_proj = SplitLinear(widths, 1, self.dtype, use_bias=True)

    def initial_state(self, *batch: int) -> Any:
        """s = 0, float32 [*batch, E], of rnn; () of the others."""
        c = self.config
        return jnp.zeros((*batch, c.markov_rank), jnp.float32) if c.markov_head_type == RNN else ()

    def z_terms(self, z: Hidden) -> jax.Array:
        """z's share of the gate [..., E] or of p, c and o [..., 3E]; nothing [..., 0] of vanilla."""
        kind = self.config.markov_head_type
        if kind == VANILLA:
            return z[..., :0]
        return self.gate.part(0, z, bias=True) if kind == GATED else self.joint.part(2, z, bias=True)

    def step(self, state: Any, x: jax.Array, z_terms: jax.Array) -> tuple[Any, jax.Array]:
        v = self.look_up(x)
        if self.config.markov_head_type != RNN:
            return state, self._gated(v, z_terms)
        state, code = self._recur(state, z_terms + self.joint.part(1, v), self.joint.matrix(0))
        return jax.lax.optimization_barrier(state), code  # as in the Domino head

    def codes(self, z_terms: jax.Array, x: jax.Array) -> jax.Array:
        v = self.look_up(x)
        if self.config.markov_head_type != RNN:
            return self._gated(v, z_terms)
        shares = z_terms + self.joint.part(1, v)
        start, matrix = self.initial_state(len(x)), self.joint.matrix(0)

        def recur(state, share):
            return self._recur(state, share, matrix)

        return jax.lax.scan(recur, start, shares.swapaxes(0, 1))[1].swapaxes(0, 1)

    def use_all(self, z: Hidden, codes: jax.Array) -> None:
        super().use_all(z, codes)
        if self.config.enable_confidence_head:
            self.confidence(z, jnp.zeros(z.shape[:-1], jnp.int32))

    def confidence(self, z: Hidden, x: jax.Array) -> jax.Array:
        """Logits float32 [...] of a draft's chance to be accepted, given that those before it were.

        Args:
            z: [..., D] of the slots.  x: int32 [...], the tokens before them.
        """
        logit = self.confidence_proj.part(0, z, bias=True)
        if self.config.confidence_head_with_markov:
            logit += self.confidence_proj.part(1, self.look_up(x))
        return logit[..., 0].astype(jnp.float32)

    def _gated(self, v: jax.Array, z_terms: jax.Array) -> jax.Array:
        """The code of vanilla, v [..., E] itself, and of gated."""
        if self.config.markov_head_type == VANILLA:
            return v
        return jax.nn.sigmoid(z_terms + self.gate.part(1, v)) * v

    def _recur(self, state: jax.Array, share: jax.Array, matrix: Matrix) -> tuple[jax.Array, jax.Array]:
        """One slot of the recurrence: state float32 [..., E], what else goes into p, c and o [..., 3E]."""
        joined = share + multiply(state.astype(self.dtype), matrix)
        keep, new, out = jnp.split(joined.astype(jnp.float32), 3, axis=-1)
        keep = jax.nn.sigmoid(keep)
        return keep * state + (1.0 - keep) * jnp.tanh(new), jnp.tanh(out).astype(self.dtype)


# ----------------------------------------------------------------------------------------------------------------- loss


@dataclasses.dataclass(frozen=True)
class MarkovLoss(Loss):
    """(a·Σ w·CE + b·Σ w·L1 + c·Σ w·BCE) / Σ w, without λ. It does not read dpace_alpha.

    L1 = Σ_v |q - p| of the final logits' q and the target's p. BCE is the binary cross-entropy of the confidence logits
    against the chance 1 - L1/2 that the draft is accepted, through which no gradient flows.

    weights: a, b, c.
    Outputs: target where reads_target; extra: confidence logits [n, G], or None without a confidence head.
    """

    weights: tuple[float, float, float] = (0.1, 0.9, 1.0)

    mixes = False
    # With a target: tau_probabilistic is the expected tokens of a round. With a confidence head the last two.
    figures = Loss.figures | {
        "l1_loss": ("l1", "divisor"),
        "tau_probabilistic": ("expected", "blocks"),
        "teacher_agreement": ("agrees", "labels"),
        "teacher_top1_prob": ("target_top1", "labels"),
        "draft_top1_prob": ("draft_top1", "labels"),
        "confidence_loss": ("bce", "divisor"),
        "confidence_abs_error": ("confidence_error", "divisor"),
    }

    @property
    def reads_target(self) -> bool:
        return any(self.weights[1:])

    def forward(
        self, default: SlicedForward, models: Any, base_logits: Any, labels: Labels, previous_tokens: jax.Array
    ) -> SlicedForward:
        if not models.drafter.config.enable_confidence_head:
            return default

        def outputs_of(params, z, codes, confidence, states):
            return default.outputs_of(params, z, codes, states)._replace(extra=confidence)

        inputs = (*default.inputs, models.head.confidence(default.inputs[0], previous_tokens))
        return default._replace(outputs_of=outputs_of, inputs=inputs)

    def block_sums(self, outputs: Outputs, labels: Labels) -> Sums:
        sums = super().block_sums(outputs, labels)
        if outputs.target is None:
            return sums
        q, p = jax.nn.softmax(outputs.final), jax.nn.softmax(outputs.target)
        valid, weights = labels.mask, labels.slot_weights
        distance = 2.0 * total_variation(outputs.final, outputs.target)
        accepted = jax.lax.stop_gradient(jnp.clip(1.0 - distance / 2.0, 0.0, 1.0))
        agrees = jnp.argmax(outputs.final, axis=-1) == jnp.argmax(outputs.target, axis=-1)
        emitted = valid.max(-1) + jnp.cumprod(accepted * valid, axis=-1).sum(-1)
        sums |= {
            "l1": jnp.sum(weights * distance),
            "expected": emitted.sum(),
            "agrees": jnp.sum(valid * agrees),
            "target_top1": jnp.sum(valid * p.max(-1)),
            "draft_top1": jnp.sum(valid * q.max(-1)),
        }
        if outputs.extra is not None:
            confidence = outputs.extra
            sums["bce"] = jnp.sum(weights * optax.sigmoid_binary_cross_entropy(confidence, accepted))
            sums["confidence_error"] = jnp.sum(weights * jnp.abs(jax.nn.sigmoid(confidence) - accepted))
        return sums

    def total(self, sums: Sums) -> jax.Array:
        weighted = zip(self.weights, ("final_loss", "l1", "bce"), strict=True)
        return sum(share * sums[name] for share, name in weighted if name in sums) / (self.divisor + EPSILON)


# ---------------------------------------------------------------------------------------------------------------- files


@dataclasses.dataclass(frozen=True)
class MarkovConfig(DrafterConfig):
    """markov_rank: E.  confidence_head_with_markov: the confidence head reads the token before the slot as well."""

    markov_rank: int = field(least=1, most=LARGEST_RANK, recipe=256, recipe_name="rank", shape=True)
    markov_head_type: str = field(choices=MARKOV_KINDS, recipe=VANILLA, recipe_name="head_type", shape=True)
    enable_confidence_head: bool = field(False)
    confidence_head_with_markov: bool = field(False)

    head, title, architecture = "markov", "DSpark", "DSparkDraftModel"
    # The last is DeepSpec's class, of flat files without projector_type.
    known_by, module, loss = (PROJECTOR, "DSparkDraftModel", "Qwen3DSparkModel"), MarkovHead, MarkovLoss
    tensor_names = DrafterConfig.tensor_names | {
        "head.predecessor": "markov_head.markov_w1",
        "head.up": "markov_head.markov_w2",
        "head.gate": "markov_head.gate_proj",
        "head.joint": "markov_head.joint_proj",
        "head.confidence_proj": "confidence_head.proj",
    }
    reads = (*BLOCK_KEYS, "frozen_backbone")
    new = {"shift_label": True}
    fixed = {"projector_type": PROJECTOR, "shift_label": True, "pure_draft_prefix_len": 0, "dspark_bonus_anchor": False}
    own_keys = ("projector_type",)

    @classmethod
    def recipe_fields(cls, recipe: Any) -> dict[str, Any]:
        # As public checkpoints have one; its own loss alone trains it.
        return super().recipe_fields(recipe) | dict.fromkeys(CONFIDENCE, recipe.train.loss == "own")

    @classmethod
    def from_dict(cls, raw: dict[str, Any], target: Any = None) -> DrafterConfig:
        config, nested = super().from_dict(raw, target), section(raw, "dflash_config")
        confident = read_switch(raw, nested, "enable_confidence_head")
        if confident is None:  # then the head exists if its loss has a weight
            weight = read_key(raw, nested, "confidence_head_alpha")
            confident = weight not in (None, 0) and number("confidence_head_alpha", weight) > 0
        with_markov = confident and config.confidence_head_with_markov
        return dataclasses.replace(config, enable_confidence_head=confident, confidence_head_with_markov=with_markov)

    def head_keys(self) -> tuple[dict[str, Any], dict[str, Any]]:
        # SGLang reads them at the top level, SpecForge in dflash_config. Public files have no shift_label.
        keys = {
            "projector_type": PROJECTOR,
            **self.head_fields(),
            "confidence_head_alpha": 1.0 if self.enable_confidence_head else 0.0,
            "attention_mode": "gqa" if self.num_key_value_heads < self.num_attention_heads else "mha",
        }
        return keys, keys
