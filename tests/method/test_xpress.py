"""The refiner of xPress: what each slot reads, the mixer, a new head, and the token before the anchor."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.drafters import new_drafter
from domino_jax.method.heads.xpress import XpressHead
from domino_jax.method.propose import propose
from domino_jax.method.settings import DraftSettings, SamplingParams
from tests.helpers.decoding_models import make_generator, random_models, random_prompts

BLOCK, RANK = 6, 8
TOKENS = jnp.array([[3, 9, 1, 4, 4, 7]])


def head(shifted=False):
    models = random_models(BLOCK, head="xpress", shift_label=shifted)
    return XpressHead(models.drafter.config), models.drafter_params["head"]


def codes(z, x, params=None):
    module, own = head()
    bound = module.bind({"params": params or own})
    return bound.codes(bound.z_terms(z), x)[0]


@pytest.fixture(scope="module")
def z():
    return jax.random.normal(jax.random.key(0), (1, BLOCK, 32))


def test_steps_with_lanes_give_the_codes_of_a_whole_block(z):
    """As in a tree: every lane has its own tokens before the slots."""
    module, params = head()
    paths = jnp.stack([TOKENS[0], jnp.roll(TOKENS[0], 1)])
    bound = module.bind({"params": params})
    z_terms, state = bound.z_terms(z), bound.initial_state(1, 2)
    for slot in range(BLOCK):
        state, code = bound.step(state, paths[None, :, slot], z_terms[:, slot, None])
        for lane in range(2):
            np.testing.assert_allclose(code[0, lane], codes(z, paths[None, lane])[slot], rtol=1e-4, atol=1e-5)


def test_the_mixer_reads_nothing_above_its_diagonal_and_teaches_nothing_there(z):
    params = head()[1]
    above = jnp.triu(jnp.ones((BLOCK, BLOCK)), 1)
    other = {**params, "mix": params["mix"] + 9.0 * above}
    np.testing.assert_array_equal(codes(z, TOKENS, other), codes(z, TOKENS))
    gradient = jax.grad(lambda mix: codes(z, TOKENS, {**params, "mix": mix}).sum())(params["mix"])
    assert not (gradient * above).any() and (jnp.abs(gradient) > 0).sum() == RANK * BLOCK * (BLOCK + 1) // 2


@pytest.mark.long
def test_a_new_head_mixes_nothing_and_starts_from_small_numbers():
    config = dataclasses.replace(random_models(BLOCK, head="xpress").drafter.config, xpress_rank=64)
    params = init_drafter_params(new_drafter(config), jax.random.key(0))["head"]
    assert not params.pop("mix").any()
    for leaf in jax.tree.leaves(params):
        assert abs(float(leaf.std()) - 0.02) < 0.004


@pytest.mark.parametrize("shifted", [False, True])
def test_an_unshifted_block_is_drafted_after_the_token_before_the_anchor_and_a_shifted_one_after_the_anchor(shifted):
    models = random_models(BLOCK, head="xpress", shift_label=shifted)
    state = make_generator(models, batch_size=2).start(random_prompts(2, 5, 5), [0, 1])
    drafts = jax.jit(lambda state: propose(models, state, SamplingParams(), DraftSettings(head_candidates=0))[0])
    changed = (drafts(state) != drafts(state.replace(before=(state.before + 7) % 64))).any()
    assert changed != shifted
    assert (drafts(state) != drafts(state.replace(anchors=(state.anchors + 7) % 64))).any()
