"""What every head promises: one code slot by slot and all at once, first values, and what a token reaches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.heads.domino import DominoHead
from domino_jax.method.propose import propose
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.models.quantized import quantize, transposed
from tests.helpers.decoding_models import make_generator, random_models, random_prompts
from tests.helpers.models import random_tokens, run_blocks, tiny_drafter, tiny_target

HEADS = {
    "domino": {},
    **{f"markov {kind}": {"head": "markov", "markov_head_type": kind} for kind in ("vanilla", "gated", "rnn")},
    "dflash2": {"head": "dflash2", "shift_label": False},
    "xpress": {"head": "xpress", "shift_label": False},
}
STATEFUL = ("domino", "markov rnn", "xpress")
ANCHORS = [[3, 9]] * 2  # of two rows of 16 tokens


@functools.lru_cache
def drafter(kind: str, **choices):
    return tiny_drafter(tiny_target().config, layers=1, **HEADS[kind], **choices)


@functools.lru_cache
def bound(kind: str, dtype=jnp.float32):
    """The head alone with its random weights; blocks have 4 slots."""
    made = drafter(kind)
    return made.config.module(made.config, dtype).bind({"params": made.params["head"]})


def slots(kind: str):
    """z [3, 4, 32] and what the head reads of the tokens before the slots, [3, 4, 32] or [3, 4]."""
    z, x = (np.random.default_rng(seed).standard_normal((3, 4, 32), dtype=np.float32) for seed in (0, 1))
    return jnp.asarray(z), jnp.asarray(x) if drafter(kind).config.reads_embeddings else random_tokens((3, 4))


@pytest.mark.parametrize("kind", HEADS)
def test_steps_with_lanes_give_the_codes_of_all_slots_at_once(kind):
    """The state goes from slot to slot: a head with one that starts again has other codes from slot 1 on."""
    head, (z, x) = bound(kind), slots(kind)
    terms = head.z_terms(z)
    whole = head.codes(terms, x)
    start = state = head.initial_state(3, 2)
    for slot in range(4):
        lanes = jnp.broadcast_to(x[:, slot, None], (3, 2, *x.shape[2:]))
        _, forgetful = head.step(start, lanes, terms[:, slot, None])
        state, code = head.step(state, lanes, terms[:, slot, None])
        for lane in range(2):
            np.testing.assert_allclose(code[:, lane], whole[:, slot], rtol=1e-4, atol=1e-5)
        assert bool(jnp.allclose(forgetful, code)) == (kind not in STATEFUL or slot == 0)


@pytest.mark.long
@pytest.mark.parametrize("kind", HEADS)
def test_a_new_drafter_follows_the_initialisation_of_the_contract(kind):
    """Norms are one; linears and tables normal(0, 0.02); the GRU uniform ±1/√U; biases, xPress's mixer and DFlash2's
    last matrix zero; convolutions the identity."""
    confident = {"enable_confidence_head": True, "confidence_head_with_markov": True} if "markov" in kind else {}
    params = jax.device_get(init_drafter_params(drafter(kind, **confident).module, jax.random.key(0)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = "/".join(part.key for part in path)
        if name.endswith("scale"):
            assert (leaf == 1).all(), name
        elif name.endswith("base_kernel"):
            assert (leaf[:, 0] == 1).all() and not leaf[:, 1:].any()
        elif "gru" in name:
            bound = 10**-0.5
            assert 0.95 * bound < abs(leaf).max() <= bound and abs(leaf.std() - bound / 3**0.5) < 0.1 * bound
        elif name.endswith(("bias", "mix", "kernel_projection/kernel")) or (kind, path[1].key) == ("dflash2", "up"):
            assert not leaf.any(), name
        else:
            assert 0.012 < leaf.std() < 0.028 and abs(leaf.mean()) < 0.01, name
    assert not confident or {"kernel", "bias"} == set(params["head"]["confidence_proj"])


# ------------------------------------------------------------------------------------------------- the last matrix


@pytest.mark.parametrize("kind", HEADS)
def test_the_residual_of_a_few_tokens_is_that_of_the_whole_vocabulary(kind):
    """Two codes of one slot, five tokens."""
    head, (z, x) = bound(kind), slots(kind)
    codes, tokens = head.codes(head.z_terms(z), x)[:2, 0], jnp.array([7, 0, 79, 7, 3])
    np.testing.assert_allclose(head.residual_of(codes, head.rows(tokens)), head.residual(codes)[:, tokens], atol=1e-4)


@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_last_matrix_stored_by_rows_as_on_accelerators_is_the_same_matrix(eight_bits):
    params, config = drafter("domino").params["head"], drafter("domino").config
    kernel = quantize(params["up"]["kernel"], "int8") if eight_bits else params["up"]["kernel"]
    codes = jnp.asarray(np.random.default_rng(1).standard_normal((2, 6)), jnp.float32)
    stored = ({"kernel": kernel}, {"rows": transposed(kernel)})
    by_column, by_row = (DominoHead(config).bind({"params": params | {"up": up}}) for up in stored)
    assert (by_column.rows(jnp.array([7, 0, 79])) == by_row.rows(jnp.array([7, 0, 79]))).all()
    np.testing.assert_allclose(by_column.residual(codes), by_row.residual(codes), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------- what a token reaches


@pytest.mark.parametrize(("shift_label", "prefix"), [(True, 0), (True, 1), (True, 2), (False, 0), (False, 1)])
def test_a_token_reaches_the_final_logits_from_its_slot_on_and_none_before_suffix_start(shift_label, prefix):
    """Token a + j, shifted: slots >= max(j, suffix_start); unshifted: >= max(j + 1, suffix_start). Base logits never
    move, and before suffix_start they are the final ones."""
    target = tiny_target()
    made = tiny_drafter(target.config, shift_label, prefix, layers=1)
    tokens, start = random_tokens((2, 16)), made.config.suffix_start
    before = run_blocks(target, made, tokens, ANCHORS)
    same = (before["final"] == before["base"]).all(axis=(0, 1, 3))
    assert same.tolist() == [slot < start for slot in range(4)]
    for j in (1, 2, 3):
        after = run_blocks(target, made, tokens.at[:, 9 + j].add(1), ANCHORS)
        changed = (before["final"] != after["final"])[:, 1].any((0, 2)).tolist()
        assert changed == [slot >= max(j + (not shift_label), start) for slot in range(4)], f"token a+{j}"
        assert (before["base"] == after["base"]).all()


def test_a_plain_dflash_drafter_has_no_head_and_its_final_logits_are_the_base():
    target = tiny_target()
    plain = tiny_drafter(target.config, head="none", layers=1)
    assert set(plain.params) == {"backbone"}
    out = run_blocks(target, plain, random_tokens((2, 16)), ANCHORS)
    assert (out["final"] == out["base"]).all()


def test_the_state_stays_float32_in_a_bfloat16_head():
    assert bound("domino", jnp.bfloat16).prefix_states(slots("domino")[1]).dtype == jnp.float32


def test_the_mixer_of_xpress_reads_nothing_above_its_diagonal_and_teaches_nothing_there():
    (z, x), made = slots("xpress"), drafter("xpress")
    above, mix = jnp.triu(jnp.ones((4, 4)), 1), made.params["head"]["mix"]

    def codes(mix):
        head = made.config.module(made.config).bind({"params": made.params["head"] | {"mix": mix}})
        return head.codes(head.z_terms(z), x)

    np.testing.assert_array_equal(codes(mix + 9.0 * above), codes(mix))
    gradient = jax.grad(lambda mix: codes(mix).sum())(mix)
    assert not (gradient * above).any() and (jnp.abs(gradient) > 0).sum() == 6 * 10  # ranks, places of a triangle


@pytest.mark.parametrize("shifted", [False, True])
def test_unshifted_xpress_drafts_after_the_token_before_the_anchor_and_shifted_after_the_anchor(shifted):
    models = random_models(6, head="xpress", shift_label=shifted)
    state = make_generator(models, batch_size=2).start(random_prompts(2, 5, 5), [0, 1])
    drafts = jax.jit(lambda state: propose(models, state, SamplingParams(), DraftSettings(head_candidates=0))[0])
    changed = (drafts(state) != drafts(state.replace(before=(state.before + 7) % 64))).any()
    assert changed != shifted
    assert (drafts(state) != drafts(state.replace(anchors=(state.anchors + 7) % 64))).any()


@pytest.mark.parametrize("kind", [kind for kind in HEADS if not drafter(kind).config.reads_embeddings])
def test_the_gradient_of_a_frequent_token_is_summed_in_float32(kind):
    """In bfloat16 a sum of ones ends at 256."""
    made = drafter(kind)
    module = made.config.module(made.config, jnp.bfloat16)

    def total(params):
        rows = module.apply({"params": params}, jnp.full(4_096, 5), method="look_up")
        assert rows.dtype == jnp.bfloat16
        return rows.astype(jnp.float32).sum()

    table = jax.grad(total)(made.params["head"])["predecessor"]["embedding"]
    assert (table[5] == 4_096).all() and (jnp.delete(table, 5, axis=0) == 0).all()
