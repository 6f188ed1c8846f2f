"""DFlash2's public folder: its keys in either place, its tensors under either name, and what contradicts it."""

import jax
import numpy as np
import pytest

from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafters import parse_config
from domino_jax.runtime.errors import DataError
from domino_jax.weights.drafter import load_drafter
from tests.helpers.golden_files import raw_config, stored_tensors, target_config, write_model
from tests.helpers.paths import GOLDEN

NAME, TARGET = "dflash2", "tied_shift"
KEYS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 6, "block_size": 8}
# The released 27B drafter: every layer slides, and only layer_types says so.
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2048, "use_sliding_window": "absent"}


def read(nested: dict | None = None, **top) -> DrafterConfig:
    """The golden config with other keys at the top level and in dflash_config; "absent" removes one."""
    raw = {**raw_config(NAME, "drafter"), **top}
    raw["dflash_config"] = {**raw["dflash_config"], **(nested or {})}
    parts = raw["dflash_config"], raw
    for part in parts:
        for key in [key for key, value in part.items() if isinstance(value, str) and value == "absent"]:
            del part[key]
    return parse_config(raw)


def load(folder):
    return load_drafter(folder, target_config(TARGET), "float32")


@pytest.mark.parametrize("key", [*KEYS, "output_multiplier", "final_logit_softcapping", "input_embedding_scale"])
def test_a_key_is_read_at_top_level_in_dflash_config_or_in_both(key):
    value = KEYS[key] if key in KEYS else 1.5
    for nested, top in ((value, "absent"), ("absent", value), (value, value)):
        assert getattr(read({key: nested}, **{key: top}), key) == value


def test_a_cap_of_zero_is_none_and_sliding_layers_need_no_switch():
    assert read({"final_logit_softcapping": 0.0}).final_logit_softcapping is None
    config = read(**SLIDING)
    assert (config.window(0), config.causal(0)) == (2048, False)
    assert read(**SLIDING, is_causal="absent").causal(0)
    with pytest.raises(DataError, match="sliding_window"):
        read(**{**SLIDING, "use_sliding_window": False})


@pytest.mark.parametrize(
    ("top", "nested", "named"),
    [
        ({}, {"selector_rank": "absent"}, "dflash2\\) lacks selector_rank"),
        ({}, {"conv_kernel_size": 9}, r"conv_kernel_size 9 is not in 0\.\.8"),
        ({}, {"conv_group_size": 24}, "conv_group_size 24 does not divide hidden_size 64"),
        ({}, {"selector_top_k": 261}, r"selector_top_k 261 is not in 1\.\.260"),
        ({"selector_rank": 13}, {}, "selector_rank 13 and dflash_config.selector_rank 12"),
        ({}, {"shift_label": True}, "shift_label True and architectures"),
        ({"architectures": ["DFlashDraftModel"]}, {}, "dflash_config.selector_rank 12"),
    ],
)
def test_what_is_missing_impossible_or_contradicts_the_class_is_refused_by_name(top, nested, named):
    with pytest.raises(DataError, match=named) as error:
        read(nested, **top)
    assert len(str(error.value).splitlines()) <= 5


# ---- tensors ---------------------------------------------------------------------------------------------------------


def test_codebooks_are_read_under_both_names_and_not_twice(tmp_path):
    raw, tensors = raw_config(NAME, "drafter"), stored_tensors(NAME, "drafter")
    books = [name for name in tensors if name.endswith("_codebook")]
    renamed = {f"{name}.weight" if name in books else name: array for name, array in tensors.items()}
    _, expected = load(GOLDEN / NAME / "drafter")
    jax.tree.map(np.testing.assert_array_equal, load(write_model(tmp_path / "renamed", raw, renamed))[1], expected)
    twice = {**tensors, f"{books[0]}.weight": tensors[books[0]]}
    with pytest.raises(DataError, match="1 twice"):
        load(write_model(tmp_path / "twice", raw, twice))
