"""The jitted training step: what it learns, what it leaves alone, and that it is what its parts say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from domino_jax.method import blocks
from domino_jax.method.curriculum import lambda_base
from domino_jax.method.drafter import Drafter
from domino_jax.method.losses import Loss
from domino_jax.method.optimizer import learning_rate, make_optimizer
from domino_jax.method.pair import Pair
from domino_jax.method.state import init_state
from domino_jax.method.step import label_blocks, make_train_step, target_pass
from domino_jax.models.quantized import dequantized, is_quantized
from domino_jax.weights.draft_vocab import with_draft_vocab
from tests.helpers.decoding_models import in_eight_bits
from tests.helpers.models import loss_and_metrics, random_tokens, tiny_drafter, tiny_target

STEPS, ANCHORS = 80, 6
LOSS = Loss(gamma=4.0, slice_blocks=9)
KEY = jax.random.key(11)


def models(head="domino"):
    """An untied target and a drafter of one layer over its first layer."""
    target = tiny_target(tied=False)
    return target, tiny_drafter(target.config, head=head, layers=1, target_layer_ids=(0,))


def schedule():
    return learning_rate(1e-2, STEPS, 0.1)


def optimizer():
    return make_optimizer("adamw")


def norm(tree):
    """L2 norm over all leaves."""
    return np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(jax.device_get(tree))))


def batch_of(rows=4, length=24):
    """Random rows whose first three tokens are a prompt."""
    mask = jnp.ones((rows, length)).at[:, :3].set(0.0)
    return {"tokens": random_tokens((rows, length), seed=9), "loss_mask": mask, "row_ids": jnp.arange(rows)}


@functools.lru_cache
def train_step(accumulate=1):
    target, drafter = models()
    return make_train_step(
        target.module,
        drafter.module,
        optimizer(),
        num_anchors=ANCHORS,
        learning_rate=schedule(),
        curriculum=lambda step: lambda_base(step, STEPS, 1.0, 1.0),
        loss=LOSS,
        accumulate=accumulate,
    )


@functools.lru_cache
def compiled_start():
    """Jitted () → the state before the first step; a fresh one each call, because steps donate theirs."""
    return jax.jit(lambda: init_state(models()[1].module, optimizer(), jax.random.key(0)))


def run(steps):
    """(state, [metrics]) of a fresh run."""
    target, _ = models()
    state = compiled_start()()
    metrics = []
    for _ in range(steps):
        state, measured = train_step()(state, target.params, batch_of(), KEY)
        metrics.append(jax.device_get(measured))
    return jax.device_get(state), metrics


@functools.lru_cache
def full_run():
    return run(STEPS)


def test_a_handful_of_rows_is_overfitted():
    """ln 80 = 4.4 at the start; random tokens can be learnt by heart only."""
    _, metrics = full_run()
    assert metrics[0]["final_loss"] > 4.0
    assert metrics[-1]["final_loss"] < 2.0
    assert metrics[-1]["accept_len"] > metrics[0]["accept_len"] + 1.5


def test_two_runs_are_bit_identical():
    """Five steps of the same run; every parameter, moment and metric."""
    (first, first_metrics), (second, second_metrics) = run(5), run(5)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert first_metrics == second_metrics


def test_the_first_step_at_lambda_one_leaves_the_head_alone_and_the_second_does_not():
    start = jax.device_get(compiled_start()().params)
    for steps, moves in ((1, False), (2, True)):
        state, _ = run(steps)
        for name in ("down", "up"):
            changed = state.params["head"][name]["kernel"] != start["head"][name]["kernel"]
            assert bool(changed.any()) is moves, (steps, name)
        assert (state.params["backbone"]["fc"]["kernel"] != start["backbone"]["fc"]["kernel"]).any()


THREE = jnp.array([[4, 9, 20], [3, 8, 11]])  # anchors of two rows of 24 tokens
KEPT = jnp.ones((2, 3), bool)
FIRST_ROW = jnp.array([[True] * 3, [False] * 3])


@functools.lru_cache
def gradient_function(head, contiguous, slice_blocks):
    """Jitted (params, λ, anchors, keep, loss mask) → (metrics, gradients) on two rows, with or without the head."""
    target, drafter = models(head)
    loss = Loss(gamma=4.0, contiguous=contiguous, slice_blocks=slice_blocks)

    @jax.jit
    def gradients(params, share, anchors, keep, mask):
        batch = batch_of(2) | {"loss_mask": mask}
        features, _ = target_pass(target.module, target.params, batch, drafter.config.target_layer_ids)
        drawn = label_blocks(batch, anchors, keep, drafter.config, loss)

        def loss_of(params):
            models = Pair(target.module, target.params, drafter.module, params)
            return loss_and_metrics(models, features, batch, drawn, loss, share)

        (_, metrics), tree = jax.value_and_grad(loss_of, has_aux=True)(params)
        return metrics, tree

    return gradients


def gradients_of(share, *, head="domino", contiguous=True, slice_blocks=6, anchors=THREE, keep=KEPT, mask=None):
    """(metrics, gradients) of the tiny drafter's random parameters."""
    params = models()[1].params
    params = params if head == "domino" else {"backbone": params["backbone"]}
    mask = batch_of(2)["loss_mask"] if mask is None else mask
    return jax.device_get(gradient_function(head, contiguous, slice_blocks)(params, share, anchors, keep, mask))


