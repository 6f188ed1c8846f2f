"""The draft of one round: backbone over [anchor, mask, …], base logits of all slots at once, then the head's rollout."""

import jax
import jax.numpy as jnp

from domino_jax.decoding.sampling import SamplingParams, choose
from domino_jax.drafter.model import Drafter
from domino_jax.nn.cache import Cache
from domino_jax.shapes import Lengths, Logits
from domino_jax.target.qwen3 import Qwen3


def draft_base(
    target: Qwen3,
    target_params: dict,
    drafter: Drafter,
    drafter_params: dict,
    cache: Cache,
    anchors: jax.Array,
    lengths: Lengths,
) -> tuple[jax.Array, Logits, Cache]:
    """One backbone pass → (z [B, M, D] of the predicting slots, base logits float32 [B, M, V], the cache).

    Only the slots that predict a token go through the lm_head: all G shifted, the last G-1 unshifted.
    """
    config = drafter.config
    masks = jnp.full((anchors.shape[0], config.block_size - 1), config.mask_token_id, jnp.int32)
    block = jnp.concatenate([anchors[:, None], masks], axis=1)
    x = target.apply({"params": target_params}, block, method="embed")
    z, cache = drafter.apply({"params": drafter_params}, cache, x, lengths, method="draft_hidden")
    z = z[:, config.first_slot :]
    return z, target.apply({"params": target_params}, z, method="unembed"), cache


def roll_out_head(
    target: Qwen3,
    target_params: dict,
    drafter: Drafter,
    drafter_params: dict,
    z: jax.Array,
    base: Logits,
    anchors: jax.Array,
    lengths: Lengths,
    keys: jax.Array,
    sampling: SamplingParams,
    scale: float,
) -> jax.Array:
    """Draft tokens int32 [B, M]: the first ones from base logits alone, the others corrected one after another.

    The hidden half of the head's first matrix is taken for all slots before the loop; the loop carries the GRU state and the
    last token. Draft i (1-based) sees the state after the anchor and drafts 1..i-1 (CONTRACT §1.3.8), and stands at absolute
    position length + i, whose noise it shares with the target.
    """
    prefix, drafts = drafter.config.pure_draft_prefix_len, drafter.config.num_drafts
    variables = {"params": drafter_params}
    positions = lengths[:, None] + 1 + jnp.arange(drafts)
    first = choose(base[:, :prefix], keys, positions[:, :prefix], sampling, scale)
    consumed = jnp.concatenate([anchors[:, None], first], axis=1)  # [B, 1 + prefix]
    halves = drafter.apply(variables, z[:, prefix:], method="head_hidden_half")

    def embed(tokens):
        return target.apply({"params": target_params}, tokens, method="embed")

    state = jnp.zeros((anchors.shape[0], drafter.config.gru_hidden_dim), jnp.float32)
    for index in range(prefix):
        state = drafter.apply(variables, state, embed(consumed[:, index]), method="head_step")

    def correct(carry, slot):
        state, token = carry
        half, base_logits, position = slot
        state = drafter.apply(variables, state, embed(token), method="head_step")
        logits = base_logits + drafter.apply(variables, half, state, method="residual")
        token = choose(logits[:, None], keys, position[:, None], sampling, scale)[:, 0]
        return (state, token), token

    slots = (halves.swapaxes(0, 1), base[:, prefix:].swapaxes(0, 1), positions[:, prefix:].T)
    _, rest = jax.lax.scan(correct, (state, consumed[:, -1]), slots)
    return jnp.concatenate([first, rest.T], axis=1)
