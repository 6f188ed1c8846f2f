"""The Domino head: torch's GRU, its two faces, and the slots that it corrects."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.heads.domino import DominoHead
from domino_jax.method.step import correct_logits
from domino_jax.models.quantized import quantize, transposed
from tests.helpers.models import random_tokens, run_blocks, tiny_drafter, tiny_target

ANCHORS = [[3, 9]] * 2  # of two rows of 16 tokens


@functools.lru_cache
def head_alone(dtype=jnp.float32):
    """A head of width 32, 10 GRU units, rank 6, with its random weights."""
    drafter = tiny_drafter(tiny_target().config)
    return DominoHead(drafter.config, dtype), {"params": drafter.params["head"]}


def random_blocks(blocks=3, slots=4, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal((blocks, slots, 32)), jnp.float32) for _ in range(2))


def test_stepwise_head_equals_all_positions_at_once():
    head, params = head_alone()
    z, x = random_blocks()
    bound = head.bind(params)
    whole = bound.residual(bound.codes(bound.z_terms(z), x))
    state = bound.initial_state(3)
    for slot in range(4):
        state, code = bound.step(state, x[:, slot], bound.z_terms(z[:, slot]))
        np.testing.assert_allclose(bound.residual(code), whole[:, slot], atol=1e-5)


def test_the_state_stays_float32_in_a_bfloat16_head():
    head, params = head_alone(jnp.bfloat16)
    _, x = random_blocks()
    assert head.apply(params, x, method="prefix_states").dtype == jnp.float32


def test_the_residual_of_a_few_tokens_is_that_of_the_whole_vocabulary():
    """Two codes of one slot, five tokens."""
    head, params = head_alone()
    bound, (z, x) = head.bind(params), random_blocks(blocks=2)
    codes = bound.codes(bound.z_terms(z), x)[:, 0]
    tokens = jnp.array([7, 0, 79, 7, 3])
    rows = bound.rows(tokens)
    assert rows.shape == (5, 6)
    np.testing.assert_allclose(bound.residual_of(codes, rows), bound.residual(codes)[:, tokens], atol=1e-5)


@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_last_matrix_stored_by_rows_as_on_accelerators_is_the_same_matrix(eight_bits):
    head, params = head_alone()
    kernel, codes = params["params"]["up"]["kernel"], jnp.asarray(np.random.default_rng(1).standard_normal((2, 6)))
    kernel = quantize(kernel, "int8") if eight_bits else kernel

    def both(method: str, *arguments: jax.Array) -> list[jax.Array]:
        stored = ({"kernel": kernel}, {"rows": transposed(kernel)})
        return [head.apply({"params": params["params"] | {"up": up}}, *arguments, method=method) for up in stored]

    by_column, by_row = both("rows", jnp.array([7, 0, 79, 7, 3]))
    assert (by_column == by_row).all()
    np.testing.assert_allclose(*both("residual", codes.astype(jnp.float32)), rtol=1e-5, atol=1e-6)


CONVENTIONS = [(True, 0), (True, 1), (True, 2), (False, 0), (False, 1)]


@pytest.mark.parametrize("shift_label, prefix", CONVENTIONS)
def test_slots_before_suffix_start_keep_base_logits_and_the_others_do_not(shift_label, prefix):
    target = tiny_target()
    drafter = tiny_drafter(target.config, shift_label, prefix, layers=1)
    out = run_blocks(target, drafter, random_tokens((2, 16)), ANCHORS)
    same = (out["final"] == out["base"]).all(axis=(0, 1, 3))
    assert same.tolist() == [slot < drafter.config.suffix_start for slot in range(4)]


@pytest.mark.parametrize("shift_label, prefix", CONVENTIONS)
def test_token_a_plus_j_reaches_final_logits_only_from_its_slot_on(shift_label, prefix):
    """Shifted: slots >= max(j, suffix_start); unshifted: slots >= max(j + 1, suffix_start). Base logits never move."""
    target = tiny_target()
    drafter = tiny_drafter(target.config, shift_label, prefix, layers=1)
    tokens = random_tokens((2, 16))
    before = run_blocks(target, drafter, tokens, ANCHORS)
    for j in (1, 2, 3):
        after = run_blocks(target, drafter, tokens.at[:, 9 + j].add(1), ANCHORS)
        first = max(j if shift_label else j + 1, drafter.config.suffix_start)
        changed = (before["final"] != after["final"])[:, 1].any((0, 2)).tolist()
        assert changed == [slot >= first for slot in range(4)], f"token a+{j}"
        assert (before["base"] == after["base"]).all()


def test_a_plain_dflash_drafter_has_no_head_and_its_final_logits_are_the_base():
    target = tiny_target()
    drafter = tiny_drafter(target.config, head="none", layers=1)
    assert set(drafter.params) == {"backbone"}
    base = jnp.ones((1, 1, 4, 80))
    assert correct_logits(drafter.module, drafter.params, base, None) is base
    out = run_blocks(target, drafter, random_tokens((2, 16)), ANCHORS)
    assert (out["final"] == out["base"]).all()
