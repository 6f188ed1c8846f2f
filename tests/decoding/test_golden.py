"""Parity with what the public PyTorch modules computed (tests/golden/README.md), float32. A missing file fails.

Every set has the target, the training arrays and the losses with their gradients; test_golden_drafts.py has the rest.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method import blocks
from domino_jax.method.drafter import Drafter
from domino_jax.method.heads.dflash2 import SelectorLoss
from domino_jax.method.heads.eagle3_model import Eagle3Loss, shift
from domino_jax.method.heads.markov import MarkovLoss
from domino_jax.method.heads.xpress import XpressLoss
from domino_jax.method.losses import Labels, Loss, Outputs
from domino_jax.method.sliced_loss import SlicedForward
from domino_jax.method.step import Blocks, batch_gradients, label_blocks, target_pass
from tests.helpers.decoding_models import golden_models
from tests.helpers.models import (
    GOLDEN_SETS,
    MARKOV_SETS,
    by_stored_name,
    load_golden,
    run_blocks,
)

SETS = (*GOLDEN_SETS, *MARKOV_SETS, "dflash2", "xpress", "eagle3")
BLOCK_SETS = tuple(name for name in SETS if name != "eagle3")
# Variants of the loss. Those of the last Markov sets are further compilations of the same code.
SLOW = [(name, variant) for name in MARKOV_SETS[1:] for variant in ("ce", "l1")]
# Losses of the reference that this project does not have.
LEFT_OUT = [("dflash2", "replace"), ("dflash2", "stop_gradient")]
LEFT_OUT += [("xpress", variant) for variant in ("data_labels", "full_anchor", "teacher_forced")]
VARIANTS = [
    pytest.param(
        name,
        variant,
        marks=[pytest.mark.long] * (name not in GOLDEN_SETS) + [pytest.mark.slow] * ((name, variant) in SLOW),
    )
    for name in SETS
    for variant in load_golden(name).figures["train"]
    if (name, variant) not in LEFT_OUT
]
# Our names of the reference's figures; a list holds one figure for each head or pass, from 1 on.
FIGURES = {
    "domino": {
        name: name
        for name in ("loss", "final_loss", "base_loss", "accuracy", "base_accuracy", "accept_len", "base_accept_len")
    },
    "markov": {"final_loss": "ce_loss"}
    | {name: name for name in ("loss", "accuracy", "l1_loss", "confidence_loss", "confidence_abs_error")}
    | {name: name for name in ("tau_probabilistic", "teacher_agreement", "teacher_top1_prob", "draft_top1_prob")},
    "dflash2": {"loss": "loss", "base_loss": "unary_loss", "base_accuracy": "unary_accuracy"}
    | {f"selector_{name}": f"selector_{name}" for name in ("loss", "accuracy", "coverage")},
    "xpress": {
        name: name
        for name in ("loss", "tf_loss", "ce_loss", "tv_loss", "consistency_loss", "base_anchor_loss", "accuracy")
        + ("accept_rate", "base_accept_rate", *(f"consistency_round{index}_loss" for index in range(3)))
    },
    "eagle3": {"loss": "loss", "loss_": "step_losses", "accuracy_": "accuracies", "acceptance_": "acceptance_rates"},
}


def head_of(name: str) -> str:
    return load_golden(name).drafter.config.head


def close(ours, theirs) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@functools.lru_cache
def batch_of(name: str) -> dict[str, jax.Array]:
    a = load_golden(name).arrays
    tokens, mask = jnp.asarray(a["target.input_ids"], jnp.int32), jnp.asarray(a["train.loss_mask"])
    return {"tokens": tokens, "loss_mask": mask, "row_ids": jnp.arange(2)}


def drawn_blocks(name: str) -> tuple[jax.Array, jax.Array]:
    """(anchors, keep) of the set's training blocks, some of which are padding."""
    a = load_golden(name).arrays
    valid = a["train.block_valid"] > 0
    assert valid.any() and not valid.all()
    return jnp.asarray(a["train.anchors"], jnp.int32), jnp.asarray(valid)


# --------------------------------------------------------------------------------------------------- the target


