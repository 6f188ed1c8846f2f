"""compare.py: names and lanes of drafters; each batch size is measured once, against plain decoding of that size."""

import dataclasses

import pytest

from domino_jax.decoding.generate import Clock, Generated, Generation
from domino_jax.evals.compare import ComparedDrafter, drafter_lanes, drafter_names
from domino_jax.evals.lanes import Lane
from domino_jax.evals.measure import measure_concurrency
from domino_jax.evals.prompts import TextCodec, prepare_prompts
from domino_jax.evals.run_files import RunFiles
from domino_jax.evals.run_info import PromptSource, RunInfo
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
    drafters = {
        "a": ComparedDrafter("A", random_models(), SETTINGS),
        "b": ComparedDrafter("B", random_models(6), SETTINGS),
    }
    lanes = drafter_lanes(drafters, ())
    assert [lane.name for lane in lanes] == ["autoregressive", "a/backbone", "a/domino", "b/backbone", "b/domino"]
    assert lanes[1].generator is lanes[0].generator is not lanes[3].generator


def test_a_drafter_without_a_head_is_measured_by_its_backbone():
    models = random_models(head="none")
    lanes = drafter_lanes({"plain": ComparedDrafter("P", models, SETTINGS)}, ())
    assert [lane.mode for lane in lanes] == ["autoregressive", "backbone"]
    headed = dataclasses.replace(SETTINGS, modes=("domino",))
    with pytest.raises(DominoError, match="P is a drafter of head none, .* none of decode.modes domino"):
        drafter_lanes({"plain": ComparedDrafter("P", models, headed)}, ())


def test_in_fixed_shape_drafters_of_other_widths_cannot_share_the_plain_run():
    fixed = dataclasses.replace(SETTINGS, parity="fixed_shape")
    same = {"a": ComparedDrafter("A", random_models(), fixed), "b": ComparedDrafter("B", random_models(), fixed)}
    assert len(drafter_lanes(same, ())) == 5
    other = {**same, "c": ComparedDrafter("C", random_models(6), fixed)}
    with pytest.raises(DominoError, match="'fixed_shape', but rounds of a and of c have different widths"):
        drafter_lanes(other, ())


# --------------------------------------------------------------------------------------------- batch sizes

ROWS = [{"id": str(index), "token_ids": [1, 2], "task": "gsm8k"} for index in range(10)]


class Timed:
    """A group takes a second plain and half of one otherwise, and another second of prefill."""

    def __init__(self):
        self.groups = []

    def generate(self, models, prompts, mode, requests):
        self.groups.append((mode, len(prompts)))
        plain = mode == "autoregressive"
        answers = [Generation([5, 6, 7], [] if plain else [2], "length")] * len(prompts)
        return Generated(answers, Clock(1.0, 1.0 if plain else 0.5, 0.0, 2 * len(prompts)))


def measure(folder, sizes):
    made = {}

    def lanes_of(size):
        made[size] = Timed()
        return [Lane(mode, mode, None, made[size]) for mode in ("autoregressive", "domino")]

    codec, drafter = TextCodec(None, False), random_models().drafter.config
    settings = dataclasses.replace(SETTINGS, modes=("autoregressive", "domino"), concurrency=sizes)
    info = RunInfo(settings, "T", "D", PromptSource("P"), settings=settings, drafter_config=drafter)
    with RunFiles(folder, {}) as files:
        return measure_concurrency(lanes_of, prepare_prompts(ROWS, codec), codec, files, info), made


def test_every_mode_has_figures_at_every_size(tmp_path):
    found, made = measure(tmp_path, (1, 2))
    assert [count for mode, count in made[2].groups if mode == "domino"] == [8, 2]
    assert list(found) == ["1", "2"]
    domino = found["2"]["modes"]["domino"]
    assert (domino["tokens_per_second"], domino["speedup"], domino["tau_pooled"]) == (20.0, 2.0, 2.0)
    assert domino["output_tokens_per_second"] == 30 / 3.0  # all tokens, the prefills' time too
    identical = found["1"]["identical_outputs"]["domino"]
    assert (identical["same"], identical["of"]) == (10, 10)


def test_a_size_that_is_on_disk_is_not_measured_again(tmp_path):
    first, _ = measure(tmp_path, (1,))
    found, made = measure(tmp_path, (1, 4))
    assert found["1"] == first["1"] and list(made) == [4]
