"""Parity of the Markov heads with what the public PyTorch modules computed (tests/golden/README.md), float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method import blocks
from domino_jax.method.heads.markov_loss import MarkovObjective, MarkovSettings
from domino_jax.method.propose import draft_base, propose
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.method.step import corrected, drafter_loss, label_blocks, target_pass
from tests.helpers.decoding_models import golden_models, make_generator
from tests.helpers.models import MARKOV_SETS, by_stored_name, load_golden, reference_accept_lengths, run_blocks

# The other variants of the loss: another compilation for each.
VARIANTS = [
    *((name, "default") for name in MARKOV_SETS),
    *(("markov_vanilla", variant) for variant in ("ce", "l1")),
    *(pytest.param(name, v, marks=pytest.mark.slow) for name in MARKOV_SETS[1:] for v in ("ce", "l1")),
]
CONFIDENT = MARKOV_SETS[:2]
# Our names of the reference's figures.
FIGURES = {
    "loss": "loss",
    "final_loss": "ce_loss",
    "accuracy": "accuracy",
    **{name: name for name in ("l1_loss", "confidence_loss", "confidence_abs_error", "tau_probabilistic")},
    **{name: name for name in ("teacher_agreement", "teacher_top1_prob", "draft_top1_prob")},
}


def close(ours, theirs) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def valid_blocks(name: str) -> np.ndarray:
    valid = load_golden(name).arrays["train.block_valid"] > 0
    assert valid.any() and not valid.all()
    return valid


@functools.lru_cache
def inputs_of(name: str):
    """(batch, anchors, keep) of the set's training blocks."""
    a = load_golden(name).arrays
    batch = {"tokens": jnp.asarray(a["target.input_ids"], jnp.int32), "loss_mask": jnp.asarray(a["train.loss_mask"])}
    anchors, keep = jnp.asarray(a["train.anchors"], jnp.int32), jnp.asarray(a["train.block_valid"] > 0)
    return batch | {"row_ids": jnp.arange(2)}, anchors, keep


@functools.lru_cache
def teacher_forced(name: str):
    golden, (batch, anchors, keep) = load_golden(name), inputs_of(name)
    return run_blocks(golden.target, golden.drafter, batch["tokens"], anchors, keep)


@pytest.mark.parametrize("ours, theirs", [("z", "block_hidden"), ("base", "base_logits"), ("final", "final_logits")])
@pytest.mark.parametrize("name", MARKOV_SETS)
def test_teacher_forced_blocks_match_the_reference(name, ours, theirs):
    valid = valid_blocks(name)
    close(teacher_forced(name)[ours][valid], load_golden(name).arrays["train." + theirs][valid])


@pytest.mark.parametrize("name", CONFIDENT)
def test_confidence_logits_match_the_reference(name):
    models, (batch, anchors, _) = golden_models(name), inputs_of(name)
    before = blocks.head_tokens(batch["tokens"], anchors, models.drafter.config.num_drafts)
    logits = jax.jit(models.confidence)(teacher_forced(name)["z"], before)
    valid = valid_blocks(name)
    close(logits[valid], load_golden(name).arrays["train.confidence_logits"][valid])


@functools.lru_cache
def loss_and_gradients(name: str, variant: str):
    """(metrics, gradients by stored name, label weights) of one variant of the loss."""
    models, golden, (batch, anchors, keep) = golden_models(name), load_golden(name), inputs_of(name)
    figures, config = golden.figures["train"][variant], golden.drafter.config
    weights = tuple(figures[f"{term}_weight"] for term in ("ce", "l1", "confidence"))
    settings = MarkovSettings(gamma=figures["gamma"], weights=weights, slice_blocks=7)

    @jax.jit
    def run(params):
        drawn = label_blocks(batch, anchors, keep, config, settings)
        objective = MarkovObjective(settings, 0.0, drawn.labels.weight)
        taps = config.target_layer_ids
        features, hidden = target_pass(models.target, models.target_params, batch, taps, settings.reads_target)

        def loss_of(params):
            return drafter_loss(models.replace(drafter_params=params), features, batch, drawn, objective, hidden)

        (loss, sums), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        return {**objective.metrics(sums), "differentiated": loss}, gradients, drawn.labels.label_weights

    metrics, gradients, label_weights = jax.device_get(run(models.drafter_params))
    return metrics, by_stored_name(config, gradients), label_weights


