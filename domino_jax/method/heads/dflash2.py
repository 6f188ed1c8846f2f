"""DFlash2's candidate selector: how well each of a slot's likeliest tokens follows the token before it.

A slot whose label is not among its candidates has nothing that the selector could choose, so the selector's term of the
loss leaves it out, as in SpecForge. The formulas are in docs/heads.md. The convolutions of public DFlash2 drafters are
in conv.py.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from domino_jax.method.candidates import largest
from domino_jax.method.config import CONVOLUTION, TRANSFORMS, DrafterConfig
from domino_jax.method.config_keys import refuse
from domino_jax.method.fields import LARGEST_RANK, field
from domino_jax.method.head import Head
from domino_jax.method.losses import EPSILON, Labels, Loss, Outputs, cross_entropy, label_sums
from domino_jax.method.pair import Pair
from domino_jax.method.sliced_loss import SlicedForward, Sums
from domino_jax.models.layers import Linear
from domino_jax.models.shapes import Hidden

CLASS = "DFlash2DraftModel"  # all that tells these folders from DFlash's


class Selector(Head):
    """Code A[y] ⊙ W_h z of the token y before the slot; it reads token ids and has no state.

    A is the predecessor codebook, the last matrix is the successor codebook, which starts as zeros, so that a new
    drafter begins as plain DFlash. Drafting and the selector's loss score `selector_top_k` candidates of a slot only,
    those with the largest base logits.
    """

    def setup(self):
        c = self.config
        self.predecessor = self.token_table(c.selector_rank)
        self.hidden_projection = Linear(c.selector_rank, dtype=self.dtype)
        self.up = self.last_matrix(kernel_init=nn.initializers.zeros)

    def z_terms(self, z: Hidden) -> jax.Array:
        """z [..., D] → W_h z [..., E]."""
        return self.hidden_projection(z)

    def codes(self, z_terms: jax.Array, x: jax.Array) -> jax.Array:
        return self.look_up(x) * z_terms


# ----------------------------------------------------------------------------------------------------------------- loss


class Choices(NamedTuple):
    """The selector's choices in the M predicting slots of n blocks, arrays [..., n, M] or [..., n, M, K].

    tokens: int32, the candidates.  scores: float32, teacher-forced.
    covered: bool, whether the label is among the candidates.
    """

    tokens: jax.Array
    scores: jax.Array
    covered: jax.Array


@dataclasses.dataclass(frozen=True)
class SelectorLoss(Loss):
    """(Σ w·CE(base) + α · Σ w·CE(selector)) / Σ w, without λ. Slots whose label is no candidate stay in the divisor.

    contiguous: False, as in the public trainers: a block may run on into the next turn.
    alpha: α.
    """

    contiguous: bool = False
    alpha: float = 1.0

    mixes = False
    # The first two are of slots whose label is a candidate, the third is their share.
    figures = Loss.figures | {
        "selector_loss": ("selector_loss", "covered_weight"),
        "selector_accuracy": ("selector_correct", "covered_weight"),
        "selector_coverage": ("covered", "labels"),
    }

    def forward(
        self, default: SlicedForward, models: Pair, base_logits: Any, labels: Labels, previous_tokens: jax.Array
    ) -> SlicedForward:
        config = models.drafter.config

        def outputs_of(params, z: Hidden, codes: jax.Array, ids: jax.Array) -> Outputs:
            base = base_logits(z[:, :, config.first_slot :])
            tokens = largest(jax.lax.stop_gradient(base), config.selector_top_k)[1]
            covered = (tokens == ids[..., None]).any(axis=-1)
            unary = jnp.take_along_axis(base, tokens, axis=-1)
            head = models.replace(drafter_params={"head": params}).head
            scores = unary + head.residual_of(codes[..., None, :], head.rows(tokens))[..., 0, :]
            return Outputs(base, base, extra=Choices(tokens, scores, covered))

        return default._replace(outputs_of=outputs_of, states=labels.ids[:, :, config.first_slot :])

    def block_sums(self, outputs: Outputs, labels: Labels) -> Sums:
        """As Loss.block_sums, of base logits [n, M, V] and choices [n, M, ...]. Both terms have the D-PACE weights of
        the base logits' losses."""
        base, choices = outputs.base, outputs.extra
        labels = Labels(*(x[:, labels.ids.shape[1] - base.shape[1] :] for x in labels))
        is_label = choices.tokens == labels.ids[..., None]
        losses = jax.nn.logsumexp(choices.scores, axis=-1) - jnp.sum(jnp.where(is_label, choices.scores, 0.0), axis=-1)
        right = jnp.take_along_axis(is_label, jnp.argmax(choices.scores, axis=-1, keepdims=True), axis=-1)[..., 0]
        weights = self.weights_of(cross_entropy(base, labels.ids), labels) * choices.covered
        return {
            **label_sums(labels),
            **{f"base_{name}": value for name, value in self.logit_sums(base, labels).items()},
            "selector_loss": jnp.sum(weights * losses),
            "selector_correct": jnp.sum(weights * right),
            "covered_weight": weights.sum(),
            "covered": jnp.sum(labels.mask * choices.covered),
        }

    def total(self, sums: Sums) -> jax.Array:
        return (sums["base_loss"] + self.alpha * sums["selector_loss"]) / (self.divisor + EPSILON)


# ---------------------------------------------------------------------------------------------------------------- files


@dataclasses.dataclass(frozen=True)
class Dflash2Config(DrafterConfig):
    """selector_rank: E, the width of the two codebooks.  selector_top_k: K, candidates of a slot."""

    selector_rank: int = field(least=1, most=LARGEST_RANK, recipe=256, recipe_name="rank", shape=True)
    selector_top_k: int = field()

    head, title, architecture = "dflash2", "DFlash2", CLASS
    known_by, module, loss = (CLASS,), Selector, SelectorLoss
    tensor_names = DrafterConfig.tensor_names | {
        "head.predecessor.weight": "candidate_selector.predecessor_codebook",
        "head.up.weight": "candidate_selector.successor_codebook",
        "head.": "candidate_selector.",
    }
    reads = (*DrafterConfig.reads, "frozen_backbone")
    only_candidates = property(lambda self: self.selector_top_k)
    new = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_top_k": 16}  # as in public drafters
    # They have no projector, are never shifted, and correct every draft.
    fixed = {"projector_type": None, "shift_label": False, "pure_draft_prefix_len": 0}
    needed, own_keys = CONVOLUTION, ("projector_type", *TRANSFORMS)

    def head_keys(self) -> tuple[dict[str, Any], dict[str, Any]]:
        # Public files have no shift_label, they are not shifted, and readers need the keys of convolutions too.
        needed = {name: getattr(self, name) for name in ("block_size", *CONVOLUTION)}
        return {}, needed | self.head_fields()

    def check(self) -> None:
        super().check()
        count, vocab = self.selector_top_k, self.vocab_size
        refuse(not 1 <= count <= vocab, "selector_top_k", f"selector_top_k {count} is not in 1..{vocab} (vocab_size)")
