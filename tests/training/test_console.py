"""console.py: what a run prints before its first step."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from domino_jax.training import console

DEVICES, AXES = np.array(jax.devices()[:1]), ("data", "fsdp", "tensor")


def shape(*sizes, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def test_the_recipe_is_one_section_a_line_without_what_is_not_set():
    recipe = {"seed": 42, "train": {"steps": 900, "lr": 6e-4, "name": "", "list": [1, 2], "alpha": None, "on": True}}
    assert console.recipe_lines(recipe) == [
        "         seed=42",
        "  train  steps=900  lr=0.0006  name=  list=[1, 2]  on=True",
    ]


def test_a_table_names_every_array_with_its_size():
    params = {"head": {"up": {"kernel": shape(256, 1000)}}, "norm": {"scale": shape(16, dtype=jnp.bfloat16)}}
    assert console.parameter_lines(params) == [
        "  name            shape     dtype     parameters       bytes",
        "  head/up/kernel  256×1000  float32      256,000  1000.0 KiB",
        "  norm/scale      16        bfloat16          16        32 B",
        "  2 arrays, 256,016 parameters, 1000.0 KiB",
    ]


def test_the_targets_layers_are_one_line_a_kind():
    layers = {f"layers_{index}": {"q_proj": {"kernel": shape(8, 4)}} for index in range(12)}
    lines = console.parameter_lines({**layers, "norm": {"scale": shape(8)}})
    assert lines[1].split() == ["layers_*/q_proj/kernel", "12", "×", "8×4", "float32", "384", "1.5", "KiB"]
    assert len(lines) == 4 and lines[3].startswith("  13 arrays, 392 parameters")
    assert len(console.parameter_lines({"layers_0": shape(8), "layers_1": shape(4)})) == 4  # two shapes


def test_a_sharded_array_shows_its_mesh_axes_and_what_one_device_holds():
    mesh = jax.sharding.AbstractMesh((2, 4, 1), AXES, axis_types=(AxisType.Auto,) * 3)

    def laid(*spec):
        return NamedSharding(mesh, PartitionSpec(*spec))

    params = {
        "a": shape(8, 16, sharding=laid("fsdp", "tensor")),
        "b": shape(8, sharding=laid()),
        "c": shape(8, 4, sharding=laid(("data", "fsdp"), None)),
    }
    lines = console.parameter_lines(params)
    assert [line.split()[-1] for line in lines[:4]] == ["sharding", "fsdp,–", "whole", "data+fsdp,–"]
    # 128 values over 4, 8 whole, 32 over 8: 44 of 4 bytes.
    assert lines[4].endswith("672 B, 176 B per device")
