"""The draft of one round: backbone over [anchor, mask, …], base logits of all slots, then the head's rollout."""

import dataclasses

import jax
import jax.numpy as jnp

from domino_jax.decoding.loop import DecodeState
from domino_jax.decoding.models import Models
from domino_jax.decoding.sampling import SamplingParams, choose
from domino_jax.nn.cache import Cache
from domino_jax.shapes import Hidden, Logits


@dataclasses.dataclass(frozen=True)
class DraftSettings:
    """use_head False drafts from base logits alone: a DFlash drafter, or the ablation of a Domino one.

    scale: the constant c of argmax(c·log q + g) at temperature > 0 (DESIGN §4): 1 shares the target's noise at full
    weight, a large c is the greedy draft. It changes the speed, never the text.
    """

    use_head: bool = True
    scale: float = 1.0


def propose(
    models: Models, state: DecodeState, sampling: SamplingParams, settings: DraftSettings
) -> tuple[jax.Array, Cache]:
    """Draft tokens int32 [B, M], and the draft cache with the block's rows behind the committed length."""
    z, base, cache = draft_base(models, state)
    if settings.use_head:
        return roll_out_head(models, state, z, base, sampling, settings), cache
    return choose(base, state.keys, draft_positions(state, base.shape[1]), sampling, settings.scale), cache


def draft_positions(state: DecodeState, drafts: int) -> jax.Array:
    """Absolute positions int32 [B, M] of the drafts: the anchor stands at `lengths`, draft i at lengths + i."""
    return state.lengths[:, None] + 1 + jnp.arange(drafts)


def draft_base(models: Models, state: DecodeState) -> tuple[Hidden, Logits, Cache]:
    """One backbone pass → (z [B, M, D] of the predicting slots, base logits float32 [B, M, V], the cache).

    Only the slots that predict a token go through the lm_head: all G shifted, the last G-1 unshifted.
    """
    config = models.drafter.config
    masks = jnp.full((state.anchors.shape[0], config.block_size - 1), config.mask_token_id, jnp.int32)
    block = jnp.concatenate([state.anchors[:, None], masks], axis=1)
    z, cache = models.run_drafter("draft_hidden", state.draft_cache, models.embed(block), state.lengths)
    z = z[:, config.first_slot :]
    return z, models.unembed(z), cache


def roll_out_head(
    models: Models,
    state: DecodeState,
    z: Hidden,
    base: Logits,
    sampling: SamplingParams,
    settings: DraftSettings,
) -> jax.Array:
    """Draft tokens int32 [B, M]: the first ones from base logits alone, the others corrected one after another.

    The hidden half of the head's first matrix is taken for all slots before the loop; the loop carries the GRU state
    and the last token. Draft i sees the state after the anchor and drafts 1..i-1 (CONTRACT §1.3.8), and shares the
    target's noise at its absolute position.
    """
    prefix = models.drafter.config.pure_draft_prefix_len
    positions = draft_positions(state, base.shape[1])
    first = choose(base[:, :prefix], state.keys, positions[:, :prefix], sampling, settings.scale)
    consumed = jnp.concatenate([state.anchors[:, None], first], axis=1)  # [B, 1 + prefix]
    hidden = jnp.zeros((z.shape[0], models.drafter.config.gru_hidden_dim), jnp.float32)
    for index in range(prefix):
        hidden = models.run_drafter("head_step", hidden, models.embed(consumed[:, index]))

    def correct(carry, slot):
        hidden, token = carry
        half, base_logits, position = slot
        hidden = models.run_drafter("head_step", hidden, models.embed(token))
        logits = base_logits + models.run_drafter("residual", half, hidden)
        token = choose(logits[:, None], state.keys, position[:, None], sampling, settings.scale)[:, 0]
        return (hidden, token), token

    halves = models.run_drafter("head_hidden_half", z[:, prefix:])
    slots = (halves.swapaxes(0, 1), base[:, prefix:].swapaxes(0, 1), positions[:, prefix:].T)
    _, rest = jax.lax.scan(correct, (hidden, consumed[:, -1]), slots)
    return jnp.concatenate([first, rest.T], axis=1)
