"""What happens to a command from outside: Ctrl-C while it is imported, a closed pipe or terminal, a read-only disk."""

import contextlib
import errno
import os
import pathlib
import pty
import random
import signal
import subprocess
import sys
import time

import pytest

from domino_jax import decode, regenerate, train
from domino_jax.recipe import cli
from domino_jax.runtime.errors import DataError, DominoError, unwritable
from tests.helpers.paths import ROOT
from tests.helpers.train_runs import arguments, training_rows, write_rows

# A command as ours are, with something to say before and after its reader is gone.
TALKS = """
import pathlib, sys, time
from domino_jax.recipe import cli

def main(flags):
    print("ready", flush=True)
    while not pathlib.Path(flags.output).exists():
        time.sleep(0.01)
    for number in range(3_000):
        print("a line that is longer than most", number)
    print("a warning", file=sys.stderr, flush=True)
    pathlib.Path(flags.output).write_text("done")
    return 42

cli.run(main, (), ("output",))
"""


def start(*command, **how):
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    return subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, env=os.environ, text=True, **how)


# ---------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("command", ["train", "tune"])  # the longest and a short import; all commands begin alike
def test_an_interrupt_before_a_command_begins_leaves_with_130_and_no_traceback(tmp_path, command):
    """While it is imported, or while it reads its recipe: this one takes a minute, so that no machine is too slow."""
    (tmp_path / "recipe.py").write_text("import time\ntime.sleep(60)")
    process = start("-m", f"domino_jax.{command}", f"--config={tmp_path / 'recipe.py'}")
    wait_for_package(process)
    moment = random.uniform(0, 1.5)
    print(f"interrupted after {moment} s")
    time.sleep(moment)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "") and "Traceback" not in error and "error:" not in error


def test_an_interrupt_in_pythons_last_moments_does_not_replace_the_exit_code(tmp_path):
    """The interpreter removes handlers before it deletes its modules."""
    recipe = "import builtins, os\nclass Last:\n    def __del__(self, kill=os.kill, me=os.getpid()): kill(me, 2)\n"
    (tmp_path / "recipe.py").write_text(f"{recipe}builtins.last = Last()\nfrom configs.tiny import get_config")
    process = start("-m", "domino_jax.tune", f"--config={tmp_path / 'recipe.py'}", "--no_such_flag=1")
    assert "unknown flag --no_such_flag" in process.communicate(timeout=60)[1]
    assert process.returncode == 2


def wait_for_package(process):
    """Returns once the command imports its first library: what Python does before it has run any line of ours."""
    deadline = time.monotonic() + 60
    while "numpy" not in pathlib.Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


def test_the_package_as_a_library_leaves_signals_alone():
    code = "import signal; before = signal.getsignal(2); import domino_jax; assert signal.getsignal(2) is before"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# ---------------------------------------------------------------- closed pipes and terminals


def test_a_command_whose_reader_is_gone_loses_its_text_alone(tmp_path):
    process = start("-c", TALKS, f"--output={tmp_path / 'file'}")
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    process.stderr.close()
    (tmp_path / "file").touch()
    assert process.wait(timeout=60) == 42
    assert (tmp_path / "file").read_text() == "done"


def test_a_command_whose_terminal_is_gone_goes_on_where_that_signal_is_ignored(tmp_path):
    """As under nohup: SIGHUP is ignored, and every write to the terminal is an input/output error."""
    leader, follower = pty.openpty()
    process = start("-c", TALKS, f"--output={tmp_path / 'file'}", stdout=follower, stderr=follower)
    os.close(follower)
    assert os.read(leader, 100).startswith(b"ready")
    os.close(leader)
    (tmp_path / "file").touch()
    assert process.wait(timeout=60) == 42
    assert (tmp_path / "file").read_text() == "done"


def test_a_full_disk_under_standard_output_costs_its_text_alone(tmp_path):
    (tmp_path / "file").touch()
    with open("/dev/full", "w") as full:
        process = start("-c", TALKS, f"--output={tmp_path / 'file'}", stdout=full)
        message = process.communicate(timeout=60)[1]
    assert (process.returncode, message) == (42, "a warning\n")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_command_that_saves_nothing_is_ended_by_the_signal_without_a_word(tmp_path, number):
    process = start("-c", TALKS, f"--output={tmp_path / 'file'}")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == -number


# ---------------------------------------------------------------- disks


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


GOLDEN = ROOT / "tests" / "golden" / "tied_shift"


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (train, "--workdir={}"),
        (train, "--workdir={}/run"),
        (decode, "--output={}/out"),
        (regenerate, "--output={}/rows"),
    ],
)
def test_a_read_only_disk_is_one_sentence_and_exit_code_2_before_any_work(tmp_path, capsys, command, output):
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "token_ids": [1, 2]}\n')
    flags = [f"--config={ROOT}/configs/tiny.py", f"--config.target.path={GOLDEN}/target", "--distributed=off"]
    if command is not train:
        flags.append(f"--prompts={tmp_path}/prompts.jsonl")
    with disk(tmp_path / "disk", "ro"), pytest.raises(SystemExit) as left:
        argv = ["command", *flags, output.format(tmp_path / "disk")]
        cli.run(command.main, ("config",), ("workdir", "output", "prompts", "distributed"), argv)
    error = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and len(error) <= 5 and "Read-only file system" in error[0]


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (errno.ENOSPC, DataError, 3),
        (errno.EDQUOT, DataError, 3),
        (errno.EROFS, DominoError, 2),
        (errno.EACCES, DominoError, 2),
    ],
)
def test_a_disk_that_takes_no_file_is_reported_in_one_sentence_wherever_it_happens(capsys, number, kind, code):
    assert type(unwritable("f", OSError(number, os.strerror(number)))) is kind

    def main(flags):
        raise OSError(number, os.strerror(number), "folder/file")

    with pytest.raises(SystemExit) as left:
        cli.run(main, ("workdir",), (), ["command", "--workdir=w"])
    assert left.value.code == code
    message = capsys.readouterr().err
    assert (
        message.startswith(f"error: folder/file cannot be written: {os.strerror(number)}.\n")
        and message.count("\n") == 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [100, 200, 400, 900, 1_500, 2_200])
def test_a_run_on_a_full_disk_ends_with_3_in_one_sentence_and_continues_when_there_is_room(tmp_path, kilobytes):
    """By the size the start-up files, TensorBoard, a checkpoint or the export finds no room; none may hang."""
    rows, folder = write_rows(tmp_path / "rows.jsonl", training_rows()), tmp_path / "disk"
    changes = {"distributed": "auto", "config.checkpoint.every": 2, "config.train.steps": 30}
    flags = arguments((rows, rows), folder / "run", **changes)[1:]
    with disk(folder, f"size={kilobytes}k"):
        process = start("-m", "domino_jax.train", *flags)
        message = "".join(process.communicate(timeout=300))
        assert (process.returncode, "Traceback" in message) == (3, False), message
        assert len(message[message.rindex("error: ") :].splitlines()) <= 5
        subprocess.run(["mount", "-o", "remount,size=100m", folder], check=True)
        process = start("-m", "domino_jax.train", *flags)
        message = "".join(process.communicate(timeout=300))
        assert process.returncode == 0, message