@pytest.mark.parametrize("name", SETS)
def test_logits_and_features_of_the_target_match_the_reference(name):
    models, arrays = golden_models(name), load_golden(name).arrays
    taps = tuple(models.drafter.config.target_layer_ids)
    out = jax.jit(lambda tokens: models.run_target(tokens, tap_layers=taps))(batch_of(name)["tokens"])
    close(out["logits"], arrays["target.logits"])
    for ours, theirs in (("features", "target.context_features"), ("hidden", "target.last_hidden")):
        if theirs in arrays:
            close(out[ours], arrays[theirs])


# --------------------------------------------------------------------------------------------- the training pass


def dual_arrays(name: str) -> dict[str, np.ndarray]:
    """The blocks of a Domino or Markov drafter."""
    golden, (anchors, keep) = load_golden(name), drawn_blocks(name)
    out = run_blocks(golden.target, golden.drafter, batch_of(name)["tokens"], anchors, keep)
    arrays = {"block_hidden": out["z"], "base_logits": out["base"], "final_logits": out["final"]}
    config, models = golden.drafter.config, golden_models(name)
    if config.head == "markov" and config.enable_confidence_head:
        before = blocks.head_tokens(batch_of(name)["tokens"], anchors, config.num_drafts)
        arrays["confidence_logits"] = jax.jit(lambda z, tokens: models.head.confidence(z, tokens))(out["z"], before)
    return arrays


def selector_arrays(name: str) -> dict[str, np.ndarray]:
    """The blocks of DFlash2 with the candidates of slots 1 to G - 1 and their scores."""
    models, (anchors, keep), tokens = golden_models(name), drawn_blocks(name), batch_of(name)["tokens"]
    config, a = models.drafter.config, load_golden(name).arrays

    @jax.jit
    def run(models):
        labels = label_blocks(batch_of(name), anchors, keep, config, Loss(contiguous=False)).labels
        features, _ = target_pass(models.target, models.target_params, batch_of(name), config.target_layer_ids)
        x = models.embed(blocks.block_tokens(tokens, anchors, keep, config.block_size, config.mask_token_id))
        inputs = blocks.head_tokens(tokens, anchors, config.num_drafts)
        z, codes = models.drafter.apply({"params": models.drafter_params}, features, x, anchors, keep, inputs)
        default = SlicedForward(None, models.drafter_params["head"], (z, codes))
        forward = SelectorLoss().forward(default, models, models.draft_logits, labels, inputs)
        extra = forward.outputs_of(forward.params, *forward.inputs, forward.states).extra
        return {
            "block_hidden": z,
            "unary_logits": models.draft_logits(z),
            # Slot 0 predicts nothing.
            "candidate_ids": jnp.concatenate([a["train.candidate_ids"][:, :, :1], extra.tokens], axis=2),
            "candidate_scores": jnp.concatenate([a["train.candidate_scores"][:, :, :1], extra.scores], axis=2),
        }

    return run(models)


def row_arrays(name: str) -> dict[str, np.ndarray]:
    """States and logits of EAGLE-3's passes, [J, 2, S, ...]."""
    models, batch = golden_models(name), batch_of(name)
    config = models.drafter.config

    @jax.jit
    def run(models):
        features, _ = target_pass(models.target, models.target_params, batch, config.target_layer_ids)
        drafter = functools.partial(models.drafter.apply, {"params": models.drafter_params})
        states = models.row_states(features, batch, load_golden(name).figures["ttt_length"])
        states = {"hidden": states, "logits": drafter(states, method="logits")}
        return jax.tree.map(lambda states: jnp.moveaxis(states, 2, 0), states)

    return run(models)


def xpress_arrays(name: str) -> dict[str, np.ndarray]:
    """The blocks of xPress, and the tokens and logits of the rounds of its loss."""
    models, anchors = golden_models(name), drawn_blocks(name)[0]
    config, arrays = models.drafter.config, dual_arrays(name)
    before = blocks.head_tokens(batch_of(name)["tokens"], anchors, config.num_drafts, config.extra_slots)

    @jax.jit
    def run(models, z, base):
        default = SlicedForward(lambda *_: Outputs(base, base), models.drafter_params["head"], (z, None))
        forward = XpressLoss().forward(default, models, models.draft_logits, None, before)
        rounds = forward.outputs_of(forward.params, *forward.inputs, forward.states).extra[0]
        choices = jnp.argmax(jnp.stack([base, *rounds[:-1]]), axis=-1)
        return rounds[-1], choices

    final, choices = run(models, arrays["block_hidden"], arrays["base_logits"])
    for array, values in (("final_logits", arrays["final_logits"]), ("round_logits", final)):
        # Slot 0 predicts nothing.
        reference = load_golden(name).arrays[f"train.{array}"]
        arrays[array] = np.concatenate([reference[:, :, :1], values[:, :, 1:]], axis=2)
    known = jnp.broadcast_to(before[..., :2], (*choices.shape[:-1], 2))
    rounds = jnp.concatenate([known, choices[..., 1:-1]], axis=-1)
    return arrays | {"previous_tokens": jnp.stack([before, *rounds])}


