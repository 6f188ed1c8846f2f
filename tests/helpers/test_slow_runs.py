"""The slow tests in turns: each turn begins with another part, and what was not reached is listed."""

import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.slow_runs import divide

FILES = {"a": 0.5, "b": 4, "c": 9, "d": 0.5, "e": 7, "f": 2}


def test_the_files_are_divided_into_the_fewest_parts_that_two_workers_finish_in_time_longest_first():
    assert divide(FILES, 12) == [["c", "f", "a"], ["e", "b", "d"]]
    assert divide(FILES, 100) == [["c", "e", "b", "f", "a", "d"]]


def test_a_file_that_no_turn_can_finish_is_refused():
    with pytest.raises(ValueError, match="c needs 9 of 10 minutes on one worker"):
        divide(FILES, 10)


SUITE = "import pytest\n@pytest.mark.slow(minutes={})\ndef test_{}(): assert {}\n"


def run(folder, *options, fails=()):
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    for name, minutes in FILES.items():
        (folder / f"test_{name}.py").write_text(SUITE.format(minutes, name, name not in fails))
    plugins = ("-p", "no:cacheprovider", "-p", "tests.helpers.slow_runs")
    command = [sys.executable, "-m", "pytest", "-v", "-rs", *plugins, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    order = [line.split(".py")[0][-1] for line in done.stdout.splitlines() if line.endswith("%]")]
    return done.returncode, "".join(order), done.stdout


def test_each_turn_begins_with_another_part_and_a_failure_fails_the_run(tmp_path):
    assert run(tmp_path, "--minutes=12", "--turn=6")[:2] == (0, "cfaebd")
    assert run(tmp_path, "--minutes=12", "--turn=7", fails=("f",))[:2] == (1, "ebdcfa")


def test_tests_that_were_not_reached_are_listed_and_fail_nothing(tmp_path):
    code, _, text = run(tmp_path, "--minutes=0")
    assert code == 0 and "6 skipped" in text and "not reached in 0 minutes of 1 turns: test_f.py::test_f" in text
