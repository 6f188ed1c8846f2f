"""EAGLE-3: what the passes of its training-time test read, and its config.json in both conventions."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.drafters import new_drafter
from domino_jax.method.heads.eagle3 import NORMS, Eagle3Config, default_layer_ids
from domino_jax.method.heads.eagle3_model import attend_passes
from domino_jax.method.pair import TargetRows
from domino_jax.models import attention
from domino_jax.runtime.errors import DataError
from tests.helpers.decoding_models import random_models
from tests.helpers.golden_files import raw_config, target_config


def config_of(**changes) -> Eagle3Config:
    """The golden config.json with other values; "absent" removes a key, a dict changes a section."""
    raw = raw_config("eagle3", "drafter")
    for key, value in changes.items():
        raw[key] = {**(raw[key] or {}), **value} if isinstance(value, dict) and key in raw else value
    plain = {key: value for key, value in raw.items() if value != "absent"}
    return Eagle3Config.from_dict(plain, target_config("eagle3"))


LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("part_rows", [512, 2])
@pytest.mark.parametrize(("packed", "window"), [(False, None), (True, None), (False, 2)])
def test_a_pass_reads_the_first_one_causally_and_its_own_row_of_the_later_ones(packed, window, part_rows, monkeypatch):
    """Four passes over five rows, held against one dense mask over all keys: 1 0 0 …, then diagonals."""
    monkeypatch.setattr(attention, "PART_ROWS", part_rows)
    random = np.random.default_rng(0)

    def draw(heads):
        return jnp.asarray(random.standard_normal((2, heads, 5, 8)), jnp.float32)

    q, passes = draw(4), tuple((draw(2), draw(2)) for _ in range(4))
    documents = jnp.asarray([[1, 1, 2, 2, 2], [1, 1, 1, 1, 0]]) if packed else jnp.ones((2, 5), jnp.int32)
    causal = jnp.tril(jnp.ones((5, 5), bool)) & (documents[:, :, None] == documents[:, None, :])
    causal &= jnp.triu(jnp.ones((5, 5), bool), 1 - (window or 5))
    own = jnp.broadcast_to(jnp.eye(5, dtype=bool), (2, 5, 5))
    mask = jnp.concatenate([causal, own, own, own], axis=2)
    k, v = (jnp.concatenate([one[part] for one in passes], axis=2) for part in (0, 1))
    expected = attention.attend(q, k, v, mask)
    result = attend_passes(q, passes, documents if packed else None, window)
    np.testing.assert_allclose(result, expected, atol=1e-6)


def test_the_draft_of_a_row_depends_on_the_anchor_and_on_nothing_after_it():
    """The anchor's row has the anchor's embedding: another anchor is another chain, with the same context."""
    models = random_models(head="eagle3")
    rows, fused = models.drafter.init_cache(2, 8)
    embedded = models.embed(jnp.array([3, 4]))
    logits = models.bound.draft_step(rows, fused + 0.1, embedded, jnp.array([0, 0]))[0]
    assert np.abs(logits[0] - logits[1]).max() > 0.1


@pytest.mark.long
def test_with_all_norms_a_chain_computes_what_the_passes_train():
    """norm_output, norm_before_fc and norm_before_residual, as speculators sets them by default."""
    models = random_models(head="eagle3")
    config = dataclasses.replace(models.drafter.config, **dict.fromkeys(NORMS, True))
    drafter, random = new_drafter(config), np.random.default_rng(0)
    params = models.drafter_params | {"input_norm": {"scale": jnp.asarray(random.uniform(0.5, 2, 96), jnp.float32)}}
    features, embedded = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((1, 6, 96), (1, 9, 32)))

    def call(*args, method=None):
        return drafter.apply({"params": params}, *args, method=method)

    states = call(features, embedded, 3)
    expected = call(states, method="logits")[0, 5]
    cache = drafter.init_cache(1, 12)
    passed = TargetRows(features, embedded[:, 1:7], jnp.array([6]))
    rows, state = call(cache, passed, jnp.arange(6)[None], method="extend_context")
    for depth in range(3):
        slots = jnp.array([5 + depth])
        logits, state, rows = call(rows, state, embedded[:, 6 + depth], slots, method="draft_step")
        np.testing.assert_allclose(logits[0], expected[depth], atol=1e-5)


def test_a_drafted_row_reads_the_rows_of_its_window_alone():
    models = random_models(head="eagle3")
    drafter = new_drafter(dataclasses.replace(models.drafter.config, sliding_window=3))
    (keys, values), state = drafter.init_cache(1, 8)
    state, x = state + 0.3, models.embed(jnp.array([3]))

    def logits(changed):
        noise = jnp.zeros_like(keys).at[:, :, changed].set(1.0)
        args = (keys + noise, values + noise), state, x, jnp.array([4])
        return drafter.apply({"params": models.drafter_params}, *args, method="draft_step")[0]

    assert [bool(jnp.array_equal(logits(row), logits(0))) for row in range(4)] == [True, True, False, False]


# --------------------------------------------------------------------------------------------------- config.json


def test_layer_ids_count_outputs_in_eagle_config_and_inputs_at_the_top_level():
    assert config_of().target_layer_ids == (1, 2, 4)
    assert config_of(**{"eagle_config": "absent", LAYERS: [2, 3, 5]}).target_layer_ids == (1, 2, 4)
    assert config_of(**{LAYERS: [2, 3, 5]}).target_layer_ids == (1, 2, 4)
    assert default_layer_ids(36) == (1, 17, 32)
    written = config_of().to_dict()
    assert (written["eagle_config"][LAYERS], written[LAYERS]) == ([1, 2, 4], [2, 3, 5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({LAYERS: [1, 2, 4]}, r"\[1, 2, 4\] in eagle_config and \[1, 2, 4\] at top level"),
        ({"eagle_config": "absent", LAYERS: [0, 2, 4]}, r"(?s)ids \[-1, 1, 3\] .* at top level the ids are one higher"),
        ({"eagle_config": {LAYERS: [1, 2]}}, r"ids \[1, 2\] must be 3 different layers"),
        ({"eagle_config": {LAYERS: [1, 2, 2]}}, r"ids \[1, 2, 2\]"),
        ({"fc_norm": True}, "fc_norm"),
        ({"norm_output": "yes"}, "norm_output 'yes'"),
        ({"eagle_config": {"norm_output": True}}, "eagle_config.norm_output"),
        ({"eagle_config": {"norm_before_residual": True}}, "eagle_config.norm_before_residual"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"attention_bias": True}, "attention_bias"),
        ({"draft_vocab_size": 261}, "draft_vocab_size 261; expected an integer from 1 to 260"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"head_dim": 0}, "head_dim"),
    ],
)
def test_what_changes_the_layer_or_contradicts_itself_is_refused_by_name(changes, message):
    with pytest.raises(DataError, match=f"(?s){message}"):
        config_of(**changes)


def test_a_new_drafter_without_data_drafts_tokens_that_the_target_has():
    """Shapes of a dry run: every id of the made-up vocabulary is a row of the target's embedding."""
    target = random_models(head="eagle3").target.config
    for size in (40, 10**6):
        config = Eagle3Config.for_target(target, draft_vocab_size=size, target_layer_ids=(0, 1, 2))
        tokens = config.draft_tokens if len(config.draft_tokens) else np.arange(config.draft_vocab_size)
        assert len(tokens) == min(size, target.vocab_size) and tokens.max() < target.vocab_size
    with pytest.raises(DataError, match="must be 3 different layers"):
        Eagle3Config.for_target(target, draft_vocab_size=8)  # the public rule needs six layers or more