ARRAYS = {"xpress": xpress_arrays, "domino": dual_arrays, "markov": dual_arrays, "dflash2": selector_arrays}


@pytest.mark.parametrize("name", SETS)
def test_arrays_of_the_training_pass_match_the_reference(name):
    ours, arrays = ARRAYS.get(head_of(name), row_arrays)(name), load_golden(name).arrays
    assert ("confidence_logits" in ours) == ("train.confidence_logits" in arrays)
    for array, values in ours.items():
        valid = np.asarray(drawn_blocks(name)[1]) if name in BLOCK_SETS else slice(None)
        valid = (..., *np.nonzero(valid), slice(None)) if array == "previous_tokens" else valid
        close(np.asarray(values)[valid], arrays["train." + array][valid])


def test_sliding_layers_that_are_not_causal_match_the_reference():
    """The blocks of DFlash2 with every layer sliding: a slot reads later ones too, within the window."""
    golden, (anchors, keep) = load_golden("dflash2"), drawn_blocks("dflash2")
    layers = golden.drafter.config.num_hidden_layers
    changes = {
        "layer_types": ("sliding_attention",) * layers,
        "sliding_window": golden.figures["sliding_window"],
        "is_causal": False,
    }
    config = type(golden.drafter.config)(**{**vars(golden.drafter.config), **changes})
    drafter = golden.drafter._replace(config=config, module=Drafter(config))
    ours, valid = (
        run_blocks(golden.target, drafter, batch_of("dflash2")["tokens"], anchors, keep)["z"],
        np.asarray(keep),
    )
    close(ours[valid], golden.arrays["sliding.block_hidden"][valid])
    assert abs(ours - golden.arrays["train.block_hidden"])[valid].max() > 0.1


# ---------------------------------------------------------------------------------------- losses and gradients


def loss_of(name: str, variant: str):
    """(a variant of the loss, its λ)."""
    figures = load_golden(name).figures
    row = figures["train"][variant]
    match head_of(name):
        case "domino":
            return Loss(gamma=figures["gamma"], contiguous=False, slice_blocks=7), float(variant[7:])
        case "markov":
            weights = tuple(row[f"{term}_weight"] for term in ("ce", "l1", "confidence"))
            return MarkovLoss(gamma=row["gamma"], weights=weights, slice_blocks=7), 0.0
        case "dflash2":
            choices = {"gamma": row["gamma"], "contiguous": False, "slice_blocks": 7}
            return SelectorLoss(**choices, alpha=row["selector_alpha"]), 0.0
        case "xpress":
            weights = [row["loss_terms"].get(term, 0.0) for term in ("ce", "tv")]
            weights += [row[f"{term}_weight"] for term in ("consistency", "base_anchor")]
            choices = {"gamma": row["gamma"], "rounds": row["consistency_passes"]}
            return XpressLoss(**choices, weights=tuple(weights), slice_blocks=7), 0.0
    return Eagle3Loss(figures["ttt_length"], row["step_decay"]), 0.0


def eagle3_reference_labels(batch: dict[str, jax.Array], passes: int) -> Labels:
    """The public trainers count a row where the token two places before its label is supervised, but for the last."""
    mask = shift((batch["loss_mask"] > 0.5).astype(jnp.float32).at[:, -1].set(0.0), 1)
    rows = [mask * shift(jnp.ones_like(mask), 1 + index) for index in range(passes)]
    weights = jnp.stack(rows, axis=2)
    return Labels(jnp.broadcast_to(shift(batch["tokens"], -1)[:, :, None], weights.shape), weights, weights)


