"""compare.py: names of drafters, one lane of plain decoding for all of them, heads asked for where there are some."""

import dataclasses

import pytest

from domino_jax.evals.compare import drafter_lanes, drafter_names
from domino_jax.runtime.errors import DominoError
from tests.helpers.decoding_models import decode_settings_of, random_models

SETTINGS = decode_settings_of(("autoregressive", "backbone", "domino"), max_new_tokens=8, cache_length=64)


def test_a_drafter_is_called_after_its_folder_and_after_more_of_the_path_where_that_is_not_enough():
    assert drafter_names(["/runs/a", "/runs/b"]) == ["a", "b"]
    assert drafter_names(["/runs/a/export", "/runs/b/export"]) == ["a-export", "b-export"]


def test_a_folder_that_is_named_twice_is_refused():
    with pytest.raises(DominoError, match="names a folder twice"):
        drafter_names(["/runs/a", "/runs/../runs/a"])


def test_all_drafters_share_the_lane_of_plain_decoding():
    drafters = {"a": ("A", random_models()), "b": ("B", random_models(6))}
    lanes = drafter_lanes(drafters, (), SETTINGS)
    assert [lane.name for lane in lanes] == ["autoregressive", "a/backbone", "a/domino", "b/backbone", "b/domino"]
    assert lanes[1].generator is lanes[0].generator is not lanes[3].generator


def test_a_drafter_without_a_head_is_measured_by_its_backbone():
    drafters = {"plain": ("P", random_models(projector="dflash"))}
    assert [lane.mode for lane in drafter_lanes(drafters, (), SETTINGS)] == ["autoregressive", "backbone"]
    with pytest.raises(DominoError, match="P is a plain DFlash drafter .* no backbone"):
        drafter_lanes(drafters, (), dataclasses.replace(SETTINGS, modes=("domino",)))
