"""One pass counts the drafts that a decoding would accept from every place of an answer of the target.

The target's choice after a prefix does not depend on the drafter (docs/method.md). So for a given answer the accepted
drafts of a round that starts at a place are a fixed number, and the rounds of a decoding are a walk over these numbers
(decoding/acceptance.py). Drafts are made by the functions of a round (propose.py, rollout.py), for many places at once.

A batch has packed rows, like a training step's, and the places of answers in them:

    tokens, positions, documents  int32 [B, S]
    anchors  int32 [B, A], places of answers' tokens, none at its document's start; those to judge come first
    ends     int32 [B, A], the place after the last token of the anchor's answer; 0 where there is nothing to judge
    seeds, noises, temperature, top_k, top_p, min_p  [B, A] of the anchor's request; not read where all are greedy
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from domino_jax.method import blocks
from domino_jax.method.pair import Pair
from domino_jax.method.propose import Places, predicting_logits, roll_out_head, slot_candidates
from domino_jax.method.rollout import GREEDY, Drafted, choose_scored_drafts
from domino_jax.method.sampling import RowSampling, Sampling, choice_values, position_noise, request_keys
from domino_jax.method.settings import SAMPLING_VALUES, DraftSettings, SamplingKind
from domino_jax.method.step import Batch, target_pass
from domino_jax.models.shapes import Features
from domino_jax.models.slices import BLOCKS, cut, join

OF_ANCHORS = ("anchors", "ends", "seeds", "noises", *SAMPLING_VALUES)


class Accepted(NamedTuple):
    """drafts: int32 [B, A], how many of a round's drafts the target accepts; 0 where there is nothing to judge.
    backbone: the same with the head left out; None for drafters without a backbone.
    log_q: float32 [B, A, M], how likely the drafter finds each of its drafts, given those before it.

    With fewer drafts, w, a round accepts min(drafts, w): its drafts are the first ones of the longest round.
    """

    drafts: jax.Array
    backbone: jax.Array | None
    log_q: jax.Array


def accepted_drafts(
    models: Pair, batch: Batch, settings: DraftSettings, kind: SamplingKind, slice_blocks: int = BLOCKS
) -> Accepted:
    """Counts the drafts that a round from each anchor accepts, with all of its drafts or settings.num_drafts if more.

    Args:
        settings: of a chain.  kind: of all requests.
        slice_blocks: anchors of a row whose blocks and logits are in memory at once.
    """
    config = models.drafter.config
    settings = dataclasses.replace(settings, num_drafts=max(config.num_drafts, settings.num_drafts or 0))
    features, _ = target_pass(models.target, models.target_params, batch, config.target_layer_ids)
    ahead = 1 + jnp.arange(settings.num_drafts)
    if config.has_backbone:
        draft = _block_drafts(models, features, batch, settings, kind)
    else:
        draft = _chain_drafts(models, features, batch, settings, kind)

    def judge(here: Batch) -> Accepted:
        with_head, alone = draft(here)
        places = here["anchors"][:, :, None] + ahead
        inside, labels = places < here["ends"][:, :, None], blocks.gather_positions(batch["tokens"], places)

        def accepted(drafted: Drafted) -> jax.Array:
            right = (drafted.tokens.reshape(labels.shape) == labels) & inside
            return jnp.cumprod(right.astype(jnp.int32), axis=-1).sum(axis=-1)

        backbone = None if alone is None else accepted(alone)
        return Accepted(accepted(with_head), backbone, with_head.log_q.reshape(labels.shape))

    return _in_slices(judge, batch, slice_blocks)


class TargetChoice(NamedTuple):
    """The target's choice at each anchor.

    margin: float32 [B, A], how far log p + g of the anchor's token is below that of the choice; 0 for the choice.
    token: int32 [B, A], the choice.
    """

    margin: jax.Array
    token: jax.Array


def target_choice(models: Pair, batch: Batch, kind: SamplingKind, slice_blocks: int = BLOCKS) -> TargetChoice:
    """Computes the choice of the target at each anchor, given the text before it.

    Rounding explains a near tie (docs/method.md); where the margin is more, the answer is not this target's for this
    request. The drafter is not read.
    """
    hidden = target_pass(models.target, models.target_params, batch, (), with_hidden=True)[1]
    gathered = models.with_gathered_head()

    def judge(here: Batch) -> TargetChoice:
        (at, sampling), shape = _places(batch, here, kind), here["anchors"].shape
        logits = gathered.unembed(_before(hidden, here)[:, None])
        noise = None if kind.greedy else position_noise(at.keys, at.lengths[:, None], logits.shape[-1])
        values = choice_values(logits, noise, sampling)[:, 0]
        value = jnp.take_along_axis(values, at.anchors[:, None], axis=-1)[:, 0]
        margin = (values.max(axis=-1) - value).reshape(shape) * (here["ends"] > 0)
        return TargetChoice(margin, values.argmax(axis=-1).astype(jnp.int32).reshape(shape))

    return _in_slices(judge, batch, slice_blocks)


def _in_slices(function: Callable[[Batch], Any], batch: Batch, size: int) -> Any:
    """function(arrays [B, n]) → arrays [B, n, ...], by `size` anchors at a time up to the last one to judge: arrays
    [B, A, ...], zeros after that."""
    count = batch["ends"].shape[1]
    parts = {name: cut(batch[name], 1, min(size, count)) for name in OF_ANCHORS}
    used = jnp.any(parts["ends"] > 0, axis=(1, 2)).sum()
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], parts))
    out = jax.tree.map(lambda x: jnp.zeros((len(parts["ends"]), *x.shape), x.dtype), shapes)

    def step(index: jax.Array, out: Any) -> Any:
        here = function(jax.tree.map(lambda x: x[index], parts))
        return jax.tree.map(lambda whole, part: whole.at[index].set(part), out, here)

    return jax.tree.map(lambda x: join(x, 1, count), jax.lax.fori_loop(0, used, step, out))


def _places(batch: Batch, here: Batch, kind: SamplingKind) -> tuple[Places, Sampling]:
    """The rounds of a slice [B, n] as R = B · n places, and how their requests sample."""
    anchors = here["anchors"]

    def tokens(places: jax.Array) -> jax.Array:
        return jnp.take_along_axis(batch["tokens"], jnp.maximum(places, 0), axis=1).reshape(-1)

    lengths = jnp.take_along_axis(batch["positions"], anchors, axis=1)
    keys, sampling = None, GREEDY
    if not kind.greedy:
        flat = {name: here[name].reshape(-1) for name in ("seeds", "noises", *SAMPLING_VALUES)}
        keys = request_keys(flat["seeds"], flat["noises"])
        sampling = RowSampling(*(flat[name] for name in SAMPLING_VALUES), jnp.zeros_like(flat["top_k"]), kind=kind)
    return Places(tokens(anchors), tokens(anchors - 1), lengths.reshape(-1), keys), sampling


def _drafts_of(models: Pair, at: Places, base: jax.Array, sampling: Sampling, settings: DraftSettings) -> Drafted:
    """The drafts of base logits [R, M, N], without a head."""
    candidates = slot_candidates(models, at, base, 0, sampling, settings)
    return choose_scored_drafts(candidates, sampling, settings.draft_sharpness)


def _block_drafts(
    models: Pair, features: Features, batch: Batch, settings: DraftSettings, kind: SamplingKind
) -> Callable[[Batch], tuple[Drafted, Drafted | None]]:
    """Makes a function: a slice of anchors → the drafts of its R blocks with the head, and by the backbone alone."""
    config, positions = models.drafter.config, batch["positions"]
    context = models.bound.context_of(features, positions)
    gathered, count = models.with_gathered_head(), settings.num_drafts

    def draft(here: Batch) -> tuple[Drafted, Drafted | None]:
        anchors, keep = here["anchors"], here["ends"] > 0
        block = blocks.block_tokens(batch["tokens"], anchors, keep, config.block_size, config.mask_token_id)
        z = models.bound.block_hidden(context, models.embed(block), anchors, keep, positions)
        z = z[:, :, config.first_slot - config.extra_slots :]
        z = z.reshape(-1, config.extra_slots + config.num_drafts, z.shape[-1])
        at, sampling = _places(batch, here, kind)
        base = predicting_logits(gathered, z, count, config.has_head)
        alone = _drafts_of(models, at, base, sampling, settings)
        if not config.has_head:
            return alone, alone
        return roll_out_head(models, at, z, base, sampling, settings, choose_scored_drafts), alone

    return draft


def _chain_drafts(
    models: Pair, features: Features, batch: Batch, settings: DraftSettings, kind: SamplingKind
) -> Callable[[Batch], tuple[Drafted, None]]:
    """`_block_drafts` without a backbone: its passes read the text's tokens as in training.

    Up to the first rejected draft those are its drafts, and log_q of the drafts after it is given the text. A sliding
    window stays at the row, where in decoding it moves along with the drafts.
    """
    states = models.row_states(features, batch, settings.num_drafts)

    def draft(here: Batch) -> tuple[Drafted, None]:
        at, sampling = _places(batch, here, kind)
        return _drafts_of(models, at, models.bound.logits(_before(states, here)), sampling, settings), None

    return draft


def _before(rows: jax.Array, here: Batch) -> jax.Array:
    """rows [B, S, ...] one place before each anchor of a slice, [R, ...]."""
    places = jnp.maximum(here["anchors"] - 1, 0)
    return jax.vmap(lambda rows, places: rows[places])(rows, places).reshape(-1, *rows.shape[2:])
