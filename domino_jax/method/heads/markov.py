"""The Markov heads of DSpark: a correction that follows from the token before a slot, and a confidence in each slot.

A token's row v of a table [V, E] is the code itself (vanilla), or is gated by the slot's z (gated), or goes through a
small recurrence over the block (rnn). The loss is a cross-entropy, the distance to the target's distribution, and the
cross-entropy of the confidence. Source of the formulas: DSpark as SpecForge and DeepSpec publish it.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax

from domino_jax.method.config import LARGEST_RANK, DrafterConfig
from domino_jax.method.config_keys import boolean, either, integer, number, refuse, refuse_other_layout, section
from domino_jax.method.head import Head, SplitLinear
from domino_jax.method.losses import (
    EPSILON,
    Labels,
    LossSettings,
    Objective,
    Outputs,
    Parts,
    Sums,
    total_variation,
)
from domino_jax.models.layers import Matrix, multiply
from domino_jax.models.shapes import Hidden
from domino_jax.runtime.errors import DataError, quote
from domino_jax.runtime.keys import Key

MARKOV_KINDS = (VANILLA, GATED, RNN) = ("vanilla", "gated", "rnn")
PROJECTOR = "dspark"  # as projector_type
CLASSES = ("DSparkDraftModel", "Qwen3DSparkModel")  # the second is DeepSpec's, of flat files without projector_type
_ATTENTION, _HEADS = "attention_mode", ("num_attention_heads", "num_key_value_heads")
KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


@dataclasses.dataclass(frozen=True)
class MarkovConfig(DrafterConfig):
    """markov_rank: E.  markov_head_type: one of MARKOV_KINDS.  confidence_head_with_markov: the confidence head reads
    the token before the slot as well.

    SGLang reads the keys at the top level, SpecForge in dflash_config; both places are written, and either is read.
    """

    markov_rank: int = 0
    markov_head_type: str = VANILLA
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False

    head, title, architecture = "markov", "DSpark", CLASSES[0]
    sglang, vllm = "DSPARK", "dspark"
    has_head, rank_key, needed = True, "markov_rank", ("markov_rank", "markov_head_type")
    own_keys = ("projector_type", "markov_rank", "enable_confidence_head")
    speculators, speculators_keys = PROJECTOR, {name: name for name in ("sample_from_anchor", *KEYS)}

    tensor_names = DrafterConfig.tensor_names | {
        "head.predecessor": "markov_head.markov_w1",
        "head.up": "markov_head.markov_w2",
        "head.gate": "markov_head.gate_proj",
        "head.joint": "markov_head.joint_proj",
        "head.confidence_proj": "confidence_head.proj",
    }
    shifts_labels, only_shift, own_loss, reads_drafts = True, True, True, True
    recipe_keys = {
        "head_type": Key(VANILLA, choices=MARKOV_KINDS, shape=True),  # how the code follows from a token's row
        "rank": Key(256, least=1, most=LARGEST_RANK, shape=True),
    }

    @property
    def has_confidence(self) -> bool:
        return self.enable_confidence_head

    @classmethod
    def matches(cls, raw: dict[str, Any], tensors: Collection[str]) -> bool:
        stated = any(name in str(raw.get("architectures")) for name in CLASSES)
        return stated or either(raw, section(raw, "dflash_config"), "projector_type") == PROJECTOR

    @classmethod
    def from_dict(cls, raw: dict[str, Any], target: Any = None) -> DrafterConfig:
        """As of DrafterConfig; a file of rank 0 has no head: it is that of plain DFlash, shifted as all of these."""
        nested = section(raw, "dflash_config")
        # Slot k predicts the token after its own, and the head corrects every draft.
        only = {"projector_type": PROJECTOR, "shift_label": True, "sample_from_anchor": True}
        refuse_other_layout(raw, nested, "DSpark", only | {"pure_draft_prefix_len": 0})
        mode, heads, pairs = either(raw, nested, _ATTENTION), *map(raw.get, _HEADS)
        refuse(
            mode is not None and str(mode).lower() != ("mha" if pairs == heads else "gqa"),
            f"{_ATTENTION} {quote(mode)} with {_HEADS[0]} {heads} and {_HEADS[1]} {pairs}: gqa has fewer of the latter",
        )
        if either(raw, nested, "markov_rank") != 0:
            return super().from_dict(raw, target)
        refuse(_confident(raw, nested), "markov_rank 0 leaves no Markov head, and enable_confidence_head needs one")
        raw, nested = ({name: part[name] for name in part if name not in cls.own_keys} for part in (raw, nested))
        return DrafterConfig.from_dict({**raw, "dflash_config": {**nested, "shift_label": True}}, target)

    @classmethod
    def head_fields(cls, raw: dict[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
        rank, kind = (either(raw, nested, name) for name in cls.needed)
        kind = kind.lower() if isinstance(kind, str) else kind  # as its public readers do
        if kind not in MARKOV_KINDS:
            raise DataError(
                f"the drafter's config.json has markov_head_type {quote(kind)}; expected one of"
                f" {', '.join(MARKOV_KINDS)}."
            )
        confident = _confident(raw, nested)
        with_markov = confident and bool(boolean(raw, nested, "confidence_head_with_markov"))
        values = (integer("markov_rank", rank), kind, confident, with_markov)
        return {"shift_label": True, **dict(zip(KEYS, values, strict=True))}

    def head_keys(self) -> tuple[dict[str, Any], dict[str, Any]]:
        # Public files have no shift_label: they are shifted.
        keys = {
            "projector_type": PROJECTOR,
            **{name: getattr(self, name) for name in KEYS},
            "confidence_head_alpha": 1.0 if self.enable_confidence_head else 0.0,
            _ATTENTION: "gqa" if self.num_key_value_heads < self.num_attention_heads else "mha",
        }
        return keys, keys

    def head_module(self, dtype: Any, whole: bool) -> Head:
        return MarkovHead(self, dtype, whole)

    @classmethod
    def recipe_fields(cls, recipe: Any) -> dict[str, Any]:
        # Its own loss trains a confidence head, which reads the token before the slot as well, as that of public
        # checkpoints does.
        section, confident = recipe.drafter.markov, recipe.train.loss == "own"
        return dict(zip(KEYS, (section.rank, section.head_type, confident, confident), strict=True))

    @classmethod
    def own_settings(cls, recipe: Any, shared: dict[str, Any]) -> LossSettings:
        return MarkovSettings(**shared)

    def vllm_refusal(self) -> str | None:
        if self.markov_head_type != VANILLA:
            return f"vLLM has the vanilla Markov head, and this drafter has the {self.markov_head_type} one"
        return self.convolution_refusal()


def _confident(raw: dict[str, Any], nested: dict[str, Any]) -> bool:
    """enable_confidence_head, which is by default whether its loss has a weight."""
    stated, weight = boolean(raw, nested, "enable_confidence_head"), either(raw, nested, "confidence_head_alpha")
    return stated if stated is not None else weight not in (None, 0) and number("confidence_head_alpha", weight) > 0


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

    def hidden_half(self, z: Hidden) -> jax.Array:
        """z's share of the gate [..., E] or of p, c and o [..., 3E]; nothing [..., 0] of vanilla."""
        kind = self.config.markov_head_type
        if kind == VANILLA:
            return z[..., :0]
        return self.gate.part(0, z, bias=True) if kind == GATED else self.joint.part(2, z, bias=True)

    def step(self, state: Any, x: jax.Array, half: jax.Array) -> tuple[Any, jax.Array]:
        v = self.look_up(x)
        if self.config.markov_head_type != RNN:
            return state, self._gated(v, half)
        state, code = self._recur(state, half + self.joint.part(1, v), self.joint.matrix(0))
        return jax.lax.optimization_barrier(state), code  # as in the Domino head

    def codes_after(self, half: jax.Array, x: jax.Array) -> jax.Array:
        v = self.look_up(x)
        if self.config.markov_head_type != RNN:
            return self._gated(v, half)
        shares = half + self.joint.part(1, v)
        start, matrix = self.initial_state(len(x)), self.joint.matrix(0)

        def recur(state, share):
            return self._recur(state, share, matrix)

        return jax.lax.scan(recur, start, shares.swapaxes(0, 1))[1].swapaxes(0, 1)

    def confidence(self, z: Hidden, x: jax.Array) -> jax.Array:
        """Logits float32 [...] of a draft's chance to be accepted, given that those before it were.

        Args:
            z: [..., D] of the slots.  x: int32 [...], the tokens before them.
        """
        logit = self.confidence_proj.part(0, z, bias=True)
        if self.config.confidence_head_with_markov:
            logit += self.confidence_proj.part(1, self.look_up(x))
        return logit[..., 0].astype(jnp.float32)

    def _gated(self, v: jax.Array, half: jax.Array) -> jax.Array:
        """The code of vanilla, v [..., E] itself, and of gated."""
        if self.config.markov_head_type == VANILLA:
            return v
        return jax.nn.sigmoid(half + self.gate.part(1, v)) * v

    def _recur(self, state: jax.Array, share: jax.Array, matrix: Matrix) -> tuple[jax.Array, jax.Array]:
        """One slot of the recurrence: state float32 [..., E], what else goes into p, c and o [..., 3E]."""
        joined = share + multiply(state.astype(self.dtype), matrix)
        keep, new, out = jnp.split(joined.astype(jnp.float32), 3, axis=-1)
        keep = jax.nn.sigmoid(keep)
        return keep * state + (1.0 - keep) * jnp.tanh(new), jnp.tanh(out).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class MarkovSettings(LossSettings):
    """Choices of this loss, which does not read dpace_alpha.

    weights: of the cross-entropy, the L1 distance and the confidence.
    """

    weights: tuple[float, float, float] = (0.1, 0.9, 1.0)

    def objective(self, lambda_base: jax.Array, weight: jax.Array) -> Objective:
        return MarkovObjective(self, lambda_base, weight)

    @property
    def reads_target(self) -> bool:
        return any(self.weights[1:])


