"""launch.queued_resources with a stand-in for gcloud: its storage is a folder, its resource a list of states."""

import os
import signal
import subprocess
import sys
import time

import pytest

from launch import machine_codes, queued_resources, restarts
from tests.helpers.launch_stand_ins import calls, cloud_in, gcloud, leaves, stand_in, states, verbs, wait_for
from tests.helpers.paths import ROOT

FLAGS = ["--name=n", "--zone=z", "--type=t", "--version=v", "--storage=gs://b/l", "--poll=0"]
CHANGES = ("create", "delete")
# on_create is a test's: what the machines leave when they are created.
GCLOUD = """
  "storage cp"*)
    to=$HERE/gs/${4#gs://}; mkdir -p "${to%/*}"
    if [ "$3" = - ]; then cat > "$to"; else : > "$to"; fi ;;
  "storage cat"*)
    if ! compgen -G "$HERE/gs/${3#gs://}" > /dev/null; then echo "URLs matched no objects or files:" >&2; exit 1; fi
    cat $HERE/gs/${3#gs://} ;;
  *" create "*)
    machines=$HERE/gs/b/l/n/$(cat "$HERE/gs/b/l/n/attempt")/machines; mkdir -p "$machines"
    source "$HERE/on_create" ;;
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    on_create(tmp_path, "")
    return cloud_in(tmp_path, monkeypatch, GCLOUD)


def on_create(cloud, script):
    (cloud / "on_create").write_text(script)


def run(*flags, train="train"):
    return queued_resources.main([*FLAGS, *flags, "--", train])


def stored(cloud):
    return cloud / "gs" / "b" / "l" / "n"


def test_the_code_of_the_machines_is_the_launchers(cloud):
    states(cloud, "-", "ACCEPTED", "ACTIVE")
    on_create(cloud, 'echo "5 0 h0" > $machines/h0; echo "6 0 h1" > $machines/h1')
    assert run() == 0
    assert verbs(cloud, *CHANGES) == ["create"]


def test_a_name_whose_run_is_over_is_refused_with_its_code_and_runs_again_when_replaced(cloud, capsys):
    states(cloud, "-", "ACTIVE")
    on_create(cloud, 'echo "5 3 h0" > $machines/h0')
    assert run() == 3
    with leaves(2, capsys, "its run is over, with exit code 3"):
        run()
    assert verbs(cloud, *CHANGES) == ["create"]
    on_create(cloud, 'echo "9 0 h0" > $machines/h0')
    assert run("--replace") == 0
    assert verbs(cloud, *CHANGES) == ["create", "delete", "create"]


def test_attempts_of_one_second_have_different_names(monkeypatch):
    seen = []
    monkeypatch.setattr(queued_resources, "keep", lambda args: seen.append(args) or 0)
    run()
    names = {queued_resources.attempt_name(seen[0]) for _ in range(20)}
    assert len(names) == 20
    assert all(name.endswith(queued_resources.fingerprint(seen[0])) for name in names)


def test_a_resource_that_was_made_for_another_command_is_refused(cloud, capsys):
    states(cloud, "ACTIVE")
    with leaves(2, capsys, "made for another command"):
        run()
    assert verbs(cloud, *CHANGES) == []


@pytest.mark.parametrize(
    ("left", "later", "code", "changes"),
    [
        ("7 4 h0", [], 4, ["create"]),
        ("7 0 h0", ["SUSPENDED"], 0, ["create"]),  # it ended before its machines were taken away
        ("7 143 h0", ["SUSPENDED"] * 4 + ["ACTIVE"], 9, ["create", "delete", "create"]),  # a loss is not final
    ],
)
def test_a_launcher_that_was_stopped_waits_again_for_the_same_attempt(cloud, left, later, code, changes):
    states(cloud, "-", "ACTIVE")
    on_create(cloud, 'echo "5 running h0" > $machines/h0; kill -TERM $PPID')
    with leaves(128 + signal.SIGTERM):
        run()
    machines = stored(cloud) / (stored(cloud) / "attempt").read_text() / "machines"
    (machines / "h0").write_text(f"{left}\n")
    if later:
        states(cloud, *later)
    on_create(cloud, 'echo "9 9 h0" > $machines/h0')
    assert run() == code
    assert verbs(cloud, *CHANGES) == changes


def test_a_resource_that_somebody_deleted_ends_the_wait(cloud, capsys):
    states(cloud, "-", "ACTIVE", "-")
    with leaves(2, capsys, "was deleted"):
        run()
    assert verbs(cloud, *CHANGES) == ["create"]


def test_a_resource_that_fails_is_requested_with_pauses_and_not_for_ever(cloud):
    states(cloud, "-", "FAILED")
    started = time.monotonic()
    assert run("--max_restarts=2") == 1
    assert time.monotonic() - started > 3  # 1 s and 2 s
    assert verbs(cloud, *CHANGES) == ["create", "delete", "create", "delete", "create"]


@pytest.mark.parametrize(
    ("step", "after", "changes"),
    [
        ("queued-resources delete", "SUSPENDED", ["delete", "delete", "create"]),
        ("storage cp gs://", "-", ["delete", "create"]),
        ("storage cp - gs://", "-", ["delete", "create"]),
        ("queued-resources create", "-", ["delete", "create", "create"]),
        ("queued-resources create", "FAILED", ["delete", "create", "delete", "create"]),
    ],
)
def test_a_request_that_fails_after_a_loss_is_made_again_with_pauses_and_the_same_code(
    cloud, capfd, step, after, changes
):
    broken = f"""
