"""Decoding on few cores: every thread keeps to them, those started meanwhile too, and all get the others back."""

import os
import pathlib
import threading

import pytest

from configs import tiny
from domino_jax import report
from domino_jax.cores import kept_to, usable
from domino_jax.decode_settings import decode_settings

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


def test_all_threads_keep_to_the_cores_and_get_all_back(cores, waiting_thread):
    waiting_thread()
    with kept_to(1):
        assert of_all_threads() == {1}
        waiting_thread()
        assert of_all_threads() == {1} and usable() == 1
    assert of_all_threads() == {cores}


def test_an_error_gives_them_back_too(cores):
    with pytest.raises(KeyError), kept_to(1):
        raise KeyError
    assert of_all_threads() == {cores}


@pytest.mark.parametrize("more", [0, 1])
def test_zero_and_more_than_there_are_mean_all(cores, more):
    with kept_to(more * (cores + 1)):
        assert of_all_threads() == {cores}


def test_a_report_says_how_many_were_used(cores):
    there = f"{os.cpu_count()} cores"
    with kept_to(1):
        assert f"1 of {there}" in report.device()
    assert f"1 of {there}" not in report.device()


def test_the_tiny_recipe_decodes_on_one():
    assert decode_settings(tiny.get_config().decode).cores == 1
