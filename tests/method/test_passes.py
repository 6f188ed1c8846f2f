"""Drafts in parallel passes over a block: each pass settles one more draft, and enough of them are the roll-out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.candidates import pick_candidates, with_noise
from domino_jax.method.propose import draft_base, draft_positions, read_prefix
from domino_jax.method.rollout import choose_drafts, draft_in_passes, roll_out
from domino_jax.method.settings import SamplingParams
from tests.helpers.decoding_models import make_generator, random_models

pytestmark = pytest.mark.long

PROMPTS = [[5, 9, 2, 60, 7, 7, 1], [3, 3, 8]]
HEADS = {
    "domino, prefix 2": {"pure_draft_prefix_len": 2},
    "domino, unshifted": {"shift_label": False, "pure_draft_prefix_len": 0},
    "markov rnn": {"head": "markov"},
    "dflash2": {"head": "dflash2"},
    "xpress": {"head": "xpress"},
    "xpress, shifted": {"head": "xpress", "shift_label": True},
}
CHOICES = {"greedy": (SamplingParams(), 0), "few, sampled": (SamplingParams(0.8, top_k=20), 9)}


@functools.partial(jax.jit, static_argnames=("choice", "drafts"))
def drafted(models, state, choice="greedy", drafts=None):
    """(drafts after 0, 1, … M + 1 passes, those of the roll-out), the first ones without the head."""
    sampling, count = CHOICES[choice]
    z, base, _ = draft_base(models, state, drafts)
    candidates = pick_candidates(base, models.drafter.config.only_candidates or count)
    if not sampling.kind.greedy:
        candidates = with_noise(candidates, state.keys, draft_positions(state, base.shape[1]), base.shape[-1])
    choose = functools.partial(choose_drafts, sampling=sampling)
    known, passes = read_prefix(models, state), range(1, base.shape[1] + 2)
    each = [draft_in_passes(models, known, z, candidates, count, choose).tokens for count in passes]
    return jnp.stack([choose(candidates).tokens, *each]), roll_out(models, known, z, candidates, choose).tokens


@functools.lru_cache
def started(kind: str):
    models = random_models(6, **HEADS[kind])
    return models, make_generator(models, batch_size=2).start(PROMPTS, [0, 1])


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", HEADS)
def test_a_pass_for_each_draft_is_the_roll_out_and_k_passes_settle_k_drafts(kind, choice):
    passes, loop = jax.device_get(drafted(*started(kind), choice))
    for count, drafts in enumerate(passes):
        np.testing.assert_array_equal(drafts[:, :count], loop[:, :count])
    assert (passes[-2:] == loop).all() and (passes[0] != loop).any()


@pytest.mark.parametrize("kind", HEADS)
def test_fewer_drafts_are_the_first_ones_of_a_whole_block(kind):
    """What the head reads of the block does not depend on how many drafts are wanted."""
    (whole, loop), (few, few_loop) = (drafted(*started(kind), "greedy", count) for count in (None, 3))
    np.testing.assert_array_equal(few, whole[:5, :, :3])
    np.testing.assert_array_equal(few_loop, loop[:, :3])
