"""Medusa heads: what they start as, what they read, and their config.json."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.heads.medusa import Medusa, MedusaConfig
from domino_jax.method.pair import TargetRows
from domino_jax.method.settings import TreeSettings
from domino_jax.runtime.errors import DataError
from tests.helpers.decoding_models import golden_models, make_generator, random_models, texts
from tests.helpers.golden_files import raw_config
from tests.helpers.models import load_golden


def test_new_heads_are_the_targets_own_next_token_head():
    module = Medusa(MedusaConfig(8, 20, num_heads=3, num_hidden_layers=2, bias=True))
    params = init_drafter_params(module, jax.random.key(0))
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(params)) and len(jax.tree.leaves(params)) == 12
    x = jax.random.normal(jax.random.key(1), (2, 8))
    np.testing.assert_array_equal(module.apply({"params": params}, x), jnp.stack([x] * 3, axis=1))


def test_every_block_of_every_head_has_its_own_weights():
    """Two different layers are not the first one twice, and one head's weights are no other head's."""
    models = random_models(head="medusa")
    x = jax.random.normal(jax.random.key(0), (1, 32))

    def states(params):
        return models.drafter.apply({"params": params}, x)[0]

    params = models.drafter_params
    swapped = {
        **params,
        "heads_0": {"layers_0": params["heads_0"]["layers_1"], "layers_1": params["heads_0"]["layers_1"]},
    }
    changed = np.abs(states(swapped) - states(params)).max(axis=1)
    assert changed[0] > 0.1 and (changed[1:] == 0).all()
    for head in range(4):
        w, b = (params[f"heads_{head}"]["layers_0"][name] for name in ("kernel", "bias"))
        first = x[0] + jax.nn.silu(x[0] @ w + b)
        w, b = (params[f"heads_{head}"]["layers_1"][name] for name in ("kernel", "bias"))
        np.testing.assert_allclose(states(params)[head], first + jax.nn.silu(first @ w + b), atol=1e-5)


def test_the_last_state_of_the_text_is_kept_row_by_row():
    """Row 0 has three rows of text, row 1 none in this pass, row 2 one."""
    module, hidden = random_models(head="medusa").drafter, jnp.arange(3 * 4 * 32.0).reshape(3, 4, 32)
    before = (-jnp.ones((3, 32)),)
    passed = TargetRows(None, hidden, None, jnp.array([3, 0, 1]))
    [kept] = module.extend_context(before, passed, None)
    np.testing.assert_array_equal(kept, jnp.stack([hidden[0, 2], before[0][1], hidden[2, 0]]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"original_lm_head": False}, "original_lm_head False"),
        ({"original_lm_head": None}, "lacks original_lm_head"),
        ({"truncated_vocab_size": 100}, "truncated_vocab_size 100 and vocab_size 300"),
        ({"num_heads": 0}, "num_heads 0; expected an integer from 1 to 1024"),
        ({"num_heads": None}, "lacks num_heads"),
        ({"hidden_size": "48"}, "hidden_size '48'"),
        ({"medusa_fc_bias": "no"}, "medusa_fc_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_a_config_that_is_wrong_or_means_other_heads_is_refused_by_name(changes, message):
    with pytest.raises(DataError, match=message):
        MedusaConfig.from_dict(raw_config("medusa", "drafter") | changes)


def test_a_config_is_what_its_file_says_again():
    config = MedusaConfig.from_dict(raw_config("medusa", "drafter"))
    assert config == MedusaConfig(48, 300, 5) and config.num_drafts == 5
    assert MedusaConfig.from_dict(config.to_dict()) == config


def test_a_tree_of_products_gives_the_golden_texts_in_fewer_rounds_than_the_chain():
    rows = load_golden("medusa").figures["generate"]
    tree = TreeSettings(nodes=24, lanes=6, candidates=8, beta=0.0)
    made = make_generator(golden_models("medusa"), cache_length=160, max_new_tokens=64, batch_size=4, tree=tree)
    answers = made.generate([row["prompt"] for row in rows], "tree")
    assert texts(answers) == [row["output"] for row in rows]
    assert sum(len(answer.accept_lengths) for answer in answers) < sum(len(row["accept_lengths"]) for row in rows)
