"""Parity of EAGLE-3 and Medusa with the reference (tests/golden/README.md), float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.propose import propose
from domino_jax.method.row_losses import MEDUSA_LOSSES, Eagle3Settings, eagle3_states
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.method.step import target_pass
from tests.helpers.decoding_models import golden_models, make_generator
from tests.helpers.models import ROW_SETS, by_stored_name, load_golden, reference_accept_lengths, row_gradients

VARIANTS = [("eagle3", "default"), *(("medusa", variant) for variant in MEDUSA_LOSSES)]


def close(ours, theirs) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def batch_of(name: str) -> dict[str, jax.Array]:
    a = load_golden(name).arrays
    tokens, mask = jnp.asarray(a["target.input_ids"], jnp.int32), jnp.asarray(a["train.loss_mask"])
    return {"tokens": tokens, "loss_mask": mask, "row_ids": jnp.arange(2)}


def settings_of(name: str, variant: str):
    figures = load_golden(name).figures
    if name == "medusa":
        settings = MEDUSA_LOSSES[variant]
        assert settings.decay == figures["train"][variant]["head_decay"]
        return settings
    return Eagle3Settings(figures["ttt_length"], figures["train"][variant]["step_decay"], mask="parity")


@functools.lru_cache
def trained(name: str, variant: str):
    """(metrics, gradients by stored name) of one variant of the loss, in slices of a few rows."""
    models = golden_models(name)
    loss, metrics, gradients = row_gradients(models, batch_of(name), settings_of(name, variant))
    return {**metrics, "differentiated": loss}, by_stored_name(models.drafter.config, gradients)


@functools.lru_cache
def states(name: str) -> np.ndarray:
    """The states of all heads or passes, [2, S, J, D], and the hidden states or features that they come from."""
    models, batch = golden_models(name), batch_of(name)

    @jax.jit
    def run(models):
        taps = models.drafter.config.target_layer_ids
        features, hidden = target_pass(models.target, models.target_params, batch, taps, True)
        if name == "medusa":
            return models.drafter.apply({"params": models.drafter_params}, hidden), hidden
        return eagle3_states(models, features, batch, load_golden(name).figures["ttt_length"]), features

    return jax.device_get(run(models))


def test_states_of_heads_and_passes_match_the_reference():
    arrays = load_golden("medusa").arrays
    ours, hidden = states("medusa")
    close(hidden, arrays["target.last_hidden"])
    close(np.moveaxis(ours, 2, 0), arrays["train.head_hidden"])
    arrays = load_golden("eagle3").arrays
    ours, features = states("eagle3")
    close(features, arrays["target.context_features"])
    close(np.moveaxis(ours, 2, 0), arrays["train.hidden"])


def test_logits_of_the_passes_match_the_reference():
    models = golden_models("eagle3")
    logits = jax.jit(lambda x: models.drafter.apply({"params": models.drafter_params}, x, method="logits"))
    close(np.moveaxis(logits(states("eagle3")[0]), 2, 0), load_golden("eagle3").arrays["train.logits"])


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_losses_and_metrics_match_the_reference(name, variant):
    reference, (metrics, _) = load_golden(name).figures["train"][variant], trained(name, variant)
    assert abs(metrics["loss"] - reference["loss"]) < 1e-5
    assert abs(metrics["differentiated"] - metrics["loss"]) < 1e-5
    parts = {"loss": "step_losses", "accuracy": "accuracies", "acceptance": "acceptance_rates"}
    if name == "medusa":
        parts = {"loss": "head_losses", "accuracy": "head_accuracies"}
    for ours, theirs in parts.items():
        assert len(reference[theirs]) > 3
        for index, value in enumerate(reference[theirs]):
            assert abs(metrics[f"{ours}_{index + 1}"] - value) < 1e-5, (ours, index)


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_gradient_norm_of_every_tensor_matches_the_reference(name, variant):
    reference, (_, gradients) = load_golden(name).figures["train"][variant]["grad_norm"], trained(name, variant)
    assert set(gradients) == set(reference)
    for tensor, norm in reference.items():
        assert abs(np.linalg.norm(gradients[tensor].astype(np.float64)) - norm) / norm < 1e-4, tensor


@pytest.mark.parametrize("name", ROW_SETS)
def test_gradient_arrays_match_the_reference(name):
    arrays, gradients = load_golden(name).arrays, trained(name, "default")[1]
    references = {key.removeprefix("train.grad."): value for key, value in arrays.items() if "train.grad." in key}
    assert len(references) >= 2
    for tensor, reference in references.items():
        assert np.linalg.norm(gradients[tensor] - reference) / np.linalg.norm(reference) < 1e-4, tensor


# ------------------------------------------------------------------------------------------------------- drafting


@functools.lru_cache
def generator(name: str):
    drafts = load_golden(name).figures["num_drafts"]
    return make_generator(golden_models(name), cache_slots=128, max_new_tokens=64, batch_size=4, num_drafts=drafts)


def first_drafts(name: str, state) -> np.ndarray:
    settings = DraftSettings(num_drafts=load_golden(name).figures["num_drafts"])
    run = jax.jit(lambda models, state: propose(models, state, SamplingParams(), settings)[0])
    return np.asarray(run(generator(name).models, state))


@pytest.mark.parametrize("name", ROW_SETS)
def test_drafts_after_given_prefixes_equal_the_reference(name):
    """The anchor is a token of the data, which the target would not always choose."""
    a = load_golden(name).arrays
    starts, rows = a["draft.starts"], a["target.input_ids"][a["draft.rows"]]
    state = generator(name).start([row[:start].tolist() for row, start in zip(rows, starts, strict=True)], range(4))
    state = state.replace(anchors=jnp.asarray([row[start] for row, start in zip(rows, starts, strict=True)], jnp.int32))
    assert (first_drafts(name, state) == a["draft.tokens"]).all()
    if name == "medusa":
        models = generator(name).models
        logits = jax.jit(lambda state: models.unembed(models.draft_hidden(state.draft_cache)))(state)
        close(logits, a["draft.logits"])


def test_every_step_of_a_chain_matches_the_reference():
    """States and logits of six steps, each fed with the draft before it."""
    a, models = load_golden("eagle3").arrays, golden_models("eagle3")
    starts, rows = a["draft.starts"], a["target.input_ids"][a["draft.rows"]]
    made = generator("eagle3")
    state = made.start([row[:start].tolist() for row, start in zip(rows, starts, strict=True)], range(4))
    anchors = np.array([row[start] for row, start in zip(rows, starts, strict=True)])
    step = jax.jit(lambda rows, hidden, tokens, slots: models.draft_step(rows, hidden, models.embed(tokens), slots))
    (rows, hidden), tokens = state.draft_cache, np.concatenate([anchors[:, None], a["draft.tokens"]], axis=1)
    for index in range(6):
        logits, hidden, rows = step(rows, hidden, tokens[:, index].astype(np.int32), state.lengths - 1 + index)
        close(hidden, a["draft.hidden"][:, index])
        close(logits, a["draft.logits"][:, index])


@functools.lru_cache
def generations(name: str, mode: str):
    return generator(name).generate([row["prompt"] for row in load_golden(name).figures["generate"]], mode)


@pytest.mark.parametrize("mode", ["autoregressive", "draft"])
@pytest.mark.parametrize("name", ROW_SETS)
def test_greedy_tokens_equal_the_reference(name, mode):
    rows = load_golden(name).figures["generate"]
    assert [answer.token_ids for answer in generations(name, mode)] == [row["output"] for row in rows]


@pytest.mark.parametrize("name", ROW_SETS)
def test_accept_lengths_equal_the_reference(name):
    for answer, row in zip(generations(name, "draft"), load_golden(name).figures["generate"], strict=True):
        assert answer.accept_lengths == reference_accept_lengths(row)


@pytest.mark.parametrize("name", ROW_SETS)
def test_first_round_drafts_equal_the_reference(name):
    rows = load_golden(name).figures["generate"]
    state = generator(name).start([row["prompt"] for row in rows], range(4))
    assert first_drafts(name, state).tolist() == [row["first_round_draft"] for row in rows]
