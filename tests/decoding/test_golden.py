"""Parity with what the public PyTorch modules computed (tests/golden/README.md), float32. A missing file fails."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.losses import LossSettings
from domino_jax.method.pair import Models
from domino_jax.method.propose import propose
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.method.step import label_blocks, target_pass
from tests.helpers.decoding_models import make_generator
from tests.helpers.models import (
    GOLDEN_SETS,
    by_stored_name,
    dual_loss,
    load_golden,
    reference_accept_lengths,
    run_blocks,
)

LAMBDAS = ("lambda=1.0", "lambda=0.35", "lambda=0.0")


@functools.lru_cache
def teacher_forced_arrays(name):
    golden = load_golden(name)
    a = golden.arrays
    return run_blocks(
        golden.target, golden.drafter, a["target.input_ids"], a["train.anchors"], a["train.block_valid"] > 0
    )


@functools.lru_cache
def loss_and_gradients(name):
    """{λ name: (metrics, gradients by stored name, in torch layout)}; one compilation per set."""
    golden = load_golden(name)
    a = golden.arrays
    batch = {
        "tokens": jnp.asarray(a["target.input_ids"], jnp.int32),
        "loss_mask": jnp.asarray(a["train.loss_mask"]),
        "row_ids": jnp.arange(2),
    }
    anchors = jnp.asarray(a["train.anchors"], jnp.int32)
    keep = jnp.asarray(a["train.block_valid"] > 0)
    target, drafter = golden.target, golden.drafter
    settings = LossSettings(gamma=golden.figures["gamma"], contiguous=False, slice_blocks=7)

    @jax.jit
    def run(params, share):
        drawn = label_blocks(batch, anchors, keep, drafter.config, settings)
        features, _ = target_pass(target.module, target.params, batch, drafter.config.target_layer_ids)

        def loss_of(params):
            models = Models(target.module, target.params, drafter.module, params)
            return dual_loss(models, features, batch, drawn, settings, share)

        return jax.value_and_grad(loss_of, has_aux=True)(params)

    results = {}
    for key in LAMBDAS:
        (_, metrics), gradients = jax.device_get(run(drafter.params, float(key.split("=")[1])))
        results[key] = (metrics, by_stored_name(drafter.config, gradients))
    return results


def test_target_logits_and_features_match_the_reference(golden):
    ids = tuple(golden.drafter.config.target_layer_ids)
    run = jax.jit(lambda tokens: golden.target.module.apply({"params": golden.target.params}, tokens, tap_layers=ids))
    out = run(jnp.asarray(golden.arrays["target.input_ids"], jnp.int32))
    np.testing.assert_allclose(out["logits"], golden.arrays["target.logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(out["features"], golden.arrays["target.context_features"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_training_features_match_the_reference(name):
    reference = load_golden(name).arrays["target.context_features"]
    np.testing.assert_allclose(teacher_forced_arrays(name)["features"], reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize("ours, theirs", [("z", "block_hidden"), ("base", "base_logits"), ("final", "final_logits")])
@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_teacher_forced_blocks_match_the_reference(name, ours, theirs):
    arrays = load_golden(name).arrays
    valid = arrays["train.block_valid"] > 0
    assert valid.any() and not valid.all()
    np.testing.assert_allclose(
        teacher_forced_arrays(name)[ours][valid], arrays["train." + theirs][valid], rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("key", LAMBDAS)
@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_losses_match_the_reference(name, key):
    reference = load_golden(name).figures["train"][key]
    metrics, _ = loss_and_gradients(name)[key]
    for loss in ("loss", "final_loss", "base_loss"):
        assert abs(metrics[loss] - reference[loss]) < 1e-5, loss


@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_accuracy_and_accept_len_match_the_reference(name):
    reference = load_golden(name).figures["train"]["lambda=0.35"]
    metrics, _ = loss_and_gradients(name)["lambda=0.35"]
    for metric in ("accuracy", "base_accuracy", "accept_len", "base_accept_len"):
        assert abs(metrics[metric] - reference[metric]) < 1e-6, metric


@pytest.mark.parametrize("key", LAMBDAS)
@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_gradient_norm_of_every_tensor_matches_the_reference(name, key):
    reference = load_golden(name).figures["train"][key]["grad_norm"]
    _, gradients = loss_and_gradients(name)[key]
    assert set(gradients) == set(reference)
    for tensor, norm in reference.items():
        ours = np.linalg.norm(gradients[tensor].astype(np.float64))
        if norm == 0.0:
            assert ours == 0.0, tensor
        else:
            assert abs(ours - norm) / norm < 1e-4, tensor


def test_head_gradients_of_the_reference_are_zero_at_lambda_one_only(golden):
    """Guards the test above: the exact-zero branch is used, and not for everything."""
    head = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight")
    norms = {key: golden.figures["train"][key]["grad_norm"] for key in LAMBDAS}
    assert {tensor for tensor, norm in norms["lambda=1.0"].items() if norm == 0.0} == set(head)
    assert all(norm > 0.0 for norm in norms["lambda=0.35"].values())


@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_gradient_arrays_match_the_reference(name):
    arrays = load_golden(name).arrays
    references = {key.removeprefix("train.grad."): value for key, value in arrays.items() if "train.grad." in key}
    assert len(references) == 5
    _, gradients = loss_and_gradients(name)["lambda=0.35"]
    for tensor, reference in references.items():
        error = np.linalg.norm(gradients[tensor] - reference) / np.linalg.norm(reference)
        assert error < 1e-4, tensor


@functools.lru_cache
def generator(name):
    golden = load_golden(name)
    models = Models(golden.target.module, golden.target.params, golden.drafter.module, golden.drafter.params)
    return make_generator(models, cache_slots=128, max_new_tokens=64, batch_size=4)


@functools.lru_cache
def generations(name, mode):
    return generator(name).generate([row["prompt"] for row in load_golden(name).figures["generate"]], mode)


@pytest.mark.parametrize("mode", ["autoregressive", "domino"])
@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_greedy_tokens_equal_the_reference(name, mode):
    rows = load_golden(name).figures["generate"]
    assert [answer.token_ids for answer in generations(name, mode)] == [row["output"] for row in rows]


@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_accept_lengths_equal_the_reference(name):
    for answer, row in zip(generations(name, "domino"), load_golden(name).figures["generate"], strict=True):
        assert answer.accept_lengths == reference_accept_lengths(row)


@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_first_round_drafts_equal_the_reference(name):
    rows = load_golden(name).figures["generate"]
    state = generator(name).start([row["prompt"] for row in rows], range(4))
    run = jax.jit(lambda models, state: propose(models, state, SamplingParams(), DraftSettings())[0])
    assert run(generator(name).models, state).tolist() == [row["first_round_draft"] for row in rows]
