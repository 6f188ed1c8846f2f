"""launch/: what each launcher would run, word for word, and what it does with stand-ins for the real tools."""

import importlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest
import yaml

from launch import queued_resources, tpu_vm

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "launch_golden"
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.sbatch")])
# What a shell could stumble over: spaces, separators, quotes, a variable, a glob, an empty word.
TRAIN = ["python", "-m", "domino_jax.train", "--config=my recipes/a;b.py", "--workdir=gs://b/it's $HOME", "--x=*", ""]
NAME = "my run; reboot"
CLOUD = [f"--name={NAME}", "--zone=us-west4-a", "--type=v5litepod-16", "--version=v2-alpha-tpuv5-lite"]
DRY_RUNS = {
    "local": ["--processes=2", "--devices=4", "--port=8476", "--log_dir=my logs"],
    "ssh": ["--hosts=me@gpu-0,gpu-1", "--folder=my folder", "--env=NOTE=a b"],
    "tpu_vm": [*CLOUD, "--project=p", "--spot", "--autocheckpoint", "--env=NOTE=a b", "--delete"],
    "queued_resources": [*CLOUD, "--spot", "--nodes=2", "--storage=gs://bucket/my launch", "--env=NOTE=a b"],
    "xpk": [f"--name={NAME}", "--cluster=c", "--type=v5litepod-16", "--image=registry/domino:1", "--env=NOTE=a b"],
    "gke": [
        *(f"--name={NAME}", "--accelerator=tpu-v5-lite-podslice", "--topology=4x4", "--hosts=4", "--slices=2"),
        *("--image=registry/domino:1", "--env=NOTE=a b"),
    ],
    "skypilot": [f"--name={NAME}", "--nodes=2", "--gpus=H100:8", "--env=NOTE=a b"],
}


def dry_run(name, capsys, flags=None):
    if name == "slurm":
        command = ["bash", str(ROOT / "launch" / "slurm.sbatch"), "--dry_run", "--", *TRAIN]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    launcher = importlib.import_module(f"launch.{name}")
    assert launcher.main([*(DRY_RUNS[name] if flags is None else flags), "--dry_run", "--", *TRAIN]) == 0
    return capsys.readouterr().out


def flag(line, name):
    """The value of --name=VALUE in a line of shell."""
    (value,) = [word.partition("=")[2] for word in shlex.split(line) if word.startswith(f"{name}=")]
    return value


def one_line(text, start):
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line


# How the train command is found again in what a launcher prints: through every shell on the way.
UNWRAP = {
    "local": lambda text: shlex.split(text.splitlines()[1].partition(" >> ")[0]),
    "ssh": lambda text: shlex.split(shlex.split(text.splitlines()[1].partition(" >> ")[0])[-1]),
    "tpu_vm": lambda text: shlex.split(flag(text.splitlines()[4], "--command")),
    "queued_resources": lambda text: shlex.split(one_line(text, "env ").partition(" || code=")[0]),
    "xpk": lambda text: shlex.split(flag(text, "--command")),
    "gke": lambda text: job_pod(manifest(text))["containers"][0]["command"],
    "skypilot": lambda text: shlex.split(flag(text, "--env").partition("=")[2]),
    "slurm": lambda text: shlex.split(text),
}


def manifest(text):
    return yaml.safe_load(text.split("\n", 1)[1].removesuffix("END\n"))


def job_pod(jobset):
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", UNWRAP)
def test_a_dry_run_prints_the_golden_commands(name, capsys):
    assert dry_run(name, capsys) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", UNWRAP)
def test_every_word_of_the_command_survives_every_shell(name, capsys):
    assert UNWRAP[name](dry_run(name, capsys))[-len(TRAIN) :] == TRAIN


@pytest.mark.parametrize("name", UNWRAP)
def test_a_dry_run_is_valid_shell(name, capsys):
    text = dry_run(name, capsys)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run_shows_no_secret_of_the_environment(name, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    assert "hf_canary" not in dry_run(name, capsys)


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_launcher_without_a_command_says_so(name, capsys):
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"launch.{name}").main([*DRY_RUNS[name], "--dry_run"])
    assert left.value.code == 2
    assert "write it behind --" in capsys.readouterr().err


