"""The plug-in for vLLM, installed for the tests that need the engine."""

import shutil
import subprocess

import pytest

from tests.helpers.paths import ROOT
from tests.processes.test_engines import PYTHON

PLUGIN = ROOT / "integrations" / "vllm"


@pytest.fixture(scope="session")
def plugin(tmp_path_factory):
    """The folder into which the plug-in is installed. Skips where PYTHON has no vLLM."""
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([PYTHON, "-c", question], check=False).returncode:
        pytest.skip(f"{PYTHON} has no vllm; VLLM_PYTHON names one that has")
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PLUGIN, folder / "source")  # a build leaves files there
    words = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*words, "--target", folder / "installed", folder / "source"], check=True)
    return folder / "installed"
