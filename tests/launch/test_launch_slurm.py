"""launch/slurm.sbatch with stand-ins for Slurm's programs; tests/processes/test_slurm.py has the real ones."""

import os
import subprocess

import pytest

from launch import restarts
from tests.helpers.launch_stand_ins import calls, stand_in
from tests.helpers.paths import ROOT

SBATCH = ROOT / "launch" / "slurm.sbatch"
# Runs the words after its own flags, as each of two tasks.
SRUN = """
while [ "${1#-}" != "$1" ]; do shift; done
code=0
for i in 0 1; do SLURM_PROCID=$i "$@" || code=143; done
exit $code"""


OTHER = {"DOMINO_INIT_SECONDS": "60", "DOMINO_RESTARTED": ""}


def batch(folder, *command, state="RUNNING None", **environment):
    stand_in(folder, "srun", SRUN)
    stand_in(folder, "scontrol", "")
    stand_in(folder, "squeue", f"echo '{state}'")
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **environment}
    done = subprocess.run(["bash", str(SBATCH), "--", *command], cwd=folder, env=environment, check=False)
    return done.returncode


def test_the_script_has_the_rules_of_the_table():
    function = (
        'source <(sed -n "/^starts_again/,/^}/p" "$0"); for n in {0..255}; do starts_again $n && echo $n; done; :'
    )
    done = subprocess.run(["bash", "-c", function, str(SBATCH)], capture_output=True, text=True, check=True)
    assert tuple(map(int, done.stdout.split())) == restarts.AGAIN
    assert f"DOMINO_MAX_RESTARTS:-{restarts.MAX_RESTARTS}" in SBATCH.read_text()


@pytest.mark.parametrize(
    ("codes", "left"), [((0, 0), 0), ((4, 4), 4), ((3, 143), 3), ((134, 3), 3), ((42, 42), 42), ((134, 137), 134)]
)
def test_the_first_final_code_of_a_task_counts_for_the_job(tmp_path, codes, left):
    assert batch(tmp_path, "bash", "-c", f'codes=({codes[0]} {codes[1]}); exit "${{codes[$SLURM_PROCID]}}"') == left
    assert calls(tmp_path, "scontrol") == (["requeue 7"] if restarts.starts_again(left) else [])


@pytest.mark.parametrize(
    ("state", "again"),
    [("RUNNING None", True), ("COMPLETING TimeLimit", True), ("COMPLETING None", False), ("", False)],
)
def test_only_a_job_that_was_not_cancelled_goes_back_into_the_queue(tmp_path, state, again):
    assert batch(tmp_path, "bash", "-c", "exit 42", state=state) == 42
    assert bool(calls(tmp_path, "scontrol")) == again


@pytest.mark.parametrize(("given", "seen"), [({}, restarts.ENVIRONMENT), (OTHER, OTHER)])
def test_tasks_wait_for_late_nodes_and_take_them_for_lost_unless_set_otherwise(tmp_path, monkeypatch, given, seen):
    for name in restarts.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    command = 'echo "DOMINO_INIT_SECONDS=$DOMINO_INIT_SECONDS DOMINO_RESTARTED=$DOMINO_RESTARTED" > seen'
    assert batch(tmp_path, "bash", "-c", command, **given) == 0
    words = (tmp_path / "seen").read_text().rstrip("\n").split(" ")
    assert dict(word.split("=") for word in words) == seen


def test_a_job_that_never_gets_anywhere_leaves_the_queue_at_last(tmp_path):
    assert batch(tmp_path, "bash", "-c", "exit 42", SLURM_RESTART_COUNT="50") == 42
    assert calls(tmp_path, "scontrol") == []


@pytest.mark.parametrize(
    ("workdir", "mounts"),
    [
        (["--workdir=/shared/run"], ",/shared/run:/shared/run"),
        (["--workdir", "run"], ",{here}/run:{here}/run"),
        (["--workdir=gs://b/run"], ""),
    ],
)
def test_a_container_sees_this_folder_and_the_workdir(tmp_path, workdir, mounts):
    done = subprocess.run(
        ["bash", str(SBATCH), "--dry_run", "--", "train", *workdir],
        **{"cwd": tmp_path, "env": {**os.environ, "CONTAINER_IMAGE": "jax", "SLURM_CPUS_PER_TASK": "3"}},
        **{"capture_output": True, "text": True, "check": True},
    )
    assert f"'--container-mounts={tmp_path}:{tmp_path}{mounts.format(here=tmp_path)}'" in done.stdout
    assert "'--cpus-per-task=3'" in done.stdout
