"""propose.py: the draft that the loop makes is the one that training teaches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.propose import draft_base, propose
from domino_jax.method.sampling import choose
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.method.step import correct_logits
from tests.helpers.decoding_models import make_generator, random_models, with_window

GREEDY, WARM = SamplingParams(), SamplingParams(1.0)
PROMPTS = [[5, 9, 2, 60, 7, 7, 1], [3, 3, 8]]
WINDOWED = (("layer_types", ("full_attention", "sliding_attention")), ("sliding_window", 4))
DRAFTERS = {
    "shifted, prefix 1": {"shift_label": True, "pure_draft_prefix_len": 1},
    "shifted, prefix 2, window 4": {"shift_label": True, "pure_draft_prefix_len": 2, **dict(WINDOWED)},
    "unshifted, prefix 0": {"shift_label": False, "pure_draft_prefix_len": 0},
}


@functools.lru_cache
def started(kind: str):
    models = random_models(5, **DRAFTERS[kind])
    return models, make_generator(models, batch_size=2).start(PROMPTS, [0, 1])


@functools.partial(jax.jit, static_argnames=("sampling", "settings"))
def drafted(models, state, sampling=GREEDY, settings=DraftSettings(draft_sharpness=1.0)):  # noqa: B008
    return *propose(models, state, sampling, settings), *draft_base(models, state)[:2]


@jax.jit
def taught(models, tokens, anchor, consumed):
    """The training path on one row: block hidden z [G, D], base and final logits [G, V] of the block at `anchor`."""
    config = models.drafter.config
    features = models.run_target(tokens, tap_layers=config.target_layer_ids)["features"]
    block = jnp.full((1, 1, config.block_size), config.mask_token_id).at[0, 0, 0].set(consumed[0])
    inputs = models.head_inputs(consumed[: config.num_drafts])[None, None]
    arguments = (features, models.embed(block), anchor[None, None], jnp.ones((1, 1), bool), inputs)
    z, codes = models.drafter.apply({"params": models.drafter_params}, *arguments)
    base = models.unembed(z)
    final = correct_logits(models.drafter, models.drafter_params, base, codes)
    return z[0, 0], base[0, 0], final[0, 0]


@pytest.mark.long
@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_draft_is_the_argmax_of_the_teacher_forced_logits_on_its_own_tokens(kind):
    models, state = started(kind)
    config = models.drafter.config
    drafts, _, z, base = drafted(models, state)
    assert drafts.shape == (2, 5 if config.shift_label else 4)
    for row, prompt in enumerate(PROMPTS):
        anchor = int(state.anchors[row])
        consumed = jnp.array([anchor, *drafts[row].tolist()][: config.block_size])
        tokens = jnp.array([[*prompt, anchor] + [0] * (7 - len(prompt))])
        true_z, true_base, final = taught(models, tokens, jnp.int32(len(prompt)), consumed)
        np.testing.assert_allclose(z[row], true_z[config.first_slot :], atol=2e-5)
        np.testing.assert_allclose(base[row], true_base[config.first_slot :], atol=2e-5)
        assert drafts[row].tolist() == jnp.argmax(final, -1)[config.first_slot :].tolist()


@pytest.mark.long
def test_a_draft_window_is_that_of_a_drafter_with_sliding_layers():
    models, state = started("shifted, prefix 1")
    kind = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 5, "is_causal": False}
    config = dataclasses.replace(models.drafter.config, **kind)
    sliding = models.replace(drafter=models.drafter.clone(config=config))
    expected = drafted(sliding, state)
    assert (expected[0] != drafted(models, state)[0]).any()
    assert drafted(with_window(models, 5), state)[0].tolist() == expected[0].tolist()
    assert drafted(with_window(models, 5, 9), state)[0].tolist() == drafted(models, state)[0].tolist()


@pytest.mark.long
def test_a_finished_row_without_room_for_a_block_keeps_the_text_that_a_window_reads():
    """A cache that has not grown to a ring must not turn."""
    models, state = started("shifted, prefix 1")
    slots = state.draft_cache[0][0].shape[2]
    models = with_window(models, 2 * slots)
    block = jnp.zeros((2, models.drafter.config.block_size, models.target.config.hidden_size))
    after = models.bound.draft_hidden(state.draft_cache, block, jnp.array([slots, slots - 1]))[1]
    for before, written in zip(jax.tree.leaves(state.draft_cache), jax.tree.leaves(after), strict=True):
        assert (before == written).all()


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_sampled_draft_shares_the_targets_noise_at_its_own_position(scale):
    models, state = started("shifted, prefix 1")
    drafts, _, _, base = drafted(models, state, WARM, DraftSettings(use_head=False, draft_sharpness=scale))
    positions = jnp.array([[8, 9, 10, 11, 12], [4, 5, 6, 7, 8]])
    assert drafts.tolist() == choose(base * scale, state.keys, positions, WARM).tolist()
    assert drafts.tolist() != choose(base * scale, state.keys, positions + 1, WARM).tolist()
