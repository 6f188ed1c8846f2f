"""A command imports what it uses: the libraries of training, plots and servers cost seconds of every start."""

import subprocess
import sys

import pytest

HEAVY = {"matplotlib", "scipy", "tensorboardX", "grain", "orbax", "uvicorn", "transformers"}
HEAVY |= {"huggingface_hub", "google"}
# google: protobuf, by way of tensorstore.
NEEDED = {"decode": set(), "serve": set(), "evaluate": {"matplotlib"}}
NEEDED["train"] = {"matplotlib", "orbax", "google", "huggingface_hub"}


def loaded(statement):
    """The heavy libraries in sys.modules of a process after a statement."""
    script = f"{statement}; import sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return HEAVY & set(done.stdout.split())


@pytest.mark.parametrize("command", NEEDED)
def test_a_command_loads_no_library_before_it_needs_one(command):
    assert loaded(f"import domino_jax.{command}") <= NEEDED[command]


def test_the_package_alone_loads_neither_jax_nor_numpy():
    script = "import sys, domino_jax; print({'jax', 'numpy', 'flax'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"