def test_at_lambda_one_head_gradients_are_exactly_zero():
    _, gradients = gradients_of(1.0)
    assert all((leaf == 0.0).all() for leaf in jax.tree.leaves(gradients["head"]))
    _, gradients = gradients_of(0.9)
    assert all((leaf != 0.0).any() for leaf in jax.tree.leaves(gradients["head"]))


def test_at_lambda_one_backbone_gradients_equal_those_of_plain_shifted_dflash():
    _, domino = gradients_of(1.0)
    _, dflash = gradients_of(0.0, head="none")
    assert norm(dflash) > 0.1
    for ours, plain in zip(jax.tree.leaves(domino["backbone"]), jax.tree.leaves(dflash["backbone"]), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-6)


def test_a_row_without_anchors_contributes_nothing():
    """With row 1 dropped, its content does not matter, and nothing turns into NaN."""
    one, one_gradients = gradients_of(0.5, keep=FIRST_ROW)
    two, two_gradients = gradients_of(0.5, keep=FIRST_ROW, anchors=THREE.at[1].set(0))
    both, _ = gradients_of(0.5)
    assert one["loss"] == two["loss"] != both["loss"]
    for left, right in zip(jax.tree.leaves(one_gradients), jax.tree.leaves(two_gradients), strict=True):
        assert np.isfinite(left).all()
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("head", ["domino", "none"])
def test_anchor_slots_without_a_label_change_neither_loss_nor_gradients(head):
    """Eight slots of which rows of five and of two legal anchors fill the first: in slices of two, and all at once."""
    mask = jnp.zeros((2, 24)).at[0, 4:10].set(1.0).at[1, 7:10].set(1.0)
    anchors, keep = blocks.sample_anchors(KEY, mask, jnp.arange(2), 8)
    assert keep.sum(1).tolist() == [5, 2]
    choices = {"head": head, "anchors": anchors, "keep": keep, "mask": mask}
    (ours, gradients), (plain, expected) = (gradients_of(0.3, slice_blocks=size, **choices) for size in (2, 8))
    for name in plain:
        np.testing.assert_allclose(ours[name], plain[name], rtol=1e-5, err_msg=name)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert norm(expected) > 0.1


