"""Models as decode wants them: meshes, rows with sampling values, widths to choose from."""

import pytest

from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.requests import Request, request_of
from domino_jax.method.settings import SamplingParams, TreeSettings
from domino_jax.recipe.models import decode_mesh
from domino_jax.runtime.errors import DataError, DominoError
from tests.helpers.decoding_models import decode_settings_of, random_models

SETTINGS = decode_settings_of(("autoregressive", "domino"), max_new_tokens=12, cache_length=64)


def test_more_devices_than_there_are_are_refused():
    assert decode_mesh(1, 1, 3) is None  # one device needs no mesh
    for data, tensor in ((1, 3), (2, -1)):
        with pytest.raises(DominoError, match=r"decode\.mesh\.data=.* but 1 are here"):
            decode_mesh(data, tensor, 1)


def test_a_stop_id_that_no_token_has_is_dropped():
    assert new_generator(random_models(), SETTINGS, (5, 2**50)).stop_ids.tolist() == [5]


def test_a_row_may_have_sampling_values_and_is_its_noise_alone_without():
    warm = {"temperature": 0.5, "top_k": 4, "max_new_tokens": 9}
    assert request_of({"id": "a", "prompt": "x"}, 3) == 3
    assert request_of({"id": "a", **warm}, 3) == Request(3, None, 9, SamplingParams(0.5, 4))
    assert request_of({"id": "a", "seed": 7}, 3) == Request(0, 7, None, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_k": "3"}, "top_k is '3', expected a number"),
        ({"temperature": 10**400}, "temperature 1000.*give 2147483647 or less"),
        ({"seed": 2**31}, "seed is 2147483648: give a number from 0"),
        ({"seed": True}, "seed is True, expected a number"),
    ],
)
def test_a_rows_bad_value_is_refused_by_its_id(values, message):
    with pytest.raises(DataError, match=f"prompt odd.*{message}"):
        request_of({"id": "odd", **values}, 0)


def test_each_mode_has_rounds_of_its_width_and_verifies_the_nodes_of_a_tree_without_its_root():
    tree = TreeSettings(lanes=4, candidates=8, depth=4)
    modes = ("autoregressive", "backbone", "domino", "tree")
    settings = SETTINGS.change(modes=modes, num_drafts=2, tree=tree)
    config = random_models().drafter.config
    assert settings.round_widths(config) == {"backbone": 3, "domino": 3, "tree": 5}
    assert [settings.drafting_of(mode, config).verified(config) for mode in modes[1:]] == [2, 2, 63]
    plain = random_models(head="none", shift_label=False)
    assert settings.round_widths(plain.drafter.config) == {"backbone": 3, "tree": 5}
