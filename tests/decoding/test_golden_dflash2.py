"""Parity of DFlash2 with what the public PyTorch modules computed (tests/golden/README.md), float32."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method import blocks
from domino_jax.method.candidates import pick_candidates
from domino_jax.method.drafter import Drafter
from domino_jax.method.heads.selector_loss import (
    SelectorObjective,
    SelectorSettings,
    Teacher,
    pair_scores,
    selector_outputs,
)
from domino_jax.method.losses import LossSettings
from domino_jax.method.passed import Passed
from domino_jax.method.propose import draft_base, propose
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.method.step import batch_gradients, label_blocks, target_pass
from domino_jax.weights.drafter import drafter_table
from tests.helpers.decoding_models import golden_models, make_generator
from tests.helpers.models import load_golden, reference_accept_lengths, run_blocks

VARIANTS = ("default", "replace", "stop_gradient", "unary")
# Our names of the reference's figures; the backbone's logits are "base" for every head.
FIGURES = {
    "loss": "loss",
    "base_loss": "unary_loss",
    "base_accuracy": "unary_accuracy",
    **{f"selector_{name}": f"selector_{name}" for name in ("loss", "accuracy", "coverage")},
    **{f"{name}_accept_len": f"{name}_accept_len" for name in ("serving", "oracle")},
}


@functools.lru_cache
def golden():
    return load_golden("dflash2")


def arrays() -> dict[str, np.ndarray]:
    return golden().arrays


def valid() -> np.ndarray:
    found = arrays()["train.block_valid"] > 0
    assert found.any() and not found.all()
    return found


def close(ours, theirs) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@functools.lru_cache
def batch():
    a = arrays()
    tokens = {"tokens": jnp.asarray(a["target.input_ids"], jnp.int32), "loss_mask": jnp.asarray(a["train.loss_mask"])}
    return tokens | {"row_ids": jnp.arange(2)}


@functools.lru_cache
def drawn_at(gamma):
    a, config = arrays(), golden().drafter.config
    anchors, keep = jnp.asarray(a["train.anchors"], jnp.int32), jnp.asarray(a["train.block_valid"] > 0)
    return label_blocks(batch(), anchors, keep, config, LossSettings(gamma=gamma, contiguous=False))


@functools.lru_cache
def teacher_forced():
    """z and unary logits of all slots; candidates and scores of slots 1 to G - 1."""
    models, config = golden_models("dflash2"), golden().drafter.config
    (anchors, keep, labels, _), tokens = drawn_at(4.0), batch()["tokens"]

    @jax.jit
    def run(models):
        features, _ = target_pass(models.target, models.target_params, batch(), config.target_layer_ids)
        x = models.embed(blocks.block_tokens(tokens, anchors, keep, config.block_size, config.mask_token_id))
        inputs = blocks.head_tokens(tokens, anchors, config.num_drafts)
        z, codes = models.drafter.apply({"params": models.drafter_params}, features, x, anchors, keep, inputs)
        teacher = Teacher(labels.ids[:, :, 1:], jnp.take_along_axis(tokens, anchors, axis=1))
        outputs = selector_outputs(models, models.draft_logits, SelectorSettings())
        found = outputs(models.drafter_params["head"], z, codes, None, teacher)
        return {"features": features, "z": z, "unary": models.draft_logits(z), **found.extra._asdict()}

    return jax.device_get(run(models))


def test_blocks_and_logits_match_the_reference():
    a, ours = arrays(), teacher_forced()
    close(ours["features"], a["target.context_features"])
    close(ours["z"][valid()], a["train.block_hidden"][valid()])
    close(ours["unary"][valid()], a["train.unary_logits"][valid()])


def test_candidates_and_their_scores_match_the_reference():
    a, ours = arrays(), teacher_forced()
    np.testing.assert_array_equal(ours["tokens"][valid()], a["train.candidate_ids"][:, :, 1:][valid()])
    close(ours["scores"][valid()], a["train.candidate_scores"][:, :, 1:][valid()])


def test_label_weights_match_the_reference():
    np.testing.assert_array_equal(drawn_at(4.0).labels.label_weights, arrays()["train.weight_mask"])


def test_sliding_layers_that_are_not_causal_match_the_reference():
    """The same blocks with every layer sliding: a slot reads later ones too, within the window."""
    found, layers = golden(), golden().drafter.config.num_hidden_layers
    changes = {"layer_types": ("sliding_attention",) * layers, "sliding_window": found.figures["sliding_window"]}
    config = type(found.drafter.config)(**{**vars(found.drafter.config), **changes, "is_causal": False})
    drafter = found.drafter._replace(config=config, module=Drafter(config))
    (anchors, keep, *_), a = drawn_at(4.0), arrays()
    ours = run_blocks(found.target, drafter, a["target.input_ids"], anchors, keep)["z"]
    close(ours[valid()], a["sliding.block_hidden"][valid()])
    assert abs(ours - a["train.block_hidden"])[valid()].max() > 0.1


def settings_of(variant: str) -> tuple[SelectorSettings, float]:
    """The settings of a variant, and its α."""
    row = golden().figures["train"][variant]
    rules = {"rule": row["rule"], "detached": row["stop_gradient"]}
    settings = SelectorSettings(gamma=row["gamma"], contiguous=False, slice_blocks=7, **rules)
    return settings, row["selector_alpha"]


@functools.lru_cache
def loss_and_gradients(variant: str):
    """(metrics, gradients by stored name in torch layout)."""
    settings, alpha = settings_of(variant)

    @jax.jit
    def run(models):
        drawn = drawn_at(settings.gamma)
        objective = SelectorObjective(settings, jnp.float32(alpha), drawn.labels.weight)
        sums, gradients = batch_gradients(models, batch(), drawn, objective, 1)
        return objective.metrics(sums), gradients

    metrics, gradients = jax.device_get(run(golden_models("dflash2")))
    stored = {}
    for entry in drafter_table(golden().drafter.config):
        leaf = functools.reduce(lambda tree, key: tree[key], entry.path, gradients)
        stored[entry.name] = leaf.T if entry.transpose else leaf
    return metrics, stored


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_metrics_match_the_reference(variant):
    reference, (metrics, _) = golden().figures["train"][variant], loss_and_gradients(variant)
    for ours, theirs in FIGURES.items():
        assert abs(metrics[ours] - reference[theirs]) < 1e-5, ours


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_norm_of_every_tensor_matches_the_reference(variant):
    reference, (_, gradients) = golden().figures["train"][variant]["grad_norm"], loss_and_gradients(variant)
    assert set(gradients) == set(reference)
    for tensor, norm in reference.items():
        ours = np.linalg.norm(gradients[tensor].astype(np.float64))
        assert abs(ours - norm) <= 1e-4 * norm, tensor
    zero = {tensor for tensor, norm in reference.items() if norm == 0.0}
    selector = {name for name in reference if name.startswith("candidate_selector.")}
    assert zero == (selector if variant == "unary" else set())


def test_gradient_arrays_match_the_reference():
    references = {key.removeprefix("train.grad."): value for key, value in arrays().items() if "train.grad." in key}
    assert len(references) == 7
    _, gradients = loss_and_gradients("default")
    for tensor, reference in references.items():
        error = np.linalg.norm(gradients[tensor] - reference) / np.linalg.norm(reference)
        assert error < 1e-4, tensor


@functools.lru_cache
def drafts():
    """Rounds from the reference's prefixes: z and unary logits of slots 1 to G - 1, candidates, scores, tokens."""
    models, a = golden_models("dflash2"), arrays()
    starts = jnp.asarray(a["draft.starts"], jnp.int32)
    tokens = jnp.asarray(a["target.input_ids"], jnp.int32)[a["draft.rows"]]
    anchors = jnp.take_along_axis(tokens, starts[:, None], axis=1)[:, 0]

    @jax.jit
    def run(models):
        features, _ = target_pass(
            models.target, models.target_params, {"tokens": tokens}, models.drafter.config.target_layer_ids
        )
        slots = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        # Features after the start are written too, as a round writes those of rejected rows: nothing may read them.
        cache = models.extend_context(models.drafter.init_cache(4, 128), Passed(features), slots)
        state = types.SimpleNamespace(anchors=anchors, lengths=starts, draft_cache=cache, keys=None)
        z, unary, _ = draft_base(models, state)
        chosen = propose(models, state, SamplingParams(), DraftSettings())[0]
        candidates = pick_candidates(unary, models.drafter.config.candidates(0))
        before = jnp.concatenate([anchors[:, None], chosen[:, :-1]], axis=1)
        codes = models.head_step((), before, models.head_hidden_half(z))[1]
        scores = candidates.logits + pair_scores(models, codes, candidates.tokens)
        return {"z": z, "unary": unary, "ids": candidates.tokens, "scores": scores, "tokens": chosen}

    return jax.device_get(run(models))


