"""Comparisons with other programs: our side of SpecForge's step, and the torch yardstick on golden tokens."""

import jax
import numpy as np
import pytest

from benchmarks.device.train_step import LAMBDA
from benchmarks.peers.specforge import Case, OurTrainer, random_batch, write_models
from domino_jax.method.losses import LossSettings, Objective
from domino_jax.method.pair import Models
from domino_jax.method.step import drafter_loss, label_blocks, target_pass
from tests.helpers.models import GOLDEN, TARGET_FIELDS, load_golden

DRAFTER = {
    "num_layers": 1,
    "target_layer_ids": (0, 1),
    "block_size": 4,
    "shift_label": True,
    "pure_draft_prefix_len": 1,
    "emb_dim": 6,
    "gru_hidden_dim": 10,
}
PAIR, NEW = "tied_shift", 24
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


def test_all_torch_loops_give_the_golden_tokens_and_the_domino_loop_the_golden_rounds():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from benchmarks.peers import torch_domino

    torch.set_num_threads(1)  # more would wait for each other on a busy machine
    target = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / PAIR / "target", dtype=torch.float32).eval()
    drafter = torch_domino.TorchDrafter(str(GOLDEN / PAIR / "drafter"))
    for case in load_golden(PAIR).figures["generate"][1:4:2]:
        theirs = torch_domino.plain_generate(target, case["prompt"], NEW, (257,))
        tokens, accepts = torch_domino.domino_generate(target, drafter, case["prompt"], NEW, (257,))
        looked_up = torch_domino.plain_generate(target, case["prompt"], NEW, (257,), lookup=3)
        assert theirs == looked_up == tokens == case["output"][:NEW]
        *whole, last = accepts  # the last round is cut to what was asked for
        assert whole == case["accept_lengths"][: len(whole)] and last <= case["accept_lengths"][len(whole)]
        assert max(accepts) > 2
