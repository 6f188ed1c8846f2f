"""launch.tpu_vm and launch/on_tpu.sh with stand-ins for gcloud, pip and uv."""

import hashlib
import os
import signal
import subprocess
import sys

import pytest

from launch import tpu_vm
from tests.helpers.launch_stand_ins import calls, cloud_in, gcloud, leaves, stand_in, states, verbs, wait_for
from tests.helpers.paths import ROOT

ON_TPU = ROOT / "launch" / "on_tpu.sh"
CLOUD = ["--name=n", "--zone=z", "--type=v5litepod-16", "--version=v"]
# ssh runs the script of a test.
GCLOUD = """
  *--worker=[0-9]*)
    words=$*; worker=${words##*--worker=}; worker=${worker%% *}
    command=${words##*--command=}; command=${command%% -- -o *}
    source "$HERE/remote" ;;
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    monkeypatch.setenv("AFTER_STATE", "\t2")  # the number of machines
    cloud_in(tmp_path, monkeypatch, GCLOUD)
    stand_in(tmp_path, "git", 'echo "commit-$(wc -l < "$HERE/git.log")"')  # a new commit at each look
    return tmp_path


def fails_at(cloud, *numbers, words="tpu-vm create"):
    """gcloud fails at these calls, counted from 1, with the words in their command line."""
    failing = " | ".join(f"*:{number}:*" for number in numbers)
    script = f"""
if [[ $* == *"{words}"* ]]; then
  n=$(cat "$HERE/failing" 2> /dev/null || echo 0); echo $((n += 1)) > "$HERE/failing"
  case ":$n:" in {failing}) echo "no more capacity" >&2; exit 7 ;; esac