def test_drafts_match_the_reference():
    a, ours = arrays(), drafts()
    close(ours["z"], a["draft.block_hidden"][:, 1:])
    close(ours["unary"], a["draft.unary_logits"][:, 1:])
    np.testing.assert_array_equal(ours["ids"], a["draft.candidate_ids"])
    close(ours["scores"], a["draft.candidate_scores"])
    np.testing.assert_array_equal(ours["tokens"], a["draft.tokens"])
    # The selector matters here: the backbone alone would have drafted something else.
    assert (ours["ids"][:, :, 0] != a["draft.tokens"]).any()


@functools.lru_cache
def generator():
    return make_generator(golden_models("dflash2"), cache_slots=128, max_new_tokens=64, batch_size=4)


def test_generations_and_accept_lengths_equal_the_reference():
    rows = golden().figures["generate"]
    answers = generator().generate([row["prompt"] for row in rows], "draft")
    for answer, row in zip(answers, rows, strict=True):
        assert answer.token_ids == row["output"]
        assert answer.accept_lengths == reference_accept_lengths(row)


def test_first_round_drafts_equal_the_reference():
    rows = golden().figures["generate"]
    state = generator().start([row["prompt"] for row in rows], range(4))
    run = jax.jit(lambda models, state: propose(models, state, SamplingParams(), DraftSettings())[0])
    assert run(generator().models, state).tolist() == [row["first_round_draft"] for row in rows]
