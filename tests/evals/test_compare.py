"""compare.py: names and lanes of drafters."""

import dataclasses

import pytest

from domino_jax.evals.compare import drafter_names
from domino_jax.evals.measure import drafter_lanes
from domino_jax.evals.run_info import RunDrafter
from domino_jax.runtime.errors import DominoError
from tests.helpers.decoding_models import decode_settings_of, random_models

SETTINGS = decode_settings_of(("autoregressive", "backbone", "domino"), max_new_tokens=8, cache_length=64)


def test_a_drafter_is_called_after_its_folder_and_after_more_of_the_path_where_that_is_not_enough():
    assert drafter_names(["/runs/a", "/runs/b"], "--drafters") == ["a", "b"]
    assert drafter_names(["/runs/a/export", "/runs/b/export"], "--drafters") == ["a-export", "b-export"]


def test_a_drafter_without_a_head_is_measured_by_its_backbone():
    models = random_models(head="none")
    lanes = drafter_lanes({"plain": RunDrafter(models, SETTINGS, {"path": "P"})}, ())
    assert [lane.mode for lane in lanes] == ["autoregressive", "backbone"]
    headed = dataclasses.replace(SETTINGS, modes=("domino",))
    with pytest.raises(DominoError, match="P is a drafter of head none, .* none of decode.modes domino"):
        drafter_lanes({"plain": RunDrafter(models, headed, {"path": "P"})}, ())