@pytest.mark.long
def test_a_step_is_its_parts():
    """Anchors of the folded key, the dual loss, the optimizer's update: the step's parameters, done by hand."""
    target, drafter = models()
    batch = batch_of()

    @jax.jit
    def by_hand(state):
        anchors, keep = blocks.sample_anchors(jax.random.fold_in(KEY, 0), batch["loss_mask"], batch["row_ids"], ANCHORS)
        drawn = label_blocks(batch, anchors, keep, drafter.config, LOSS)
        features, _ = target_pass(target.module, target.params, batch, drafter.config.target_layer_ids)

        def loss_of(params):
            models = Pair(target.module, target.params, drafter.module, params)
            return loss_and_metrics(models, features, batch, drawn, LOSS, 1.0)[0]

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        updates, _ = optimizer().update(gradients, state.opt_state, state.params)
        scaled = jax.tree.map(lambda update: schedule()(0) * update, updates)
        return keep, loss, gradients, optax.apply_updates(state.params, scaled)

    keep, loss, gradients, expected = jax.device_get(by_hand(compiled_start()()))
    stepped, metrics = run(1)
    np.testing.assert_allclose(metrics[0]["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics[0]["grad_norm"], norm(gradients), rtol=1e-4)
    assert metrics[0]["anchors"] == keep.sum() == 4 * ANCHORS
    # Adam's first step is ± the rate for every gradient above eps, so compare where the sign is certain.
    for ours, hand, gradient in zip(*map(jax.tree.leaves, (stepped.params, expected, gradients)), strict=True):
        certain = abs(gradient) > 1e-5
        np.testing.assert_allclose(ours[certain], hand[certain], rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_the_loss_over_a_draft_vocabulary_of_all_tokens_is_the_usual_one():
    """The drafter's own columns of the lm_head take the target's place."""
    target, drafter = models()
    batch, tokens = batch_of(), np.arange(target.config.vocab_size)
    config, params = with_draft_vocab(drafter.config, drafter.params, target.config, target.params, tokens, None)
    anchors = blocks.sample_anchors(KEY, batch["loss_mask"], batch["row_ids"], ANCHORS)
    features, _ = target_pass(target.module, target.params, batch, config.target_layer_ids)

    @functools.partial(jax.jit, static_argnums=0)
    def loss(module, target_params, params):
        pair, drawn = (
            Pair(target.module, target_params, module, params),
            label_blocks(batch, *anchors, module.config, LOSS),
        )
        return loss_and_metrics(pair, features, batch, drawn, LOSS, 0.5)[0]

    no_head = {**target.params, "lm_head": jax.tree.map(jnp.zeros_like, target.params["lm_head"])}
    usual = loss(drafter.module, target.params, drafter.params)
    np.testing.assert_allclose(loss(Drafter(config), no_head, params), usual, rtol=1e-6)


def test_fresh_parameters_follow_the_initialisation_of_the_contract():
    """Linears normal(0, 0.02), norms one, GRU uniform ±1/√U."""
    params = jax.device_get(compiled_start()().params)
    fc = params["backbone"]["fc"]["kernel"]
    assert 0.018 < float(fc.std()) < 0.022 and abs(float(fc.mean())) < 0.002
    assert (params["backbone"]["hidden_norm"]["scale"] == 1.0).all()
    bound = 10**-0.5
    for weight in jax.tree.leaves(params["head"]["gru"]):
        assert 0.95 * bound < float(abs(weight).max()) <= bound
        assert abs(float(weight.std()) - bound / 3**0.5) < 0.1 * bound
    assert 0.017 < float(params["head"]["down"]["kernel"].std()) < 0.023
    assert 0.017 < float(params["head"]["up"]["kernel"].std()) < 0.023


@pytest.mark.long
def test_a_step_on_a_quantized_target_is_that_on_its_dequantized_weights():
    """The lm_head is in eight bits too, and gradients flow through it."""
    target, _ = models()
    rounded = in_eight_bits(Pair(target.module, target.params), "target").target_params
    floating = jax.tree.map(lambda x: dequantized(x) if is_quantized(x) else x, rounded, is_leaf=is_quantized)
    both = [train_step()(compiled_start()(), params, batch_of(), KEY)[1] for params in (rounded, floating)]
    measured, expected = jax.device_get(both)
    assert measured["grad_norm"] > 0
    for name in ("loss", "grad_norm", "accuracy"):
        np.testing.assert_allclose(measured[name], expected[name], rtol=1e-4)
