"""train.profile_steps: a trace of the steps asked for and of no other, closed whatever happens."""

import jax
import jax.numpy as jnp
import pytest

from domino_jax.training.step_clock import Profile


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What the profiler was asked to do, with the steps in between."""
    seen = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: seen.append(f"start {folder}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append("stop"))
    return seen


def steps(profile: Profile, numbers, calls) -> None:
    for number in numbers:
        profile.before(number)
        calls.append(f"step {number}")
        profile.after(number, jnp.zeros(()))


def test_the_steps_asked_for_are_traced_and_no_other(calls):
    with Profile("folder", (2, 3)) as profile:
        steps(profile, range(1, 6), calls)
    assert calls == ["step 1", "start folder", "step 2", "step 3", "stop", "step 4", "step 5"]


def test_nothing_asked_for_is_nothing_traced(calls):
    with Profile("folder", ()) as profile:
        steps(profile, range(1, 4), calls)
    assert calls == ["step 1", "step 2", "step 3"]


def test_a_run_that_ends_early_closes_its_trace(calls):
    with pytest.raises(RuntimeError), Profile("folder", (1, 9)) as profile:
        steps(profile, range(1, 3), calls)
        raise RuntimeError
    assert calls[-1] == "stop" and calls.count("stop") == 1


def test_a_trace_is_a_file_that_a_viewer_opens(tmp_path):
    with Profile(tmp_path, (1, 1)) as profile:
        profile.before(1)
        profile.after(1, jax.jit(jnp.sin)(jnp.ones(8)))
    assert list(tmp_path.rglob("*.xplane.pb"))
