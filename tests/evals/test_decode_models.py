"""Models as decode wants them: meshes, made-up weights, rows with values of their own, widths to choose from."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from domino_jax.decoding.generate import Request
from domino_jax.decoding.measure import tau_pooled
from domino_jax.decoding.propose import TreeSettings
from domino_jax.decoding.sampling import SamplingParams
from domino_jax.decoding.settings import DecodeSettings, new_generator, request_of
from domino_jax.evals import width_tuning
from domino_jax.evals.models import Loader, decode_mesh
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.weights.loading import shortened
from domino_jax.weights.random_weights import made_up_prompts
from domino_jax.weights.target import target_config_dict
from tests.helpers.decoding_models import random_drafter, random_models, random_prompts, random_target, texts
from tests.helpers.models import GOLDEN, load_golden

SETTINGS = DecodeSettings(modes=("autoregressive", "domino"), max_new_tokens=12, cache_length=64, simulate_tau=2.0)


def test_one_device_needs_no_mesh():
    assert decode_mesh(1, 1, 3) is None


@pytest.mark.parametrize(("data", "tensor"), [(1, 3), (2, -1), (-1, 5)])
def test_more_devices_than_there_are_are_refused(data, tensor):
    with pytest.raises(DominoError, match=r"decode\.mesh\.data=.* but 1 are here"):
        decode_mesh(data, tensor, 1)


def folder_of(tmp_path) -> str:
    """A folder with the shapes of the random target and nothing else."""
    raw = target_config_dict(random_target()[0].config, "float32")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return str(tmp_path)


def made_up(target):
    return random_drafter(random_target()[0])[0].config


def test_a_folder_without_weights_decodes_at_a_forced_acceptance_length(tmp_path):
    loader = Loader(folder_of(tmp_path), SETTINGS, None, made_up)
    loaded = loader.target()
    models = loader.models(loaded, None, SETTINGS.modes)
    again = Loader(folder_of(tmp_path), SETTINGS, None, made_up).models(loader.target(), None, SETTINGS.modes)
    assert all(map(np.array_equal, jax.tree.leaves(models), jax.tree.leaves(again)))
    assert models.drafter.config == made_up(None)
    prompts = [row["token_ids"] for row in made_up_prompts(2, 64, 8)]
    assert [len(prompt) for prompt in prompts] == [8, 8]


def test_without_simulation_a_folder_without_weights_is_refused(tmp_path):
    settings = dataclasses.replace(SETTINGS, simulate_tau=0.0)
    with pytest.raises(DataError):
        Loader(folder_of(tmp_path), settings, None, made_up).target()


def test_more_tokens_a_round_than_it_can_emit_are_not_simulated(tmp_path):
    """The report would name a figure that nothing had forced."""
    folder = folder_of(tmp_path)
    for tau, drafts in ((5.5, 0), (4.5, 3)):
        settings = dataclasses.replace(SETTINGS, simulate_tau=tau, num_drafts=drafts)
        loader = Loader(folder, settings, None, made_up)
        with pytest.raises(DominoError, match=f"simulate_tau is {tau}, but a round of {drafts or 4} drafts emits"):
            loader.models(loader.target(), None, SETTINGS.modes)


def golden_loader(**choices) -> Loader:
    # Sizes of test_decode_command.py, whose programs are compiled then.
    settings = DecodeSettings(("domino",), max_new_tokens=24, cache_length=128, batch_size=2, **choices)
    return Loader(str(GOLDEN / "tied_shift" / "target"), settings, None, made_up)


def test_a_table_of_gates_is_built_when_asked_and_changes_neither_tokens_nor_rounds():
    cases = [load_golden("tied_shift").figures["generate"][number] for number in (1, 3)]
    made = {}
    for tabled in (True, False):
        loader = golden_loader(gate_table=tabled)
        loaded = loader.target()
        models = loader.models(loaded, str(GOLDEN / "tied_shift" / "drafter"), ("domino",))
        assert (models.gates is not None) == tabled
        if tabled:
            config = models.drafter.config
            assert models.gates.shape == (models.target.config.vocab_size, 3 * config.gru_hidden_dim)
        generator = new_generator(models, loaded.stop_ids, loader.settings)
        made[tabled] = generator.generate([case["prompt"] for case in cases], "domino")
    assert made[True] == made[False]
    assert texts(made[True]) == [case["output"][:24] for case in cases]


def test_a_stop_id_that_no_token_has_is_refused_of_the_recipe_and_dropped_of_the_folder():
    with pytest.raises(DominoError, match="stop_ids holds 99999999999, but the target has 260 tokens"):
        golden_loader(stop_ids=(7, 99_999_999_999)).target()
    assert new_generator(random_models(), (5, 2**50), SETTINGS).stop_ids.tolist() == [5]


def test_a_shorter_block_is_a_drafter_of_its_own():
    config = random_models().drafter.config
    assert (shortened(config, 3).block_size, shortened(config, 3).num_drafts) == (3, 3)
    assert shortened(config, 0) is config
    with pytest.raises(DominoError, match="trained with blocks of 4"):
        shortened(config, 5)
    with pytest.raises(DominoError, match="no slot after its prefix"):
        shortened(dataclasses.replace(config, pure_draft_prefix_len=2), 2)


def test_a_row_without_values_is_its_noise_alone():
    assert request_of({"id": "a", "prompt": "x"}, 3) == 3


def test_a_row_may_have_values_of_its_own():
    row = {"id": "a", "temperature": 0.5, "top_k": 4, "max_new_tokens": 9}
    assert request_of(row, 3) == Request(3, None, 9, SamplingParams(0.5, 4))
    assert request_of({"id": "a", "seed": 7}, 3) == Request(0, 7, None, None)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": "3"}, "top_k '3', expected a number"),
        ({"top_k": 2**31}, "top_k 2147483648.*give 2147483647 or less"),
        ({"temperature": 10**400}, "temperature 1000.*give 2147483647 or less"),
        ({"seed": -2}, "seed -2"),
        ({"seed": 2**31}, "seed 2147483648"),
        ({"seed": True}, "seed True, expected a number"),
    ],
)
def test_a_rows_bad_value_is_refused_by_its_id(values, said):
    with pytest.raises(DataError, match=f"prompt odd.*{said}"):
        request_of({"id": "odd", **values}, 0)


def test_widths_halve_and_trees_fit():
    settings = dataclasses.replace(SETTINGS, modes=("domino", "tree"), tree=TreeSettings(lanes=4, candidates=8))
    own, half = width_tuning.chains_of(settings, random_models().drafter.config)
    chains = [(option.mode, option.block_size, option.num_drafts, option.nodes) for option in own]
    assert chains == [("domino", 4, 4, 0), ("domino", 4, 2, 0), ("domino", 4, 1, 0)]
    assert [option.num_drafts for option in half] == [2, 1]
    trees = width_tuning.trees_of(settings, own[0])
    assert {nodes: {option.lanes for option in options} for nodes, options in trees.items()} == {16: {4}}
    assert width_tuning.trees_of(settings, half[0]) == {}  # two drafts of four lanes are no 15 nodes


@pytest.mark.parametrize(
    ("modes", "compare", "said"),
    [(("autoregressive",), (), "drafts nothing"), (("domino",), ("a", "b"), "decode.compare names several")],
)
def test_where_there_is_no_width_to_choose_tuning_is_refused(modes, compare, said):
    width_tuning.check_tuning(("autoregressive", "tree"), ())
    with pytest.raises(DominoError, match=said):
        width_tuning.check_tuning(modes, compare)


def timed(mode, drafts, rate, nodes=0):
    lanes, beta = (4, -0.2) if nodes else (0, 0.0)
    return width_tuning.Timed(width_tuning.Option(mode, 4, drafts, nodes, lanes, beta), 2.0, 1.0, rate)


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (timed("domino", 2, 9.0), (4, 2, ("domino",), None)),
        (timed("tree", 4, 9.0, nodes=32), (4, 0, ("domino", "tree"), (32, 4, -0.2))),
    ],
)
def test_the_fastest_width_is_taken_and_a_slower_tree_left_out(monkeypatch, first, expected):
    monkeypatch.setattr(width_tuning, "measure", lambda *_: [first, timed("domino", 4, 8.0)])
    settings = dataclasses.replace(SETTINGS, modes=("domino", "tree"), tree=TreeSettings())
    chosen, _ = width_tuning.tune(random_models(), (), settings, [[1]])
    tree = chosen.tree and (chosen.tree.nodes, chosen.tree.lanes, chosen.tree.beta)
    assert (chosen.block_size, chosen.num_drafts, chosen.modes, tree) == expected


def test_each_mode_has_rounds_of_its_own_width_and_no_tau_is_forced_beyond_the_narrowest():
    tree = TreeSettings(lanes=4, candidates=8, depth=4)
    modes = ("autoregressive", "backbone", "domino", "tree")
    settings = dataclasses.replace(SETTINGS, modes=modes, num_drafts=2, tree=tree)
    models = random_models()
    assert settings.round_widths(models.drafter.config) == {"backbone": 3, "domino": 3, "tree": 5}
    plain = random_models(projector="dflash", shift_label=False)
    assert settings.round_widths(plain.drafter.config) == {"backbone": 3, "tree": 5}

    def loader(modes, tau):
        return Loader("", dataclasses.replace(settings, modes=modes, simulate_tau=tau), None, made_up)

    loader(("tree",), 4.5)._check_simulation(models)
    with pytest.raises(DominoError, match=r"simulate_tau is 4.5, but a round of 2 drafts emits 3"):
        loader(modes, 4.5)._check_simulation(models)


@pytest.mark.parametrize("draft_scale", [None, math.inf, 2.0])
def test_an_interrupted_run_goes_on_with_the_width_that_it_began_with(monkeypatch, tmp_path, draft_scale):
    best = timed("tree", 4, 9.0, nodes=32)
    monkeypatch.setattr(width_tuning, "measure", lambda *_: [best])
    tree = TreeSettings(draft_scale=draft_scale)
    settings = dataclasses.replace(SETTINGS, modes=("domino", "tree"), tree=tree)
    file = tmp_path / "out" / "tune.json"
    first, _ = width_tuning.tuned(random_models(), (), settings, [[1]], file)
    assert json.loads(file.read_text())["measured"][0]["nodes"] == first.tree.nodes == 32
    monkeypatch.setattr(width_tuning, "measure", None)
    again, models = width_tuning.tuned(random_models(8), (), settings, [[1]], file)
    assert again == first and models.drafter.config.block_size == 4


def test_expected_tokens_grow_with_the_width_and_of_each_size_of_tree_the_best_is_timed():
    tree = TreeSettings(lanes=4, candidates=8)
    settings = dataclasses.replace(SETTINGS, simulate_tau=0.0, modes=("domino", "tree"), tree=tree)
    models, prompts = random_models(), random_prompts(3)
    found = width_tuning.measure(models, (), settings, prompts)
    tau = {(one.option.block_size, one.option.num_drafts, one.option.nodes): one.tau for one in found}
    assert 1 < tau[4, 1, 0] <= tau[4, 2, 0] <= tau[4, 4, 0] <= tau[4, 4, 16]
    assert sorted(tau)[-1] == (4, 4, 16) and len(tau) == 6
    [option] = [one.option for one in found if one.option.nodes]
    looped = new_generator(models, (), dataclasses.replace(settings, tree=option.tree(settings)))
    assert tau_pooled(looped.generate(prompts, "tree")) == pytest.approx(tau[4, 4, 16])
    assert [one.tokens_per_second for one in found] == sorted((one.tokens_per_second for one in found), reverse=True)