def models_of(name: str, variant: str):
    """The pair of a variant of the loss: one reads the weights of xPress in the shifted layout."""
    models = golden_models(name)
    if variant != "shifted":
        return models
    return models.replace(drafter=Drafter(dataclasses.replace(models.drafter.config, shift_label=True)))


@functools.lru_cache
def program(name: str, loss, variant: str):
    """Jitted (models, λ or α) → (metrics, gradients, label weights)."""
    batch = batch_of(name)
    if variant == "shifted":  # the reference counts a slot by the mask of its own place, not of its label's
        batch = batch | {"loss_mask": jnp.roll(batch["loss_mask"], 1, axis=1)}

    @jax.jit
    def run(models, share):
        config = models.drafter.config
        if config.has_backbone:
            drawn = label_blocks(batch, *drawn_blocks(name), config, loss)
        else:
            drawn = Blocks(None, None, eagle3_reference_labels(batch, loss.passes))
        step_loss = loss.at(share, drawn.labels)
        sums, gradients = batch_gradients(models, batch, drawn, step_loss)
        return step_loss.metrics(sums), gradients, drawn.labels.mask

    return run


@functools.lru_cache
def trained(name: str, variant: str):
    """(metrics, gradients by stored name in torch layout, label weights)."""
    loss, share = loss_of(name, variant)
    run = program(name, loss, "shifted" if variant == "shifted" else "")
    metrics, gradients, weights = jax.device_get(run(models_of(name, variant), jnp.float32(share)))
    return metrics, by_stored_name(load_golden(name).drafter.config, gradients), weights


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_losses_and_metrics_match_the_reference(name, variant):
    reference, metrics = load_golden(name).figures["train"][variant], trained(name, variant)[0]
    compared = 0
    for ours, theirs in FIGURES[head_of(name)].items():
        if theirs not in reference or (theirs.startswith("confidence") and not reference["confidence_weight"]):
            continue  # the reference computes no term without a weight
        if theirs == "l1_loss" and ours not in metrics:
            assert reference[theirs] == 0
            continue
        values = reference[theirs] if isinstance(reference[theirs], list) else [reference[theirs]]
        names = [ours] if ours in metrics else [f"{ours}{index + 1}" for index in range(len(values))]
        for metric, value in zip(names, values, strict=True):
            assert abs(metrics[metric] - value) < 1e-5, metric
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_gradient_norm_of_every_tensor_matches_the_reference(name, variant):
    """Where the reference is exactly 0, so is ours."""
    reference, gradients = load_golden(name).figures["train"][variant]["grad_norm"], trained(name, variant)[1]
    assert set(gradients) == set(reference)
    for tensor, norm in reference.items():
        assert abs(np.linalg.norm(gradients[tensor].astype(np.float64)) - norm) <= 1e-4 * norm, tensor


@pytest.mark.parametrize("name", SETS)
def test_gradient_arrays_match_the_reference(name):
    arrays, gradients = load_golden(name).arrays, trained(name, "lambda=0.35" if name in GOLDEN_SETS else "default")[1]
    references = {key.removeprefix("train.grad."): value for key, value in arrays.items() if "train.grad." in key}
    assert len(references) >= 2
    for tensor, reference in references.items():
        assert np.linalg.norm(gradients[tensor] - reference) / np.linalg.norm(reference) < 1e-4, tensor


def test_the_shifted_layout_of_xpress_matches_the_reference():
    golden, (anchors, keep) = load_golden("xpress"), drawn_blocks("xpress")
    module = models_of("xpress", "shifted").drafter
    drafter = golden.drafter._replace(config=module.config, module=module, params={**golden.drafter.params})
    ours = run_blocks(golden.target, drafter, batch_of("xpress")["tokens"], anchors, keep)["final"]
    close(ours[np.asarray(keep)], golden.arrays["shifted.final_logits"][np.asarray(keep)])


@pytest.mark.parametrize("name", [*MARKOV_SETS, "dflash2"])
def test_label_weights_match_the_reference(name):
    """The contiguous mask of the Markov heads, and DFlash2's, which is not cut at a gap."""
    theirs = load_golden(name).arrays["train.weight_mask" if name == "dflash2" else "train.valid"]
    np.testing.assert_array_equal(trained(name, "default")[2], theirs)
