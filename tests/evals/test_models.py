"""Models as decode wants them: meshes, made-up weights, rows with sampling values, widths to choose from."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from assets.target_folder import target_config_dict
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.requests import Request, request_of
from domino_jax.evals.models import Loader, check_simulation, decode_mesh
from domino_jax.method.settings import SamplingParams, TreeSettings
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.weights.random_weights import made_up_prompts
from tests.helpers.decoding_models import decode_settings_of, random_drafter, random_models, random_target

SETTINGS = decode_settings_of(("autoregressive", "domino"), max_new_tokens=12, cache_length=64, simulate_tau=2.0)


def test_more_devices_than_there_are_are_refused():
    assert decode_mesh(1, 1, 3) is None  # one device needs no mesh
    for data, tensor in ((1, 3), (2, -1)):
        with pytest.raises(DominoError, match=r"decode\.mesh\.data=.* but 1 are here"):
            decode_mesh(data, tensor, 1)


def made_up(target):
    return random_drafter(random_target()[0])[0].config


def test_a_folder_without_weights_gives_the_same_made_up_weights_each_time(tmp_path):
    raw = target_config_dict(random_target()[0].config, "float32")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    loader = Loader(str(tmp_path), SETTINGS, None, made_up)
    models, again = (loader.models(loader.target(), None, SETTINGS.modes) for _ in range(2))
    assert all(map(np.array_equal, jax.tree.leaves(models), jax.tree.leaves(again)))
    assert models.drafter.config == made_up(None)
    assert [len(row["token_ids"]) for row in made_up_prompts(2, 64, 8)] == [8, 8]
    cut = dataclasses.replace(loader, settings=SETTINGS.change(draft_vocab=64))
    with pytest.raises(DominoError, match=r"draft_vocab is 64, .*simulate_tau"):
        cut.models(loader.target(), None, SETTINGS.modes)


def test_a_stop_id_that_no_token_has_is_dropped_and_all_of_them_where_they_are_ignored():
    assert new_generator(random_models(), SETTINGS, (5, 2**50)).stop_ids.tolist() == [5]
    assert new_generator(random_models(), SETTINGS.change(ignore_eos=True), (5,)).stop_ids.tolist() == [-1]


def test_a_row_may_have_sampling_values_and_is_its_noise_alone_without():
    warm = {"temperature": 0.5, "top_k": 4, "max_new_tokens": 9}
    assert request_of({"id": "a", "prompt": "x"}, 3) == 3
    assert request_of({"id": "a", **warm}, 3) == Request(3, None, 9, SamplingParams(0.5, 4))
    assert request_of({"id": "a", "seed": 7}, 3) == Request(0, 7, None, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_k": "3"}, "top_k '3', expected a number"),
        ({"temperature": 10**400}, "temperature 1000.*give 2147483647 or less"),
        ({"seed": 2**31}, "seed is 2147483648: give a number from 0"),
        ({"seed": True}, "seed True, expected a number"),
    ],
)
def test_a_rows_bad_value_is_refused_by_its_id(values, message):
    with pytest.raises(DataError, match=f"prompt odd.*{message}"):
        request_of({"id": "odd", **values}, 0)


def test_each_mode_has_rounds_of_its_width_and_no_tau_is_forced_beyond_the_narrowest():
    tree = TreeSettings(lanes=4, candidates=8, depth=4)
    modes = ("autoregressive", "backbone", "domino", "tree")
    settings = SETTINGS.change(modes=modes, num_drafts=2, tree=tree)
    config = random_models().drafter.config
    assert settings.round_widths(config) == {"backbone": 3, "domino": 3, "tree": 5}
    plain = random_models(head="none", shift_label=False)
    assert settings.round_widths(plain.drafter.config) == {"backbone": 3, "tree": 5}

    simulated = dataclasses.replace(settings, simulate_tau=4.5)
    check_simulation(dataclasses.replace(simulated, modes=("tree",)), config)
    with pytest.raises(DominoError, match=r"simulate_tau is 4.5, but a round of 2 drafts emits 3"):
        check_simulation(simulated, config)
