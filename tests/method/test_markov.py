"""The Markov heads: the same code step by step and all at once, first values, and the slots that a token reaches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.heads.markov import MARKOV_KINDS, MarkovHead
from tests.helpers.models import random_tokens, tiny_drafter, tiny_target

CONFIDENT = {"enable_confidence_head": True, "confidence_head_with_markov": True}


@functools.lru_cache
def drafter(kind: str, **choices):
    return tiny_drafter(tiny_target().config, head="markov", layers=1, markov_head_type=kind, **choices)


@functools.lru_cache
def head_alone(kind: str, **choices):
    """A head of width 32 and rank 6 with its random weights."""
    made = drafter(kind, **choices)
    return MarkovHead(made.config), {"params": made.params["head"]}


def slots(blocks=3, drafts=4):
    """z [3, 4, 32] and the tokens before the slots, int32 [3, 4]."""
    z = np.random.default_rng(0).standard_normal((blocks, drafts, 32), dtype=np.float32)
    return jnp.asarray(z), random_tokens((blocks, drafts))


@pytest.mark.parametrize("kind", MARKOV_KINDS)
def test_a_step_with_lanes_gives_the_codes_of_all_slots_at_once(kind):
    """The state goes from slot to slot: started again in every one, an rnn would give other codes from slot 1 on."""
    head, params = head_alone(kind)
    z, tokens = slots()
    bound = head.bind(params)
    z_terms = bound.z_terms(z)
    whole = bound.codes(z_terms, tokens)
    start = state = bound.initial_state(3, 2)
    for slot in range(4):
        lanes = jnp.broadcast_to(tokens[:, slot, None], (3, 2))
        _, forgetful = bound.step(start, lanes, z_terms[:, slot, None])
        state, code = bound.step(state, lanes, z_terms[:, slot, None])
        for lane in range(2):
            np.testing.assert_allclose(code[:, lane], whole[:, slot], atol=1e-6)
        assert bool(jnp.allclose(forgetful, code)) == (kind != "rnn" or slot == 0)


@pytest.mark.long
@pytest.mark.parametrize("kind", MARKOV_KINDS)
def test_a_new_head_is_normal_with_zero_biases(kind):
    params = init_drafter_params(drafter(kind, **CONFIDENT).module, jax.random.key(0))["head"]
    leaves = {"/".join(part.key for part in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    assert {"predecessor/embedding", "up/kernel", "confidence_proj/kernel", "confidence_proj/bias"} <= set(leaves)
    for name, leaf in leaves.items():
        spread = float(jnp.std(leaf))
        assert spread == 0.0 if name.endswith("bias") else 0.012 < spread < 0.028, name
