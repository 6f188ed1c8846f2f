"""Tests run on the CPU in true float32."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from tests.models import GOLDEN_SETS, Golden, load_golden

jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="session", params=GOLDEN_SETS)
def golden(request) -> Golden:
    """Each golden set in turn."""
    return load_golden(request.param)
