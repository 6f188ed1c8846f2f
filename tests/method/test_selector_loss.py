"""DFlash2's loss: its sums against loops, its rules and schedule, slices, what it trains, and the path it reports."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.heads.dflash2 import (
    Choices,
    SelectorObjective,
    SelectorSettings,
    leading_run,
    selector_sums,
)
from domino_jax.method.losses import Labels, slot_weights
from domino_jax.method.pair import Models
from domino_jax.method.step import batch_gradients, label_blocks
from tests.helpers.models import random_tokens, tiny_drafter, tiny_target

ALPHA = 0.5


@functools.lru_cache
def models():
    """An untied target and a drafter of one layer; blocks of 4, 5 candidates of 80 tokens."""
    target = tiny_target(tied=False)
    return target, tiny_drafter(target.config, head="dflash2", shift_label=False, layers=1, target_layer_ids=(0,))


@pytest.mark.parametrize(("right", "expected"), [("1101", 3.0), ("0111", 1.0), ("1111", 5.0), ("0000", 1.0)])
def test_the_leading_run_counts_the_bonus_and_ends_at_the_first_wrong_slot(right, expected):
    assert float(leading_run(jnp.array([cell == "1" for cell in right]))) == expected


# Two blocks of 4 slots, 6 tokens, 3 candidates. The second block has a gap, and a label that is no candidate.
LABELS = np.array([[0, 1, 2, 3], [0, 4, 5, 0]])
WEIGHTS = np.array([[0, 1, 1, 1], [0, 1, 0, 1]], np.float32)
TOKENS = np.array([[[1, 0, 3], [0, 2, 5], [3, 2, 1]], [[4, 0, 1], [5, 4, 3], [1, 2, 3]]])
PATH = np.array([[1, 2, 1], [4, 5, 1]])


@functools.lru_cache
def sums(gamma: float | None = 2.0, dpace_alpha: float | None = None):
    """({sum: value}, the same by loops)."""
    rng = np.random.default_rng(0)
    base, scores = (rng.standard_normal((2, 3, size)).astype(np.float32) for size in (6, 3))
    covered = (TOKENS == LABELS[:, 1:, None]).any(-1)
    settings = SelectorSettings(gamma=gamma, dpace_alpha=dpace_alpha)
    labels = Labels(jnp.asarray(LABELS), jnp.asarray(WEIGHTS), slot_weights(WEIGHTS, models()[1].config, settings))
    ours = jax.jit(lambda: selector_sums(base, Choices(TOKENS, scores, covered, PATH), labels, settings))()

    expected = dict.fromkeys(ours, 0.0) | {"weight": float(labels.loss_weights.sum())}
    for block in range(2):
        alive, in_reach = True, True
        for slot in range(3):
            label, weight = LABELS[block, slot + 1], WEIGHTS[block, slot + 1]
            decayed = weight * (np.exp(-slot / gamma) if gamma and dpace_alpha is None else 1.0)
            logits = base[block, slot].astype(np.float64)
            loss = np.log(np.exp(logits).sum()) - logits[label]
            if dpace_alpha is not None:
                decayed *= dpace(base[block], block, dpace_alpha)[slot]
            expected["base_loss"] += decayed * loss
            expected["base_correct"] += weight * (logits.argmax() == label)
            expected["labels"] += weight
            expected["covered"] += weight * covered[block, slot]
            alive = alive and weight > 0 and PATH[block, slot] == label
            in_reach = in_reach and weight > 0 and covered[block, slot]
            expected["served"] += alive
            expected["served_by_oracle"] += in_reach
            pair = scores[block, slot].astype(np.float64)
            if covered[block, slot]:
                place = TOKENS[block, slot].tolist().index(label)
                expected["selector_loss"] += decayed * (np.log(np.exp(pair).sum()) - pair[place])
                expected["covered_weight"] += decayed
                expected["selector_correct"] += decayed * (TOKENS[block, slot, pair.argmax()] == label)
        expected["blocks"] += 1
        expected["served"] += 1
        expected["served_by_oracle"] += 1
    del ours["base_accepted"], expected["base_accepted"]
    return jax.device_get(ours), expected


def dpace(base, block, alpha):
    """The weights of a block's slots by their definition."""
    valid = WEIGHTS[block, 1:] > 0
    shares = np.exp(base.astype(np.float64)) / np.exp(base.astype(np.float64)).sum(-1, keepdims=True)
    shares = shares[np.arange(3), LABELS[block, 1:]]
    reached = np.cumprod(np.where(valid, (1 - alpha) * shares + alpha, 1.0)) * valid
    return [reached[slot:].sum() for slot in range(3)]


@pytest.mark.parametrize("dpace_alpha", [None, 0.5])
def test_sums_equal_loops_over_the_slots(dpace_alpha):
    ours, expected = sums(dpace_alpha=dpace_alpha)
    assert ours == pytest.approx(expected, rel=1e-5)


def test_a_path_ends_at_a_slot_without_a_label():
    """The second block's path is right at slots 1 and 2, but slot 2 has no label."""
    ours, _ = sums()
    assert (ours["served"], ours["served_by_oracle"]) == (3 + 2, 4 + 2)


# ---- the whole loss --------------------------------------------------------------------------------------------------


@functools.lru_cache
def gradients(slice_blocks=3, alpha=ALPHA, accumulate=1):
    """(metrics, gradients) of two rows with 5 blocks each."""
    target, drafter = models()
    settings = SelectorSettings(4.0, False, slice_blocks=slice_blocks)
    mask = jnp.ones((2, 16)).at[:, :3].set(0.0).at[0, 8].set(0.0)
    batch = {"tokens": random_tokens((2, 16), seed=5), "loss_mask": mask, "row_ids": jnp.arange(2)}
    anchors, keep = jnp.array([[3, 5, 6, 9, 13], [4, 7, 10, 14, 0]]), jnp.ones((2, 5), bool).at[1, 4].set(False)

    @jax.jit
    def run(params):
        bundle = Models(target.module, target.params, drafter.module, params)
        drawn = label_blocks(batch, anchors, keep, drafter.config, settings)
        objective = SelectorObjective(settings, jnp.float32(alpha), drawn.labels.weight)
        found, by_params = batch_gradients(bundle, batch, drawn, objective, accumulate)
        return objective.metrics(found), by_params

    return jax.device_get(run(drafter.params))


def assert_same(one, other):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), one, other)


@pytest.mark.parametrize("changes", [{"slice_blocks": 5}, {"slice_blocks": 1}, {"accumulate": 2}])
def test_slices_and_micro_batches_change_nothing(changes):
    assert_same(gradients(), gradients(**changes))


def test_the_loss_is_the_two_terms_and_alpha_zero_leaves_the_selector_alone():
    (metrics, _), (plain, by_params) = gradients(), gradients(alpha=0.0)
    assert metrics["loss"] > metrics["base_loss"]
    assert float(plain["loss"]) == float(plain["base_loss"])
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(by_params["head"]))
    assert 0 < metrics["selector_coverage"] < 1
