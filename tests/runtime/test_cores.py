"""Decoding on few cores: every thread keeps to them, those started meanwhile too, and all get the others back."""

import os
import pathlib
import threading

import pytest

from configs import tiny
from domino_jax.evals import report
from domino_jax.recipe.decode_checks import decode_settings
from domino_jax.runtime.cores import idle_time, kept_to, usable

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux can be asked for it")


def of_all_threads() -> set[int]:
    """How many cores the threads of this process may use."""
    return {len(os.sched_getaffinity(int(task.name))) for task in pathlib.Path("/proc/self/task").iterdir()}


@pytest.fixture
def cores():
    """At least two, for otherwise there is nothing to keep away from."""
    if usable() < 2:
        pytest.skip("one core alone")
    return usable()


@pytest.fixture
def waiting_thread():
    threads, ended = [], threading.Event()

    def start():
        threads.append(threading.Thread(target=ended.wait))
        threads[-1].start()

    yield start
    ended.set()
    for thread in threads:
        thread.join()


def test_all_threads_keep_to_the_cores_and_get_all_back_also_after_an_error(cores, waiting_thread):
    waiting_thread()
    with pytest.raises(KeyError), kept_to(1):
        assert of_all_threads() == {1}
        waiting_thread()
        assert of_all_threads() == {1} and usable() == 1
        assert f"1 of {os.cpu_count()} cores" in report.device()
        raise KeyError
    assert of_all_threads() == {cores}
    assert f"1 of {os.cpu_count()} cores" not in report.device()


def test_the_idlest_core_is_taken(cores, monkeypatch):
    """Core by core, the one that stood idle meanwhile is chosen, whatever the process id."""
    allowed = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr("domino_jax.runtime.cores.WATCHED", 0.0)
    for idle in allowed:
        seen = iter([dict.fromkeys(allowed, 5), {core: 5 + 20 * (core == idle) for core in allowed}])
        monkeypatch.setattr("domino_jax.runtime.cores.idle_time", lambda seen=seen: next(seen))
        with kept_to(1):
            assert os.sched_getaffinity(0) == {idle}


def test_idle_time_is_known_of_every_core_and_never_falls(cores):
    first, second = idle_time(), idle_time()
    assert set(first) >= os.sched_getaffinity(0)
    assert all(second[core] >= spent > 0 for core, spent in first.items())


@pytest.mark.parametrize("more", [0, 1])
def test_zero_and_more_than_there_are_mean_all(cores, more):
    with kept_to(more * (cores + 1)):
        assert of_all_threads() == {cores}


def test_the_tiny_recipe_decodes_on_one():
    assert decode_settings(tiny.get_config().decode, "domino").cores == 1
