"""The trainings of the studies as data: each is a recipe that the train command accepts."""

import ast

import pytest

from benchmarks.studies import ablations
from benchmarks.studies.head_variants import ARMS, variants
from configs import tiny
from domino_jax.method.drafters import CONFIGS
from domino_jax.recipe import rules

TRAININGS = {
    **{name: changes for name, (_, changes) in ablations.VARIANTS.items()},
    **{f"{name} of heads": one.changes for name, one in variants(16).items()},
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_changes_keys_and_types_of_the_recipe(name):
    config = tiny.get_config()
    for key, value in TRAININGS[name].items():
        parsed = ast.literal_eval(value) if isinstance(value, str) and value.startswith("(") else value
        config.update_from_flattened_dict({key: parsed})
    config.eval.final = False  # as the studies have it: the final decoding is in the modes of a Domino drafter
    rules.check(config, "train")


def test_every_head_is_compared_and_every_drafter_is_in_an_arm():
    drafters = variants(16)
    assert {one.changes["drafter.head"] for one in drafters.values()} == set(CONFIGS)
    assert {name for arm in ARMS.values() for name in arm.variants} == set(drafters)


def test_a_frozen_backbone_has_the_layout_of_its_heads():
    drafters = variants(16)
    for one in drafters.values():
        if one.backbone:
            backbone = drafters[one.backbone].changes
            shifted = one.changes["drafter.head"] != "dflash2"
            assert backbone["drafter.head"] == "none" and backbone.get("drafter.shift_label", False) is shifted
            assert backbone["drafter.block_size"] == one.changes["drafter.block_size"]
