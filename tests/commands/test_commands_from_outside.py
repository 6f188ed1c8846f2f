"""Commands on disks that take no file: read-only, or full."""

import contextlib
import errno
import os
import subprocess
import sys

import pytest

from domino_jax.recipe import cli
from tests.helpers.commands import run
from tests.helpers.paths import ROOT
from tests.helpers.train_runs import GOLDEN, arguments, training_rows, write_rows


def train(*flags):
    command = [sys.executable, "-m", "domino_jax.train", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@contextlib.contextmanager
def disk(folder, option):
    """A separate file system, read-only ("ro") or small ("size=…"): root, who ignores mode bits, meets it as well."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize(
    ("command", "output"),
    [("train", "--workdir={}/run"), ("decode", "--output={}/out"), ("regenerate", "--output={}/rows")],
)
def test_a_read_only_disk_is_one_sentence_and_exit_code_2(tmp_path, capsys, command, output):
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "token_ids": [1, 2]}\n')
    flags = [f"--config={ROOT}/configs/tiny.py", f"--config.target.path={GOLDEN}/target", "--distributed=off"]
    if command != "train":
        flags.append(f"--prompts={tmp_path}/prompts.jsonl")
    with disk(tmp_path / "disk", "ro"):
        code = run(command, *flags, output.format(tmp_path / "disk"))
    error = capsys.readouterr().err.splitlines()
    assert code == 2 and len(error) <= 5 and "Read-only file system" in error[0]


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 3), (errno.EROFS, 2), (errno.EACCES, 2)])
def test_a_disk_that_takes_no_file_is_reported_in_one_sentence_wherever_it_happens(capsys, number, code):
    def main(flags):
        raise OSError(number, os.strerror(number), "folder/file")

    with pytest.raises(SystemExit) as left:
        cli.run(main, ("workdir",), (), ["command", "--workdir=w"])
    assert left.value.code == code
    message = capsys.readouterr().err
    assert message.startswith("error: folder/file cannot be ") and os.strerror(number) in message
    assert message.count("\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [100, 900, 2_200])
def test_a_run_on_a_full_disk_ends_with_3_in_one_sentence_and_continues_when_there_is_room(tmp_path, kilobytes):
    """By the size the start-up files, TensorBoard, a checkpoint or the export finds no room; none may hang."""
    rows, folder = write_rows(tmp_path / "rows.jsonl", training_rows()), tmp_path / "disk"
    changes = {"distributed": "auto", "config.checkpoint.every": 2, "config.train.steps": 30}
    flags = arguments((rows, rows), folder / "run", **changes)
    with disk(folder, f"size={kilobytes}k"):
        done = train(*flags)
        assert done.returncode == 3 and "error: " in done.stderr, done.stderr
        subprocess.run(["mount", "-o", "remount,size=100m", folder], check=True)
        done = train(*flags)
        assert done.returncode == 0, done.stderr
