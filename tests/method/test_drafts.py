"""The draft of a round: what training teaches, slot after slot or in passes, among all tokens or a few."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method import rollout
from domino_jax.method.candidates import pick_candidates, with_noise
from domino_jax.method.propose import draft_base, draft_positions, propose, read_prefix, roll_out_head
from domino_jax.method.rollout import choose_drafts, draft_in_passes, roll_out
from domino_jax.method.sampling import CHUNK, choose, largest
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.method.step import correct_logits
from tests.helpers.decoding_models import (
    DRAFTERS,
    VOCAB,
    make_generator,
    random_models,
    with_window,
)

GREEDY, WARM = SamplingParams(), SamplingParams(0.8, top_k=20, top_p=0.9)
PROMPTS = [[5, 9, 2, 60, 7, 7, 1], [3, 3, 8]]
FEW = 4
KINDS = {
    **DRAFTERS,
    "windowed": {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 4, "is_causal": True},
    "markov rnn": {"head": "markov"},
    "dflash2": {"head": "dflash2"},
    "xpress": {"head": "xpress"},
    "xpress, shifted": {"head": "xpress", "shift_label": True},
}


@functools.lru_cache
def started(kind: str, block_size: int = 6):
    """The models and a state of two prompts."""
    models = random_models(block_size, **KINDS[kind])
    return models, make_generator(models, batch_size=2).start(PROMPTS, [0, 1])


@functools.partial(jax.jit, static_argnames=("sampling", "settings"))
def drafted(models, state, sampling=GREEDY, settings=DraftSettings(draft_sharpness=1.0)):  # noqa: B008
    return *propose(models, state, sampling, settings), *draft_base(models, state)[:2]


# ------------------------------------------------------------------------------------------------- what is taught


@jax.jit
def taught(models, tokens, anchor, consumed):
    """The training path on one row: block hidden z [G, D], base and final logits [G, V] of the block at `anchor`."""
    config = models.drafter.config
    features = models.run_target(tokens, tap_layers=config.target_layer_ids)["features"]
    block = jnp.full((1, 1, config.block_size), config.mask_token_id).at[0, 0, 0].set(consumed[0])
    inputs = models.head_inputs(consumed[: config.num_drafts])[None, None]
    z, codes = models.bound(features, models.embed(block), anchor[None, None], jnp.ones((1, 1), bool), inputs)
    base = models.unembed(z)
    return z[0, 0], base[0, 0], correct_logits(models.drafter, models.drafter_params, base, codes)[0, 0]


@pytest.mark.long
@pytest.mark.parametrize("kind", [*DRAFTERS, "windowed"])
def test_the_draft_is_the_argmax_of_the_teacher_forced_logits_on_its_own_tokens(kind):
    models, state = started(kind)
    config = models.drafter.config
    drafts, _, z, base = drafted(models, state)
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
    models, state = started("shifted, prefix 1", 5)
    kind = {"layer_types": ("sliding_attention",), "sliding_window": 5, "is_causal": False}
    sliding = models.replace(drafter=models.drafter.clone(config=dataclasses.replace(models.drafter.config, **kind)))
    whole, expected = (drafted(each, state)[0].tolist() for each in (models, sliding))
    assert whole != expected
    assert drafted(with_window(models, 5), state)[0].tolist() == expected


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_sampled_draft_shares_the_targets_noise_at_its_own_position(scale):
    models, state = started("shifted, prefix 1")
    sampling = SamplingParams(1.0)
    drafts, _, _, base = drafted(models, state, sampling, DraftSettings(use_head=False, draft_sharpness=scale))
    positions = jnp.array([[8], [4]]) + jnp.arange(6)
    assert drafts.tolist() == choose(base * scale, state.keys, positions, sampling).tolist()
    assert drafts.tolist() != choose(base * scale, state.keys, positions + 1, sampling).tolist()


# ------------------------------------------------------------------------------------------------- parallel passes


@functools.partial(jax.jit, static_argnames=("sampling", "few", "drafts"))
def in_passes(models, state, sampling=GREEDY, few=0, drafts=None):
    """(drafts after 0, 1, … M + 1 passes, those of the roll-out), the first ones without the head."""
    z, base, _ = draft_base(models, state, drafts)
    candidates = pick_candidates(base, models.drafter.config.only_candidates or few)
    if not sampling.kind.greedy:
        candidates = with_noise(candidates, state.keys, draft_positions(state, base.shape[1]), base.shape[-1])
    choose = functools.partial(choose_drafts, sampling=sampling)
    prefix, passes = read_prefix(models, state), range(1, base.shape[1] + 2)
    each = [draft_in_passes(models, prefix, z, candidates, count, choose).tokens for count in passes]
    return jnp.stack([choose(candidates).tokens, *each]), roll_out(models, prefix, z, candidates, choose).tokens


IN_PASSES = [kind for kind in KINDS if kind not in ("shifted, prefix 1", "windowed")]


@pytest.mark.long
@pytest.mark.parametrize(("sampling", "few"), [(GREEDY, 0), (SamplingParams(0.8, top_k=20), 9)], ids=["greedy", "few"])
@pytest.mark.parametrize("kind", IN_PASSES)
def test_a_pass_for_each_draft_is_the_roll_out_and_k_passes_settle_k_drafts(kind, sampling, few):
    passes, loop = jax.device_get(in_passes(*started(kind), sampling, few))
    for count, drafts in enumerate(passes):
        np.testing.assert_array_equal(drafts[:, :count], loop[:, :count])
    assert (passes[-2:] == loop).all() and (passes[0] != loop).any()


@pytest.mark.long
@pytest.mark.parametrize("kind", IN_PASSES)
def test_fewer_drafts_are_the_first_ones_of_a_whole_block(kind):
    """What the head reads of the block does not depend on how many drafts are wanted."""
    (whole, loop), (few, few_loop) = (in_passes(*started(kind), drafts=count) for count in (None, 3))
    np.testing.assert_array_equal(few, whole[:5, :, :3])
    np.testing.assert_array_equal(few_loop, loop[:, :3])


# -------------------------------------------------------------------------------------------------- few candidates


@functools.partial(jax.jit, static_argnames=("sampling", "scale"))
def among_few(models, state, sampling, scale):
    """Chains with 0, FEW and too many candidates; with FEW as accelerators draft it; with the base logits but FEW at
    -inf; the base logits."""
    z, base, _ = draft_base(models, state)
    edge = jax.lax.top_k(base, FEW)[0][:, :, -1:]

    def chain(base, count):
        settings = DraftSettings(draft_sharpness=scale, head_candidates=count)
        return roll_out_head(models, state, z, base, sampling, settings).tokens

    masked = chain(jnp.where(base >= edge, base, -jnp.inf), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "correct_by_device", rollout.correct_slots_ahead)
        ahead = chain(base, FEW)
    return *(chain(base, count) for count in (0, FEW, VOCAB + 1)), ahead, masked, base


CASES = [(kind, GREEDY, 1.0) for kind in DRAFTERS]
CASES += [("shifted, prefix 1", sampling, scale) for sampling, scale in ((WARM, 1.0), (WARM, 0.5))]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "sampling", "scale"), CASES)
def test_the_draft_is_the_best_of_the_candidates_and_with_all_tokens_the_whole_vocabularys(kind, sampling, scale):
    """Against the roll-out over the whole vocabulary, and the same with all other base logits at -inf. The head is made
    strong, so that it moves the likeliest token out of a few candidates."""
    models, state = started(kind, 4)
    head = models.drafter_params["head"]
    strong = {**head, "up": jax.tree.map(lambda kernel: 4 * kernel, head["up"])}
    models = models.replace(drafter_params={**models.drafter_params, "head": strong})
    whole, few, every, ahead, masked, base = among_few(models, state, sampling, scale)
    assert every.tolist() == whole.tolist()
    assert few.tolist() == ahead.tolist() == masked.tolist() != whole.tolist()
    likeliest = np.argsort(-np.asarray(base), axis=-1)[:, :, :FEW]
    assert (likeliest == np.asarray(few)[:, :, None]).any(-1).all()


@pytest.mark.parametrize("size", [3 * CHUNK, 9 * CHUNK + 5])
def test_the_largest_are_found_without_a_sort_of_all(size):
    """Few distinct values, so that ties decide, and whole chunks of -inf; three candidates of two rows."""
    values = np.random.default_rng(size).integers(0, 30, (2, 1, size)).astype(np.float32)
    values[0, 0, CHUNK:] = -np.inf
    values[1, 0, : 2 * CHUNK] = -np.inf
    expected = jax.lax.top_k(values, 3)
    for ours, theirs in zip(largest(jnp.asarray(values), 3), expected, strict=True):
        assert ours.tolist() == theirs.tolist()
    assert largest(jnp.full((1, size), -jnp.inf), 3)[1].tolist() == [[0, 1, 2]]


# ------------------------------------------------------------------------------------------------ DFlash2's selector

TRANSFORMS = {"output_multiplier": 1.5, "final_logit_softcapping": 2.0}


@pytest.mark.parametrize("changes", [{}, TRANSFORMS], ids=["plain", "transformed"])
def test_each_draft_of_a_selector_is_the_best_candidate_after_the_one_before_it(changes):
    """In numpy; transformed logits are transformed before they are compared."""
    models, state = started("dflash2")
    plain = drafted(models, state)[3]
    config = dataclasses.replace(models.drafter.config, **changes)
    models = models.replace(drafter=models.drafter.clone(config=config))
    drafts, _, z, base = jax.device_get(drafted(models, state))
    if changes:
        np.testing.assert_allclose(base, 2.0 * np.tanh(1.5 * np.asarray(plain) / 2.0), atol=1e-5)
    head = jax.tree.map(np.asarray, models.drafter_params["head"])
    for row, token in enumerate(state.anchors.tolist()):
        for slot in range(drafts.shape[1]):
            ids = np.argsort(-base[row, slot])[: config.selector_top_k]
            code = head["predecessor"]["embedding"][token] * (z[row, slot] @ head["hidden_projection"]["kernel"])
            token = ids[(base[row, slot, ids] + code @ head["up"]["kernel"][:, ids]).argmax()]
            assert drafts[row, slot] == token
    assert (drafts != base.argmax(-1)).any()
