"""Every head takes a step with every loss that the rules of recipes let it have, and all of the drafter learns."""

import itertools

import jax
import numpy as np
import pytest

from configs import qwen3
from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.drafters import CONFIGS, new_drafter
from domino_jax.method.losses import Loss
from domino_jax.recipe import rules
from domino_jax.recipe.builders import drafter_config_of, loss_of
from domino_jax.runtime.errors import DominoError
from tests.helpers.decoding_models import random_target
from tests.helpers.models import random_params
from tests.helpers.recipes import train_recipe

SMALL = {
    "domino": {"emb_dim": 8, "gru_hidden_dim": 16},
    **{head: {"rank": 8} for head in ("markov", "dflash2", "xpress")},
    "eagle3": {"draft_vocab_size": 40, "passes": 2},
}
TRAIN = {"loss": ("own", "cross_entropy"), "dpace_alpha": (None, 0.5)}


def recipe_of(head: str, **train):
    recipe = qwen3.get_config("target")
    recipe.drafter.update({"head": head, "num_layers": 1, "block_size": 4})
    recipe.drafter.target_layer_ids = (0, 1, 2) if head == "eagle3" else (0,)
    recipe.drafter.update({name: values for name, values in SMALL.items() if name == head})
    recipe.train.update({"num_anchors": 4, **train})
    return recipe


def is_allowed(head: str, train: dict) -> bool:
    try:
        rules.check(recipe_of(head, **train), "dry_run")
    except DominoError:
        return False
    return True


def cases():
    """(head, train section): every different loss of a head, without other choices and with all that it can have."""
    for head in CONFIGS:
        choices = [dict(zip(TRAIN, values, strict=True)) for values in itertools.product(*TRAIN.values())]
        allowed = [train for train in choices if is_allowed(head, train)]
        by_loss = [[train for train in allowed if train["loss"] == loss] for loss in TRAIN["loss"]]
        ends = [group[place] for group in by_loss if group for place in (0, -1)]
        yield from ((head, train) for train in {loss_of(recipe_of(head, **train)): train for train in ends}.values())


CASES = list(cases())


@pytest.mark.parametrize(
    ("head", "train"),
    [
        pytest.param(
            head,
            train,
            marks=[pytest.mark.long] * (head != "domino"),
            id=f"{head}-{'-'.join(map(str, train.values()))}",
        )
        for head, train in CASES
    ],
)
def test_a_step_moves_every_parameter(head, train):
    recipe, (target, target_params) = recipe_of(head, **train), random_target(layers=4)
    drafter = new_drafter(drafter_config_of(recipe, target.config))
    params = random_params(jax.eval_shape(lambda: init_drafter_params(drafter, jax.random.key(0))), 1)
    _, _, state, [loss] = train_recipe(recipe, target, target_params, params=params)
    assert np.isfinite(loss) and loss > 0
    still = jax.tree.map(lambda old, new: bool((old == new).all()), params, state.params)
    assert not [jax.tree_util.keystr(path) for path, value in jax.tree.leaves_with_path(still) if value]


def test_each_head_has_a_case():
    assert {head for head, _ in CASES} == set(CONFIGS)
    own = {head for head, kind in CONFIGS.items() if "loss" in kind.reads and kind.loss is not Loss}
    assert own <= {head for head, train in CASES if train["loss"] == "cross_entropy"}
