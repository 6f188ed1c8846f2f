"""The options of this suite: a time limit that names what it did not reach, and an order of files by a seed."""

import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

NAMES = [f"test_{letter}" for letter in "abcdefgh"]


@pytest.fixture
def suite(tmp_path):
    """A folder of eight files, one passing test each."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"def {name}(): pass\n")
    return tmp_path


def run(folder, *options):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.helpers.slow_runs",
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout


def order(output):
    return [line.split(".py")[0] for line in output.splitlines() if line.endswith("%]")]


def test_a_seed_decides_the_order_of_the_files(suite):
    codes, texts = zip(*(run(suite, f"--file-order={seed}") for seed in ("one", "one", "two")), strict=True)
    assert codes == (0, 0, 0)
    first, again, other = map(order, texts)
    assert sorted(first) == sorted(other) == NAMES
    assert first == again and first != other and first != NAMES


def test_what_the_time_did_not_reach_is_listed_and_nothing_fails(suite):
    code, text = run(suite, "--minutes=0")
    assert code == 0 and "8 skipped" in text and "not reached in 0 minutes: test_h.py::test_h" in text


def test_a_failure_within_the_time_fails_the_run(suite):
    (suite / "test_a.py").write_text("def test_a(): assert False\n")
    code, text = run(suite, "--minutes=10", "--file-order=one")
    assert code == 1 and "1 failed, 7 passed" in text
