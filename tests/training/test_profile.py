"""profile_to: the steps of train.profile_steps are traced, and no other."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from domino_jax.training.hooks import profile_to


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [((2, 3), ["step 1", "start", "step 2", "step 3", "stop", "step 4"]), ((), ["step 1", "step 2"])],
)
def test_the_steps_asked_for_are_traced_and_no_other(monkeypatch, wanted, expected):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    hook = profile_to("folder", wanted)
    for number in (int(line[-1]) for line in expected if line.startswith("step")):
        calls.append(f"step {number}")
        hook(SimpleNamespace(done=number, measured=jnp.zeros(())))
    assert calls == expected


def test_a_trace_is_a_file_that_a_viewer_opens(tmp_path):
    hook = profile_to(tmp_path, (2, 2))
    for number in (1, 2):
        hook(SimpleNamespace(done=number, measured=jax.jit(jnp.sin)(jnp.ones(8))))
    assert list(tmp_path.rglob("*.xplane.pb"))
