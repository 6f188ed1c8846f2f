"""profile_to: the trace of train.profile_steps."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from domino_jax.training.hooks import profile_to


@pytest.mark.parametrize("last", [2, 9])  # the run ends with step 3
def test_a_trace_is_a_file_that_a_viewer_opens(tmp_path, last):
    hook = profile_to(tmp_path, (2, last))
    for number in (1, 2, 3):
        hook(SimpleNamespace(done=number, steps=3, measured=jax.jit(jnp.sin)(jnp.ones(8))))
    assert list(tmp_path.rglob("*.xplane.pb"))