def test_an_environment_variable_needs_a_name(capsys):
    with pytest.raises(SystemExit, match="NAME=VALUE"):
        dry_run("xpk", capsys, [*DRY_RUNS["xpk"], "--env=a b=c"])


# ---------------------------------------------------------------- the files


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script):
    shellcheck = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run([shellcheck, str(script)], check=True)


@pytest.mark.parametrize("name", ["setup", "run"])
def test_the_scripts_in_the_skypilot_task_parse(name):
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    subprocess.run(["bash", "-n"], input=task[name], text=True, check=True)


def test_the_skypilot_task_recovers_saved_runs_and_places_every_process():
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [42]}
    assert task["envs"] == {"DOMINO_COMMAND": None}
    program = "import os, sys; print([os.environ[n] for n in sorted(os.environ) if n[:4] == 'JAX_'], sys.argv[1:])"
    done = subprocess.run(
        ["bash", "-c", task["run"]],
        env={
            **{"PATH": os.environ["PATH"], "HOME": "/nowhere"},
            **{"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"},
            "DOMINO_COMMAND": shlex.join([sys.executable, "-c", program, "a b", "c;d"]),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['10.0.0.1:8476', '2', '1'] ['a b', 'c;d']\n"


def test_the_sbatch_directives_ask_for_a_signal_before_the_end_and_for_requeueing():
    lines = (ROOT / "launch" / "slurm.sbatch").read_text().splitlines()
    end = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    directives = [line.removeprefix("#SBATCH ") for line in lines[:end] if line.startswith("#SBATCH")]
    assert all(re.fullmatch(r"--[a-z-]+(=\S+)?", directive) for directive in directives)
    assert {"--signal=TERM@120", "--requeue", "--open-mode=append", "--ntasks-per-node=8"} <= set(directives)
    # sbatch stops reading directives at the first command.
    assert not any(line.startswith("#SBATCH") for line in lines[end:])


def test_the_jobset_template_is_yaml_and_gives_five_minutes_to_save():
    template = yaml.safe_load((ROOT / "launch" / "jobset.yaml").read_text())
    assert job_pod(template)["terminationGracePeriodSeconds"] == 300


def test_the_jobset_counts_processes_and_calls_the_documented_codes_final(capsys):
    spec = manifest(dry_run("gke", capsys))["spec"]
    job = spec["replicatedJobs"][0]
    assert (job["replicas"], job["template"]["spec"]["parallelism"], spec["failurePolicy"]["maxRestarts"]) == (2, 4, 50)
    (final,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (final["action"], final["onExitCodes"]["values"]) == ("FailJob", [1, 2, 3, 4])
    environment = {entry["name"]: entry["value"] for entry in job_pod({"spec": spec})["containers"][0]["env"]}
    assert environment == {"DOMINO_INIT_SECONDS": "900", "DOMINO_NUM_PROCESSES": "8"}


# ---------------------------------------------------------------- scripts with stand-ins for the real tools


def stand_in(folder, name, script):
    """An executable of this name that writes its words to <name>.log and then does what the script says."""
    path = folder / name
    path.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$*" >> "{folder}/{name}.log"\n{script}\n')
    path.chmod(0o755)


def calls(folder, name):
    return (folder / f"{name}.log").read_text().splitlines()


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder whose programs win over the real ones."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize(("code", "again"), [(0, False), (4, False), (42, True), (137, True)])
def test_a_slurm_job_goes_back_into_the_queue_after_42_and_signals_alone(tools, code, again):
    stand_in(tools, "srun", f"exit {code}")
    stand_in(tools, "scontrol", "")
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "slurm.sbatch"), "--", *TRAIN],
        env={**os.environ, "SLURM_JOB_ID": "7", "CONTAINER_IMAGE": "jax"},
        check=False,
    )
    assert done.returncode == code
    assert calls(tools, "srun")[0].startswith("--kill-on-bad-exit=1 --wait=120 --container-image=jax")
    assert (tools / "scontrol.log").exists() == again
    assert not again or calls(tools, "scontrol") == ["requeue 7"]


def test_a_slurm_job_that_never_gets_anywhere_leaves_the_queue_at_last(tools):
    stand_in(tools, "srun", "exit 42")
    stand_in(tools, "scontrol", "")
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "50"}
    subprocess.run(["bash", str(ROOT / "launch" / "slurm.sbatch"), "--", "x"], env=environment, check=False)
    assert not (tools / "scontrol.log").exists()


