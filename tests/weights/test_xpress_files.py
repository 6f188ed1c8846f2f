"""xPress drafters in both public layouts, the authors' and speculators': read, refused, and written in the first."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from domino_jax.runtime.errors import DataError
from domino_jax.weights.drafter import load_drafter, save_drafter
from tests.helpers.golden_files import raw_config, stored_tensors, target_config, write_model
from tests.helpers.paths import GOLDEN

FOLDER = GOLDEN / "xpress"
TARGET = target_config("xpress")


def load(folder):
    return load_drafter(folder, TARGET, np.float32)


@pytest.fixture(scope="module")
def drafter():
    return load(FOLDER / "drafter")


def test_both_layouts_hold_the_same_drafter(drafter):
    config, params = load(FOLDER / "speculators")
    assert config.to_dict() == drafter[0].to_dict()
    jax.tree.map(np.testing.assert_array_equal, params, drafter[1])


def test_a_written_folder_is_the_public_one(drafter, tmp_path):
    """The same tensors, the raw mixer among them, and no key that says something else."""
    save_drafter(tmp_path, *drafter, "float32")
    written, public = load_file(tmp_path / "model.safetensors"), load_file(FOLDER / "drafter" / "model.safetensors")
    assert set(written) == set(public)
    jax.tree.map(np.testing.assert_array_equal, written, public)
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (FOLDER / "drafter", tmp_path))
    keys = ("architectures", "block_size", "mask_token_id", "sample_from_anchor", "dflash_config")
    keys += tuple(key for key in theirs if key.startswith("xpress_"))
    assert ours.get("xpress_topc") == 0  # vLLM's default is 512
    nested = {**ours.get("dflash_config", {})}
    assert nested.pop("shift_label", None) is None
    assert {key: ours.get(key) for key in keys} == {key: theirs.get(key) for key in keys}
    again, params = load(tmp_path)
    assert again.to_dict() == drafter[0].to_dict()
    jax.tree.map(np.testing.assert_array_equal, params, drafter[1])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"xpress_block_size": 6}, ("block_size 8", "xpress_block_size 6")),
        ({"xpress_candidate_topc": 64}, ("xpress_candidate_topc 64",)),
        ({"draft_vocab_size": 128}, ("draft_vocab_size 128", "vocab_size 260")),
        ({"xpress_rank": None}, ("xpress_rank",)),
        ({"block_size": 6, "xpress_block_size": 6}, ("mix.L", "8, 8", "6, 6")),
    ],
)
def test_what_this_head_cannot_compute_is_refused_by_its_key(tmp_path, changes, named):
    raw = {**raw_config("xpress", "drafter"), **changes}
    with pytest.raises(DataError) as refused:
        load(write_model(tmp_path, raw, stored_tensors("xpress", "drafter")))
    assert all(part in str(refused.value) for part in named) and len(str(refused.value).splitlines()) <= 2