@pytest.mark.parametrize("name", MARKOV_SETS)
def test_the_contiguous_mask_matches_the_reference(name):
    ours = loss_and_gradients(name, "default")[2]
    assert (ours == load_golden(name).arrays["train.valid"]).all()


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_losses_and_metrics_match_the_reference(name, variant):
    reference = load_golden(name).figures["train"][variant]
    metrics = loss_and_gradients(name, variant)[0]
    compared = {ours: theirs for ours, theirs in FIGURES.items() if theirs in reference and ours in metrics}
    assert len(compared) >= 3
    for ours, theirs in compared.items():
        if theirs.startswith("confidence") and not reference["confidence_weight"]:
            continue  # the reference computes no term without a weight
        assert abs(metrics[ours] - reference[theirs]) < 1e-5, ours
    assert abs(metrics["differentiated"] - metrics["loss"]) < 1e-6


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_gradient_norm_of_every_tensor_matches_the_reference(name, variant):
    reference = load_golden(name).figures["train"][variant]["grad_norm"]
    gradients = loss_and_gradients(name, variant)[1]
    assert set(gradients) == set(reference)
    for tensor, norm in reference.items():
        ours = np.linalg.norm(gradients[tensor].astype(np.float64))
        assert ours == 0.0 if norm == 0.0 else abs(ours - norm) / norm < 1e-4, tensor


@pytest.mark.parametrize("name", MARKOV_SETS)
def test_gradient_arrays_match_the_reference(name):
    arrays, gradients = load_golden(name).arrays, loss_and_gradients(name, "default")[1]
    references = {key.removeprefix("train.grad."): value for key, value in arrays.items() if "train.grad." in key}
    assert len(references) >= 4
    for tensor, reference in references.items():
        assert np.linalg.norm(gradients[tensor] - reference) / np.linalg.norm(reference) < 1e-4, tensor


# ------------------------------------------------------------------------------------------------------- drafting


@functools.lru_cache
def generator(name: str):
    return make_generator(golden_models(name), cache_slots=128, max_new_tokens=64, batch_size=4)


@functools.lru_cache
def drafted(name: str):
    """Drafts from the reference's prefixes, and the logits that their slots have after the drafts before them."""
    a, made = load_golden(name).arrays, generator(name)
    starts, rows = a["draft.starts"], a["target.input_ids"][a["draft.rows"]]
    state = made.start([row[:start].tolist() for row, start in zip(rows, starts, strict=True)], range(4))
    state = state.replace(anchors=jnp.asarray([row[start] for row, start in zip(rows, starts, strict=True)], jnp.int32))
    config = made.models.drafter.config

    @jax.jit
    def run(models, state):
        z, base, _ = draft_base(models, state)
        drafts = propose(models, state, SamplingParams(), DraftSettings())[0]
        before = jnp.concatenate([state.anchors[:, None], drafts[:, :-1]], axis=1)
        method = {"method": lambda drafter: drafter.head.codes(z, before)}
        codes = models.drafter.apply({"params": models.drafter_params}, **method)
        final = corrected(models.drafter, models.drafter_params, base, codes)
        confidence = models.confidence(z, before) if config.enable_confidence_head else None
        return {"tokens": drafts, "block_hidden": z, "base_logits": base, "final_logits": final} | (
            {} if confidence is None else {"confidence_logits": confidence}
        )

    return jax.device_get(run(made.models, state))


@pytest.mark.parametrize("name", MARKOV_SETS)
def test_all_slots_draft_what_the_reference_drafts(name):
    """Slots 0 to B - 1: a loop that leaves slot 0 out, as a public one does, drafts one position off."""
    reference = load_golden(name).arrays["draft.tokens"]
    assert reference.shape[1] == golden_models(name).drafter.config.block_size
    assert (drafted(name)["tokens"] == reference).all()


@pytest.mark.parametrize("name", MARKOV_SETS)
def test_arrays_of_the_drafts_match_the_reference(name):
    ours, arrays = drafted(name), load_golden(name).arrays
    assert ("confidence_logits" in ours) == (name in CONFIDENT) == ("draft.confidence_logits" in arrays)
    for array in set(ours) - {"tokens"}:
        close(ours[array], arrays[f"draft.{array}"])


@functools.lru_cache
def generations(name: str, mode: str):
    return generator(name).generate([row["prompt"] for row in load_golden(name).figures["generate"]], mode)


@pytest.mark.parametrize("mode", ["autoregressive", "draft"])
@pytest.mark.parametrize("name", MARKOV_SETS)
def test_greedy_tokens_equal_the_reference(name, mode):
    rows = load_golden(name).figures["generate"]
    assert [answer.token_ids for answer in generations(name, mode)] == [row["output"] for row in rows]


@pytest.mark.parametrize("name", MARKOV_SETS)
def test_accept_lengths_equal_the_reference(name):
    for answer, row in zip(generations(name, "draft"), load_golden(name).figures["generate"], strict=True):
        assert answer.accept_lengths == reference_accept_lengths(row)


@pytest.mark.parametrize("name", MARKOV_SETS)
def test_first_round_drafts_equal_the_reference(name):
    rows = load_golden(name).figures["generate"]
    state = generator(name).start([row["prompt"] for row in rows], range(4))
    run = jax.jit(lambda models, state: propose(models, state, SamplingParams(), DraftSettings())[0])
    assert run(generator(name).models, state).tolist() == [row["first_round_draft"] for row in rows]