fi
"""
    stand_in(cloud, "gcloud", script + gcloud(GCLOUD))


def remote(cloud, script):
    (cloud / "remote").write_text(script)


def run(cloud, *flags):
    return tpu_vm.main([*CLOUD, f"--log_dir={cloud}/logs", *flags, "--", "train"])


ATTEMPT = ["scp", "ssh", "ssh", "ssh"]  # copy, unpack, two workers


def test_a_vm_that_is_not_there_is_created_and_every_machine_runs(cloud):
    states(cloud, "-", "-", "READY")
    remote(cloud, "exit 0")
    assert run(cloud) == 0
    assert verbs(cloud) == ["create", *ATTEMPT]
    assert {line.split("--worker=")[1][0] for line in calls(cloud, "gcloud")[-2:]} == {"0", "1"}


# Waits until both workers are connected: the launcher stops the others when one fails.
BOTH = """
touch "$HERE/up-$worker"
until [ -e "$HERE/up-0" ] && [ -e "$HERE/up-1" ]; do sleep 0.02; done
"""
# Each worker's connection ends once.
LOST_ONCE = f'[ -e "$HERE/lost-$worker" ] && exit 0; touch "$HERE/lost-$worker"; {BOTH} exit 134'


def test_a_vm_that_is_taken_away_is_created_again_with_the_same_commit_and_the_run_continues(cloud):
    states(cloud, "-", "-", "READY", "PREEMPTED", "READY")
    remote(cloud, LOST_ONCE)
    assert run(cloud) == 0
    assert verbs(cloud) == ["create", *ATTEMPT, "delete", "create", *ATTEMPT]
    first, *archives = calls(cloud, "git")
    assert first == "rev-parse HEAD"
    assert [line.split()[-1] for line in archives] == ["commit-1", "commit-1"]
    assert not list(ROOT.glob(tpu_vm.ARCHIVE))  # another launcher may use this checkout for another commit


def test_a_vm_that_is_taken_away_in_the_first_seconds_is_created_again(cloud):
    states(cloud, "-", "-", "READY", *["PREEMPTED"] * 4, "READY")
    # Which of the two connections fails first decides what the other one gets to do, so a deleted VM marks the end.
    remote(cloud, 'grep -q " delete " "$HERE/gcloud.log" && exit 0; exit 255')
    assert run(cloud) == 0
    assert [verb for verb in verbs(cloud) if verb != "ssh"] == ["create", "scp", "delete", "create", "scp"]


@pytest.mark.parametrize("after_delete", ["-", "DELETING"])
def test_no_capacity_for_a_vm_that_was_taken_away_is_tried_again_with_pauses(cloud, after_delete, capfd):
    fails_at(cloud, 2, 3)
    # After each create that fails, one look whether it left a VM.
    states(cloud, "-", "-", "READY", "PREEMPTED", "-", after_delete, "-", "-", "READY")
    remote(cloud, LOST_ONCE)
    assert run(cloud) == 0
    again = ["delete"] * (after_delete == "DELETING")
    assert verbs(cloud) == ["create", *ATTEMPT, "delete", "create", *again, "create", "create", *ATTEMPT]
    error = capfd.readouterr().err
    assert all(f"start {number} of 50 again in {seconds} s" in error for number, seconds in [(1, 1), (2, 2), (3, 4)])


@pytest.mark.parametrize("words", ["tpu-vm delete", "tpu-vm scp"])
def test_a_deletion_or_a_copy_that_fails_at_a_restart_is_tried_again(cloud, words):
    fails_at(cloud, {"tpu-vm delete": 1, "tpu-vm scp": 2}[words], words=words)
    states(cloud, "-", "-", "READY", "PREEMPTED", *["DELETING"] * (words == "tpu-vm delete"), "READY")
    remote(cloud, LOST_ONCE)
    assert run(cloud) == 0
    failed = ["delete", "delete", "create"] if words == "tpu-vm delete" else ["delete", "create", "scp"]
    assert verbs(cloud) == ["create", *ATTEMPT, *failed, *ATTEMPT]


def test_a_new_vm_whose_ssh_server_comes_up_later_gets_the_code_then_and_an_old_one_is_asked_once(cloud, monkeypatch):
    monkeypatch.setattr(tpu_vm, "POLL_SECONDS", 0)
    fails_at(cloud, 1, 2, 3, words="tpu-vm scp")
    states(cloud, "-", "-", "READY")
    remote(cloud, "exit 0")
    assert run(cloud) == 0
    assert verbs(cloud) == ["create", "scp", "scp", "scp", *ATTEMPT]
    fails_at(cloud, 5, words="tpu-vm scp")
    states(cloud, "READY")
    assert run(cloud) == 7


def test_no_capacity_at_the_first_start_is_final(cloud):
    fails_at(cloud, 1)
    states(cloud, "-")
    assert run(cloud, "--delete") == 7
    assert verbs(cloud) == ["create"]


def test_a_machine_that_refuses_the_first_connection_is_final_and_its_log_is_shown(cloud, capfd):
    states(cloud, "READY")
    remote(cloud, BOTH + '[ "$worker" = 1 ] || sleep 60; echo "Permission denied (publickey)."; exit 255')
    assert run(cloud) == 2
    assert verbs(cloud) == ATTEMPT
    assert f"The end of {cloud}/logs/rank-1.log:\nPermission denied (publickey).\n" in capfd.readouterr().err


# ---------------------------------------------------------------- --delete


def test_delete_removes_the_vm_after_a_failed_copy(cloud, monkeypatch):
    monkeypatch.setattr(tpu_vm, "POLL_SECONDS", 0)
    fails_at(cloud, *range(1, tpu_vm.COPY_TRIES + 1), words="tpu-vm scp")
    states(cloud, "-", "-", "READY")
    assert run(cloud, "--delete") == 7
    assert verbs(cloud) == ["create", *["scp"] * tpu_vm.COPY_TRIES, "delete"]


def test_delete_removes_the_vm_after_a_signal_while_it_is_created(cloud):
    states(cloud, "-", "-", "CREATING")
    script = 'case "$*" in *" create "*) kill -TERM $PPID; sleep 0.3; exit 1 ;; esac\n'
    stand_in(cloud, "gcloud", script + gcloud(GCLOUD))
    with leaves(1):
        run(cloud, "--delete")
    assert verbs(cloud) == ["create", "delete"]


def test_delete_is_tried_again_until_the_vm_is_gone(cloud, capfd):
    fails_at(cloud, 1, words="tpu-vm delete")
    states(cloud, "-", "-", "READY")
    remote(cloud, "exit 0")
    assert run(cloud, "--delete") == 0
    assert verbs(cloud) == ["create", *ATTEMPT, "delete", "delete"]
    assert "billed while it exists" in capfd.readouterr().err


def test_delete_leaves_a_vm_that_was_there_before(cloud, capfd):
    states(cloud, "READY")
    remote(cloud, "exit 0")
    assert run(cloud, "--delete") == 0
    assert verbs(cloud) == ATTEMPT
    assert "the VM n exists already, and --delete deletes only" in capfd.readouterr().err


def test_mistakes_are_refused_before_a_vm_is_created(cloud, capsys):
    states(cloud, "-")
    with leaves(2, capsys, "write it as NAME=VALUE"):
        run(cloud, "--env=NOTE")
    stand_in(cloud, "git", "exit 128")
    with leaves(2, capsys, "git rev-parse HEAD fails in"):
        run(cloud)
    assert verbs(cloud) == []


# ---------------------------------------------------------------- a run and its VM


def test_a_final_failure_of_one_machine_counts_for_the_run(cloud):
    states(cloud, "READY")
    remote(cloud, BOTH + '[ "$worker" = 1 ] && exit 3; sleep 0.3; exit 134')
    assert run(cloud) == 3
    assert verbs(cloud) == ATTEMPT


@pytest.mark.parametrize("state", ["STOPPED", "PREEMPTED", "DELETING", "HIDDEN"])
def test_a_vm_in_another_state_is_refused_and_only_deleted_to_replace_it(cloud, capsys, state):
    states(cloud, state)
    with leaves(2, capsys, f"the VM n exists and is {state}"):
        run(cloud)
    assert verbs(cloud) == []
    states(cloud, state, state, "READY")
    remote(cloud, "exit 0")
    assert run(cloud, "--replace") == 0
    assert verbs(cloud) == ["delete", "create", *ATTEMPT]


def test_a_vm_that_somebody_deleted_is_not_created_again(cloud, capsys):
    states(cloud, "READY", "READY", "READY", "-")
    remote(cloud, "exit 42")
    with leaves(2, capsys, "was deleted"):
        run(cloud)
    assert verbs(cloud) == ATTEMPT


def test_an_answer_that_fails_is_requested_again(cloud):
    broken = '[ -e "$HERE/twice" ] || { touch "$HERE/twice"; echo broken >&2; exit 1; }\n'
    stand_in(cloud, "gcloud", broken + gcloud(GCLOUD))
    states(cloud, "READY")
    remote(cloud, "exit 0")
    assert run(cloud) == 0
    assert verbs(cloud) == ATTEMPT


def test_stop_asks_every_machine(cloud):
    assert tpu_vm.main([*CLOUD, "--stop"]) == 0
    (line,) = calls(cloud, "gcloud")
    assert line.endswith("--worker=all --command=cd domino_jax && python3 -m launch.host --stop")


# ---------------------------------------------------------------- what a machine does


REQUIREMENTS = ("requirements.txt", "requirements-gcs.txt", "requirements-tpu.txt")


def ready(folder, monkeypatch):
    """An environment that on_tpu.sh finds made."""
    names = (*REQUIREMENTS, "launch/on_tpu.sh")
    digest = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in names)).hexdigest()
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "venv" / "ready").write_text(f"{digest}  -\n")
    monkeypatch.setenv("DOMINO_VENV", str(folder / "venv"))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_however_the_launcher_ends_both_machines_save(cloud, monkeypatch, number):
    ready(cloud, monkeypatch)
    repository = copied(cloud)
    states(cloud, "READY")
    remote(cloud, 'cd "$HERE"; export DOMINO_LOCK=$HERE/lock-$worker WORKER=$worker; exec sh -c "$command"')
    train = cloud / "train.sh"
    train.write_text(
        'trap "touch $HERE/saved-$WORKER; exit 42" TERM; touch $HERE/up-$WORKER; while :; do sleep 0.1; done'
    )
    command = [sys.executable, "-m", "launch.tpu_vm", *CLOUD, f"--log_dir={cloud}/logs", "--", "bash", str(train)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: (cloud / "up-0").exists() and (cloud / "up-1").exists())
    process.send_signal(number)
    assert process.wait(20) == (-signal.SIGKILL if number == signal.SIGKILL else 42)
    wait_for(lambda: (cloud / "saved-0").exists() and (cloud / "saved-1").exists())
    assert (repository / "logs" / "host.log").exists()


def copied(cloud):
    """The repository as the machines have it: their logs go into this folder and not into the developer's."""
    folder = cloud / "domino_jax"
    folder.mkdir()
    for name in ("launch", *REQUIREMENTS):
        (folder / name).symlink_to(ROOT / name)
    return folder


