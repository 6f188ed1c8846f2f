"""Tests run on the CPU in true float32."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile the same programs again and again: they share one cache, gone when the session ends.
COMPILED = tempfile.TemporaryDirectory(prefix="domino-tests-")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", COMPILED.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import jax
import pytest

from tests.models import GOLDEN_SETS, Golden, load_golden

jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="session", params=GOLDEN_SETS)
def golden(request) -> Golden:
    """Each golden set in turn."""
    return load_golden(request.param)