[ -e "$HERE/lost" ] && [[ $* == *"{step}"* ]] && [ ! -e "$HERE/failed" ] && {{ touch "$HERE/failed"; exit 7; }}
"""
    stand_in(cloud, "gcloud", broken + gcloud(GCLOUD))
    states(cloud, "-", "SUSPENDED", "SUSPENDED", "SUSPENDED", after, "ACTIVE")
    on_create(cloud, 'if [ -e "$HERE/lost" ]; then echo "9 0 h0" > $machines/h0; else touch "$HERE/lost"; fi')
    assert run() == 0
    assert verbs(cloud, *CHANGES) == ["create", *changes]
    assert "the request failed with exit code 7; asking for it again in 2 s, 49 times left" in capfd.readouterr().err
    assert len(calls(cloud, "git")) == 1  # the first request only
    (upload, *copies) = [line for line in calls(cloud, "gcloud") if "storage cp" in line and "tar.gz" in line]
    source = upload.split()[-1]
    assert copies and all(line.split()[2] == source for line in copies)


def test_no_capacity_at_the_first_request_is_final(cloud):
    states(cloud, "-")
    on_create(cloud, "exit 7")
    with leaves(7):
        run()
    assert verbs(cloud, *CHANGES) == ["create"]


def test_a_wrong_variable_is_refused_before_anything_is_deleted(cloud, capsys):
    states(cloud, "ACTIVE")
    with leaves(2, capsys, "write it as NAME=VALUE"):
        run("--env=NOTE", "--replace")
    assert calls(cloud, "gcloud") == []


def test_a_machine_that_gave_up_restarting_ends_the_run(cloud, monkeypatch):
    monkeypatch.setattr(restarts, "GRACE", 10)  # looks in a row without a change
    states(cloud, "-", "ACTIVE")
    on_create(cloud, 'echo "5 134 h0" > $machines/h0; echo "5 running h1" > $machines/h1')
    assert run("--poll=0.01") == 134


def test_the_first_final_code_wins_over_those_of_other_machines_and_later_ones():
    assert machine_codes.codes("9 2 h0\n5 3 h1\n7 running h2\n") == [3, 2]
    assert machine_codes.final("9 2 h0\n5 3 h1\n3 134 h2\n") == 3
    assert machine_codes.final("9 134 h0\n5 0 h1\n") is None
    assert machine_codes.final("5 running h0\n") is None


def test_machines_that_never_report_end_the_wait(monkeypatch):
    monkeypatch.setattr(machine_codes, "BEGIN_SECONDS", 0.05)
    watch = machine_codes.Watch(60)
    assert watch.verdict("PROVISIONING", "") is None
    assert watch.verdict("ACTIVE", "") is None
    time.sleep(0.1)
    assert watch.verdict("ACTIVE", "") == 2


# ---------------------------------------------------------------- the start-up script


def startup(cloud, monkeypatch, train, fetched):
    """Runs the script as a machine would, with this folder for /root; the line that it leaves."""
    seen = []
    monkeypatch.setattr(queued_resources, "keep", lambda args: seen.append(args) or 0)
    run(train=train)
    script = queued_resources.startup(seen[0], "A").replace("/root", str(cloud / "root"))
    stand_in(cloud, "sleep", "")
    stand_in(cloud, "tar", f"[ {int(fetched)} = 1 ] && ln -sfn {cloud}/launch launch")
    stand_in(cloud, "hostname", "echo h0")
    (cloud / "launch").mkdir()
    for name in ("__init__", "commands", "host", "restarts", "signals", "supervise"):
        (cloud / "launch" / f"{name}.py").write_text((ROOT / "launch" / f"{name}.py").read_text())
    (cloud / "launch" / "on_tpu.sh").write_text('exec "$@"\n')
    environment = {**os.environ, "DOMINO_LOCK": str(cloud / "lock")}
    subprocess.run(["/bin/bash", "-c", script], env=environment, check=True, capture_output=True, timeout=60)
    return (stored(cloud) / "A" / "machines" / "h0").read_text().split()[1:]


@pytest.mark.parametrize(
    ("train", "fetched", "code", "pauses"),
    [("true", True, "0", []), ("false", True, "1", []), ("true", False, "2", ["5", "20", "60", "120"])],
)
def test_a_machine_leaves_its_code_under_the_attempt_and_its_name(cloud, monkeypatch, train, fetched, code, pauses):
    assert startup(cloud, monkeypatch, train, fetched) == [code, "h0"]
    assert calls(cloud, "sleep") == pauses


def test_stop_reaches_every_machine_as_root(cloud):
    assert queued_resources.main([*FLAGS, "--stop"]) == 0
    (line,) = calls(cloud, "gcloud")
    assert "--node=all --worker=all --command=sudo sh -c" in line
    assert "launch.host --stop" in line


def test_a_stopped_launcher_reports_that_the_run_continues(cloud):
    states(cloud, "-", "ACTIVE")
    command = [sys.executable, "-m", "launch.queued_resources", *FLAGS, "--poll=60", "--", "train"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any("machines/*" in line for line in calls(cloud, "gcloud")))
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=20)[1]
    assert process.returncode == 143
    assert "the run goes on by itself" in error