@pytest.mark.parametrize(
    ("codes", "left", "runs"), [([0], 0, 1), ([4], 4, 1), ([42, 137, 3], 3, 3), ([42, 42, 42, 42], 42, 3)]
)
def test_a_tpu_machine_starts_again_after_42_and_signals_as_often_as_allowed(tmp_path, codes, left, runs):
    (tmp_path / "ready").touch()
    counter = 'n=$(cat runs 2>/dev/null || echo 0); echo $((n + 1)) > runs; codes=("$@"); exit "${codes[$n]}"'
    (tmp_path / "command.sh").write_text(f'cd "{tmp_path}"\n{counter}\n')
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "on_tpu.sh"), "bash", str(tmp_path / "command.sh"), *map(str, codes)],
        env={**os.environ, "DOMINO_VENV": str(tmp_path), "DOMINO_MAX_RESTARTS": "2"},
        check=False,
    )
    assert done.returncode == left
    assert (tmp_path / "runs").read_text() == f"{runs}\n"


def test_a_lost_tpu_machine_is_created_again_and_the_run_continues(tools, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    # There is no machine; the first run ends with its loss, the second one well.
    stand_in(tools, "git", "")
    stand_in(
        tools,
        "gcloud",
        f"""case "$*" in
          *describe*) [ -e {tools}/lost ] && echo PREEMPTED || exit 1 ;;
          *on_tpu.sh*) if [ -e {tools}/lost ]; then exit 0; fi; touch {tools}/lost; exit 255 ;;
        esac""",
    )
    assert tpu_vm.main([*CLOUD, "--", "train"]) == 0
    verbs = [line.split()[3] for line in calls(tools, "gcloud")]
    attempt = ["create", "scp", "ssh", "ssh"]
    assert verbs == ["describe", *attempt, "describe", "describe", "delete", *attempt]


def test_a_failure_on_a_tpu_machine_that_is_still_there_is_final(tools):
    stand_in(tools, "git", "")
    stand_in(tools, "gcloud", 'case "$*" in *describe*) echo READY ;; *on_tpu.sh*) exit 3 ;; esac')
    assert tpu_vm.main([*CLOUD, "--", "train"]) == 3
    assert [line.split()[3] for line in calls(tools, "gcloud")] == ["describe", "scp", "ssh", "ssh", "describe"]


def test_a_queued_resource_that_was_taken_away_is_asked_for_again(tools):
    stand_in(tools, "git", "")
    # It does not exist, then it is suspended, then active; then the exit code lies there.
    stand_in(
        tools,
        "gcloud",
        f"""case "$*" in
          *describe*) n=$(cat {tools}/n 2>/dev/null || echo 0); echo $((n + 1)) > {tools}/n
            case $n in 0) exit 1 ;; 1) echo SUSPENDED ;; *) echo ACTIVE ;; esac ;;
          *"storage cat"*) [ "$(cat {tools}/n)" = 3 ] && echo 0 || exit 1 ;;
        esac""",
    )
    assert queued_resources.main([*CLOUD, "--storage=gs://b/l", "--poll=0", "--", "train"]) == 0
    verbs = [" ".join(line.split()[1:4]) for line in calls(tools, "gcloud")]
    assert verbs.count("tpus queued-resources create") == 2
    assert verbs.count("tpus queued-resources delete") == 1
    assert verbs.index("tpus queued-resources delete") > verbs.index("tpus queued-resources create")


def test_the_ssh_launcher_runs_the_words_on_every_host(tools):
    stand_in(tools, "ssh", 'for word; do :; done; exec sh -c "$word"')
    program = "import os, sys; print(os.environ['JAX_PROCESS_ID'], os.getcwd(), sys.argv[1:])"
    (tools / "my folder").mkdir()
    command = [sys.executable, "-m", "launch.ssh", "--hosts=a,b", f"--folder={tools}/my folder"]
    command += [f"--log_dir={tools}/logs", "--", sys.executable, "-c", program, "a b", "c;d"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for process in (0, 1):
        said = (tools / "logs" / f"rank-{process}.log").read_text()
        assert said == f"{process} {tools}/my folder ['a b', 'c;d']\n"
