"""benchmarks/peers/specforge.py without torch: our side of it, its rows, its ratios and its report."""

import jax
import numpy as np

from benchmarks.device.train_step import LAMBDA
from benchmarks.peers import specforge as against_specforge
from benchmarks.peers.specforge import OURS, THEIRS, Case, Measured, OurTrainer, random_batch, write_models
from domino_jax.method.losses import LossSettings, Objective
from domino_jax.method.pair import Models
from domino_jax.method.step import drafter_loss, label_blocks, target_pass
from tests.helpers.models import TARGET_FIELDS

DRAFTER = {
    "num_layers": 1,
    "target_layer_ids": (0, 1),
    "block_size": 4,
    "head": "domino",
    "shift_label": True,
    "pure_draft_prefix_len": 1,
    "emb_dim": 6,
    "gru_hidden_dim": 10,
}
CASE = Case(rows=2, length=24, anchors=5, gamma=4.0, target=TARGET_FIELDS, drafter=DRAFTER)


def test_the_anchors_given_to_the_other_side_are_those_of_our_step(tmp_path):
    ours = OurTrainer(*write_models(CASE, tmp_path), CASE)
    batch = random_batch(CASE, TARGET_FIELDS["vocab_size"], 0)
    drafter = ours.drafter
    drawn = label_blocks(batch, *ours.anchors(batch, 0), drafter.config, LossSettings(gamma=4.0, contiguous=False))

    @jax.jit
    def loss_of(target_params, drafter_params):
        objective = Objective(LossSettings(gamma=4.0), LAMBDA, drawn.labels.weight)
        features, _ = target_pass(ours.target, target_params, batch, drafter.config.target_layer_ids)
        models = Models(ours.target, target_params, drafter, drafter_params)
        return drafter_loss(models, features, batch, drawn, objective)[0]

    expected = loss_of(ours.target_params, jax.device_get(ours.state.params))
    np.testing.assert_allclose(ours.step(batch), expected, rtol=1e-5)
    assert ours.step_with_features(batch, 0) > 0.0


def test_rows_differ_from_step_to_step_and_the_first_is_full():
    first, second = (random_batch(CASE, 80, number) for number in (0, 1))
    assert (first["tokens"] != second["tokens"]).any() and set(first["row_ids"]).isdisjoint(second["row_ids"])
    assert first["loss_mask"][0, -1] == 1.0 and first["loss_mask"][:, :2].sum() == 0.0
    assert first["tokens"].max() < 79  # the mask token


def measured() -> Measured:
    return Measured(
        seconds={OURS: [1.0, 2.0, 1.0], THEIRS: [2.0, 3.0, 4.0]},
        cpu_seconds={OURS: [1.0, 1.0, 1.0], THEIRS: [1.0, 3.0, 2.0]},
        without_target={OURS: [0.5, 0.5, 0.5], THEIRS: [1.5, 1.5, 1.5]},
        losses={OURS: [7.5, 7.25], THEIRS: [7.5, 7.250004]},
        first_seconds={OURS: 20.0, THEIRS: 1.0},
    )


def test_a_ratio_is_of_the_same_step_and_their_median_is_given():
    found = measured()
    assert found.ratio(found.seconds) == (2.0, 1.5, 4.0)
    np.testing.assert_allclose(found.difference, 4e-6 / 7.25, rtol=1e-3)


def test_the_report_states_the_agreement_and_both_rates():
    lines = against_specforge.report("tiny", measured(), " --steps=3", "A machine.").splitlines()
    assert "agree to 6e-07 of their value (7.50 at the start). A machine." in lines[2]
    assert "| domino_jax | 4.00 | 1,000 | 1,000 | 500 | 20.0 s |" in lines
    assert lines[-1].startswith("domino_jax to SpecForge: 2.00 × the rows per second (1.50 to 4.00), 2.00 × by CPU")
