"""Options of pytest that run the slow tests a part at a time, so that a series of short runs reaches all of them.

    pytest -m slow -n 2 --dist=loadfile --no-loadscope-reorder --minutes=15 --turn=$(git rev-list --count HEAD)

The command starts no test after 15 minutes and lists the tests that it did not reach. The files are divided into the
fewest parts that each fit 15 minutes on two workers. Turn T begins with part T, its longest file first, and continues
with the next one. A test of more than half a minute is marked with its length: @pytest.mark.slow(minutes=3).
"""

import math
import time
from collections import Counter
from collections.abc import Mapping

import pytest

WORKERS = 2
FILLED = 0.8  # of the time that a part may take: two workers never end together, and machines differ
MINUTES = 0.5  # of a test without a length


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, default=math.inf, help="start no test after this many minutes")
    parser.addoption("--turn", type=int, default=None, help="begin with this part of the files, counted in circles")


def pytest_configure(config):
    config.started = time.monotonic()
    config.parts = [[]]


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    turn = config.getoption("--turn")
    if turn is None:
        return
    minutes = Counter()
    for item in items:
        marker = item.get_closest_marker("slow")
        minutes[str(item.path)] += marker.kwargs.get("minutes", MINUTES) if marker else 0
    try:
        config.parts = divide(minutes, config.getoption("--minutes"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    first = turn % len(config.parts)
    order = sum(config.parts[first:] + config.parts[:first], [])
    items.sort(key=lambda item: order.index(str(item.path)))


def divide(minutes: Mapping[str, float], limit: float) -> list[list[str]]:
    """File → its minutes, as the fewest parts that two workers finish within the limit; the longest file first."""
    for file, needed in minutes.items():
        if needed > FILLED * limit:
            raise ValueError(f"{file} needs {needed:g} of {limit:g} minutes on one worker: divide it.")
    count = max(1, math.ceil(sum(minutes.values()) / (WORKERS * FILLED * limit)))
    parts, filled = [[] for _ in range(count)], [0.0] * count
    for file in sorted(minutes, key=lambda file: (-minutes[file], file)):
        emptiest = filled.index(min(filled))
        parts[emptiest].append(file)
        filled[emptiest] += minutes[file]
    return parts


def pytest_runtest_setup(item):
    minutes = item.config.getoption("--minutes")
    if time.monotonic() - item.config.started > 60 * minutes:
        pytest.skip(f"not reached in {minutes:g} minutes of {len(item.config.parts)} turns: {item.nodeid}")