# pip of a Python that the distribution manages: it installs into other folders alone.
PYTHON3 = """
words=$*
folder=${words##*--target }; folder=${folder%% *}
if [[ $words != *--target* ]]; then echo "error: externally-managed-environment" >&2; exit 1; fi
mkdir -p "$folder/bin"
cp "$HERE/uv" "$folder/bin"
"""
# Makes the folder of the environment; installing fails as often as $HERE/n says.
UV = """
case "$*" in
  venv*) mkdir -p "$DOMINO_VENV/bin" ;;
  pip*) n=$(cat "$HERE/n"); echo $((n - 1)) > "$HERE/n"; [ "$n" -le 1 ] ;;
esac
"""


def on_tpu(folder, *command, failures=0):
    stand_in(folder, "python3", PYTHON3)
    stand_in(folder, "uv", UV)
    stand_in(folder, "sleep", "")
    (folder / "n").write_text(f"{failures + 1}\n")
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HERE": str(folder)}
    environment["DOMINO_VENV"] = str(folder / "venv")
    return subprocess.run(["bash", str(ON_TPU), *command], env=environment, capture_output=True, text=True, check=False)


def test_the_environment_is_made_once_and_again_when_the_requirements_change(tmp_path):
    assert on_tpu(tmp_path, "bash", "-c", 'echo "$1" > $HERE/said', "x", "a b").returncode == 0
    assert (tmp_path / "said").read_text() == "a b\n"
    assert (len(calls(tmp_path, "python3")), len(calls(tmp_path, "uv"))) == (1, 2)
    assert on_tpu(tmp_path, "true").returncode == 0
    assert (len(calls(tmp_path, "python3")), len(calls(tmp_path, "uv"))) == (1, 2)
    (tmp_path / "venv" / "ready").write_text("of other requirements\n")
    assert on_tpu(tmp_path, "true").returncode == 0
    assert (len(calls(tmp_path, "python3")), len(calls(tmp_path, "uv"))) == (2, 4)


def test_setting_up_is_tried_again_with_pauses_and_runs_nothing_when_it_fails_at_last(tmp_path):
    assert on_tpu(tmp_path, "true", failures=2).returncode == 0
    assert calls(tmp_path, "sleep") == ["5", "20"]
    (tmp_path / "venv" / "ready").unlink()
    done = on_tpu(tmp_path, "touch", str(tmp_path / "ran"), failures=9)
    assert done.returncode == 2
    assert "could not be made" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_the_command_takes_the_place_of_the_script(tmp_path, monkeypatch):
    ready(tmp_path, monkeypatch)
    process = subprocess.Popen(
        ["bash", str(ON_TPU), sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, text=True
    )
    assert int(process.communicate()[0]) == process.pid
