"""profile_to: the trace of train.profile_steps."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from domino_jax.training.hooks import profile_to


def test_a_trace_is_a_file_that_a_viewer_opens(tmp_path):
    hook = profile_to(tmp_path, (2, 2))
    for number in (1, 2):
        hook(SimpleNamespace(done=number, measured=jax.jit(jnp.sin)(jnp.ones(8))))
    assert list(tmp_path.rglob("*.xplane.pb"))