class MarkovObjective(Objective):
    """(a·Σ w·CE + b·Σ w·L1 + c·Σ w·BCE) / Σ w, with a, b, c of settings.weights and no λ.

    L1 = Σ_v |q - p| of the final logits' q and the target's p. BCE is the binary cross-entropy of the confidence logits
    against the chance 1 - L1/2 that the draft is accepted, through which no gradient flows.

    Outputs: target where settings.reads_target; extra: confidence logits [n, G], or None without a confidence head.
    """

    def parts(self, usual: Parts, models: Any, base_logits: Any, labels: Labels, before: jax.Array) -> Parts:
        if not models.drafter.config.has_confidence:
            return usual

        def outputs_of(params, z, codes, confidence, states):
            return usual.outputs_of(params, z, codes, states)._replace(extra=confidence)

        inputs = (*usual.inputs, models.confidence(usual.inputs[0], before))
        return usual._replace(outputs_of=outputs_of, inputs=inputs)

    def block_sums(self, outputs: Outputs, labels: Labels) -> Sums:
        sums = super().block_sums(outputs, labels)
        if outputs.target is None:
            return sums
        q, p = jax.nn.softmax(outputs.final), jax.nn.softmax(outputs.target)
        valid, weights = labels.label_weights, labels.loss_weights
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

    def loss(self, sums: Sums) -> jax.Array:
        weighted = zip(self.settings.weights, ("final_loss", "l1", "bce"), strict=True)
        return sum(share * sums[name] for share, name in weighted if name in sums) / (self.weight + EPSILON)

    def metrics(self, sums: Sums) -> dict[str, jax.Array]:
        """Those of Domino without λ; with a target l1_loss, tau_probabilistic (the expected tokens of a round, a
        mean over blocks with a label), and of all slots with a label teacher_agreement, teacher_top1_prob and
        draft_top1_prob; with a confidence head confidence_loss and confidence_abs_error."""
        metrics = super().metrics(sums)
        del metrics["lambda_base"]
        weight = self.weight + EPSILON
        labels, blocks = jnp.maximum(sums["labels"], 1.0), jnp.maximum(sums["blocks"], 1.0)
        divisors = {
            "l1_loss": ("l1", weight),
            "confidence_loss": ("bce", weight),
            "confidence_abs_error": ("confidence_error", weight),
            "tau_probabilistic": ("expected", blocks),
            "teacher_agreement": ("agrees", labels),
            "teacher_top1_prob": ("target_top1", labels),
            "draft_top1_prob": ("draft_top1", labels),
        }
        metrics |= {name: sums[key] / divisor for name, (key, divisor) in divisors.items() if key in sums}
        return metrics
