"""The table of restart rules, and every launcher held against it."""

import re
import shlex
import sys

import jax
import pytest
import yaml

from domino_jax.runtime import preemption, watchdog
from launch import gke, queued_resources, restarts, skypilot, ssh, tpu_vm, xpk
from tests.helpers.paths import ROOT

GKE = ["--name=n", "--accelerator=a", "--topology=4x4", "--hosts=4", "--image=i"]


def test_saved_hung_and_killed_runs_start_again_and_no_others():
    assert [code for code in range(131) if restarts.starts_again(code)] == [42, 43, 129]
    assert all(restarts.starts_again(code) for code in (134, 137, 143))  # SIGABRT (a lost peer), SIGKILL, SIGTERM
    assert not restarts.starts_again(255)
    assert [restarts.shell_code(code) for code in (0, 3, -9)] == [0, 3, 137]
    assert (restarts.SAVED, restarts.HUNG) == (preemption.PREEMPTED, watchdog.HUNG)


def test_the_first_final_failure_counts_for_all():
    assert restarts.verdict([]) == restarts.verdict([0, 0]) == 0
    assert restarts.verdict([134, 0, 137]) == 134
    assert restarts.verdict([134, 3, 137, 2]) == 3
    assert restarts.verdict([255, 42], again=lambda code: code == 255) == 42


def test_pauses_double_up_to_a_minute_and_begin_again_after_a_run_that_lasted():
    pauses = restarts.Pauses()
    assert [pauses.after(0.1) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [pauses.after(400), pauses.after(0.1)] == [1, 2]
    assert sum(pauses.after(0.0) for _ in range(restarts.MAX_RESTARTS)) > 40 * 60


# ---------------------------------------------------------------- launchers that hand the table on


def test_the_jobset_restarts_by_the_table_and_its_rule_has_a_name(capsys):
    gke.main([*GKE, "--dry_run", "--", "train"])
    spec = yaml.safe_load(capsys.readouterr().out.split("\n", 1)[1].removesuffix("END\n"))["spec"]
    assert spec["failurePolicy"]["rules"][0]["name"]
    assert spec["failurePolicy"]["maxRestarts"] == restarts.MAX_RESTARTS
    (rule,) = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]
    # Kubernetes asks for ordered values, and leaves 0 out of NotIn by itself.
    assert (rule["action"], codes["operator"], codes["values"]) == ("FailJob", "NotIn", sorted(restarts.AGAIN))


def test_xpk_gets_the_code_of_the_table_that_it_does_not_know(capsys):
    xpk.main(["--name=n", "--cluster=c", "--type=t", "--image=i", "--dry_run", "--", "train"])
    words = shlex.split(capsys.readouterr().out)
    known = {42, *range(127, 256)}
    passed = {int(word.partition("=")[2]) for word in words if word.startswith("--restart-on-exit-codes=")}
    assert set(restarts.AGAIN) <= known | passed
    assert not passed - set(restarts.AGAIN)
    assert f"--max-restarts={restarts.MAX_RESTARTS}" in words


def test_skypilot_repeats_only_a_saved_run_and_the_machine_does_the_rest():
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [restarts.SAVED, 143]}
    assert 'launch.host --max_restarts="$DOMINO_MAX_RESTARTS" -- ' in task["run"]


def test_skypilot_gives_the_task_every_variable_that_it_asks_for(capsys):
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    skypilot.main(["--name=n", "--dry_run", "--", "train"])
    words = [word.removeprefix("--env=") for word in shlex.split(capsys.readouterr().out) if word.startswith("--env=")]
    given = dict(word.split("=", 1) for word in words)
    assert set(task["envs"]) == set(given)
    assert not any(task["envs"].values())
    table = {"DOMINO_MAX_RESTARTS": str(restarts.MAX_RESTARTS), **restarts.ENVIRONMENT}
    assert given == {"DOMINO_COMMAND": "env train", **table}


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        (ssh, ["--hosts=a,b"]),
        (xpk, ["--name=n", "--cluster=c", "--type=t", "--image=i"]),
        (tpu_vm, ["--name=n", "--zone=z", "--type=t", "--version=v"]),
        (queued_resources, ["--name=n", "--zone=z", "--type=t", "--version=v", "--storage=gs://b/l"]),
        (skypilot, ["--name=n"]),
    ],
)
def test_processes_wait_for_late_machines_and_take_them_for_lost(launcher, flags, capsys):
    launcher.main([*flags, "--dry_run", "--", "train"])
    shown = capsys.readouterr().out
    assert all(f"{name}={value}" in shown for name, value in restarts.ENVIRONMENT.items())


def test_the_machines_get_the_jax_that_the_tests_run_with():
    pins = [(ROOT / "requirements-tpu.txt").read_text(), (ROOT / "launch" / "skypilot.yaml").read_text()]
    scripts = [(ROOT / "launch" / name).read_text() for name in ("on_tpu.sh", "skypilot.yaml")]
    assert all("--python 3.11 " in script for script in scripts)
    if sys.version_info[:2] == (3, 11):
        assert all(re.search(rf"jax\[\w+\]=={re.escape(jax.__version__)}\b", pin) for pin in pins)
