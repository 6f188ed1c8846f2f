"""Options of pytest for runs with a time limit.

    pytest -m slow --minutes=20 --file-order=SEED

starts no test after so many minutes, and skips what it did not reach by name; SEED decides the order of the files, so
that runs that are cut short reach other files each time.
"""

import random
import time

import pytest


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, default=None, help="start no test after so many minutes")
    parser.addoption("--file-order", default=None, help="shuffle the test files by this seed")


def pytest_configure(config):
    config.started = time.monotonic()


def pytest_collection_modifyitems(config, items):
    seed = config.getoption("--file-order")
    if seed is not None:
        files = sorted({item.path for item in items})
        random.Random(seed).shuffle(files)
        items.sort(key=lambda item: files.index(item.path))


def pytest_runtest_setup(item):
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - item.config.started > 60 * minutes:
        pytest.skip(f"not reached in {minutes:g} minutes: {item.nodeid}")
