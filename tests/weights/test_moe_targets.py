"""Targets with experts: public folders give transformers' logits, copies in eight bits load, bad configs are refused.

tests/golden/moe has three random Qwen3 MoE models (tests/golden/README.md).
"""

import json
import shutil

import jax
import numpy as np
import pytest

from domino_jax.models import sharding
from domino_jax.models.quantized import dequantized, is_quantized
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.weights import hf
from domino_jax.weights.identity import target_identity
from domino_jax.weights.target import file_tensors, load_target, target_table
from tests.helpers.golden_files import check_logits
from tests.helpers.models import GOLDEN

FOLDERS = GOLDEN / "moe"
FORMS = ("every_layer", "some_layers", "fp8")


def config_of(form: str) -> dict:
    return json.loads((FOLDERS / form / "config.json").read_text())


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_gives_the_logits_of_transformers(form):
    config, params = check_logits(FOLDERS, form)
    if form == "fp8":
        assert is_quantized(params["layers_0"]["mlp"]["experts"]["up_proj"]["kernel"])
    sparse = ["experts" in params[f"layers_{index}"]["mlp"] for index in range(config.num_hidden_layers)]
    assert sparse == {"every_layer": [True] * 2, "some_layers": [False, True, False, False], "fp8": [True, False]}[form]


def test_what_is_written_is_what_was_read():
    config, params = load_target(FOLDERS / "some_layers", "float32")
    tensors = file_tensors(target_table(config), params, "float32")
    stored = hf.open_tensors(FOLDERS / "some_layers")
    assert set(tensors) == set(stored)
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, stored.read(name))


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_copies_in_eight_bits_leave_the_router_and_are_scaled_by_expert_and_channel(quantize):
    plain, copies = (load_target(FOLDERS / "every_layer", "float32", quantize=each)[1] for each in (None, quantize))
    plain, copies = plain["layers_1"]["mlp"], copies["layers_1"]["mlp"]
    np.testing.assert_array_equal(copies["gate"]["kernel"], plain["gate"]["kernel"])
    for name, kernel in ((name, part["kernel"]) for name, part in plain["experts"].items()):
        copy = copies["experts"][name]["kernel"]
        assert copy["scale"].shape == (kernel.shape[0], 1, kernel.shape[2])
        largest = abs(np.asarray(kernel)).max(axis=1, keepdims=True)
        assert (abs(dequantized(copy) - kernel) <= largest * (0.5 / 127 if quantize == "int8" else 2**-4)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "says qwen3_moe but lacks num_experts;"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9; expected an integer from 1 to 8"),
        ({"num_local_experts": 4}, "'num_experts': 8, 'num_local_experts': 4"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers '1'; expected a list"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob 'false'; expected true or false"),
        ({"model_type": "mixtral"}, "'mixtral', but the target"),
    ],
)
def test_a_config_that_lacks_a_field_or_is_another_mixture_is_refused_in_one_sentence(changes, message):
    raw = {key: value for key, value in (config_of("every_layer") | changes).items() if value is not None}
    with pytest.raises(DataError) as error:
        Qwen3Config.from_dict(raw)
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1


def test_experts_that_the_tensor_axis_does_not_divide_are_refused():
    config = Qwen3Config.from_dict(config_of("every_layer"))
    mesh = jax.sharding.AbstractMesh((1, 1, 3), sharding.MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    shapes = {"mlp": {"experts": {"up_proj": {"kernel": jax.ShapeDtypeStruct((8, 32, 16), "float32")}}}}
    with pytest.raises(DominoError, match="has 8 experts, which mesh.tensor 3 does not divide; set it"):
        sharding.param_shardings(mesh, shapes, config.num_key_value_heads)
    target_table.cache_clear()  # traced as by a command, within the mesh and before a weight is placed
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(DominoError, match="has 8 experts, which mesh.tensor 3"):
        target_table(config)


def test_targets_that_route_otherwise_are_different_models(tmp_path):
    shutil.copytree(FOLDERS / "every_layer", tmp_path / "target")
    raw = config_of("every_layer") | {"norm_topk_prob": False}
    (tmp_path / "target" / "config.json").write_text(json.dumps(raw))
    assert target_identity(FOLDERS / "every_layer")["weights"] != target_identity(tmp_path / "target")["weights"]
