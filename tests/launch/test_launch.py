"""launch/: what each launcher would run, word for word, and what it does with stand-ins for the real tools."""

import importlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from launch import restarts
from tests.helpers.launch_stand_ins import leaves
from tests.helpers.paths import ROOT

GOLDEN = ROOT / "tests" / "launch" / "golden"
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.sbatch")])
# What a shell could stumble over: spaces, separators, quotes, a variable, a glob, an empty word.
TRAIN = [
    "python",
    "-m",
    "domino_jax.train",
    "--config=my recipes/a;b.py",
    "--workdir=gs://b/it's $HOME",
    "--x=* $$(PATH) $(PATH) $$",
    "",
]
NAME = "my run; reboot"
CLOUD = [f"--name={NAME}", "--zone=us-west4-a", "--type=v5litepod-16", "--version=v2-alpha-tpuv5-lite"]
DRY_RUNS = {
    "local": ["--processes=2", "--devices=4", "--port=8476", "--log_dir=my logs"],
    "ssh": ["--hosts=me@gpu-0,gpu-1", "--folder=my folder", "--env=NOTE=a b"],
    "tpu_vm": [*CLOUD, "--log_dir=my logs", "--project=p", "--spot", "--autocheckpoint", "--env=NOTE=a b", "--delete"],
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


def one_line(text, part):
    (line,) = [line for line in text.splitlines() if part in line]
    return line


# How the train command is found again in what a launcher prints: through every shell on the way.
UNWRAP = {
    "local": lambda text: shlex.split(text.splitlines()[1].partition(" >> ")[0]),
    "ssh": lambda text: shlex.split(shlex.split(text.splitlines()[1].partition(" >> ")[0])[-1]),
    "tpu_vm": lambda text: shlex.split(flag(one_line(text, "on_tpu.sh").partition(" >> ")[0], "--command")),
    "queued_resources": lambda text: shlex.split(one_line(text, "on_tpu.sh").partition(" || code=")[0]),
    "xpk": lambda text: shlex.split(expanded(flag(text, "--command"))),
    "gke": lambda text: [expanded(word) for word in job_pod(manifest(text))["containers"][0]["command"]],
    "skypilot": lambda text: shlex.split(flag(text, "--env=DOMINO_COMMAND")),
    "slurm": lambda text: shlex.split(text),
}


def manifest(text):
    return yaml.safe_load(text.split("\n", 1)[1].removesuffix("END\n"))


def expanded(word, variables=None):
    """What Kubernetes makes of a word of a command: $(NAME) is a variable if there is one, $$ a dollar."""
    return re.sub(
        r"\$\$|\$\((.*?)\)", lambda hit: "$" if hit[0] == "$$" else (variables or {}).get(hit[1], hit[0]), word
    )


def job_pod(jobset):
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", UNWRAP)
def test_a_dry_run_prints_the_golden_commands_in_which_every_word_survives_and_no_secret_is(name, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    text = dry_run(name, capsys)
    # By lines: to compare long texts as a whole can take pytest minutes.
    assert text.splitlines() == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    assert UNWRAP[name](text)[-len(TRAIN) :] == TRAIN
    assert "hf_canary" not in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_launcher_without_a_command_is_refused(name, capsys):
    with leaves(2, capsys, "write it after --"):
        importlib.import_module(f"launch.{name}").main([*DRY_RUNS[name], "--dry_run"])


def test_an_environment_variable_needs_a_name(capsys):
    with leaves(2, capsys, "write it as NAME=VALUE"):
        dry_run("xpk", capsys, [*DRY_RUNS["xpk"], "--env=a b=c"])


# ---------------------------------------------------------------- the files


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_pass_shellcheck(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run([shellcheck, str(script)], check=True)


def test_the_skypilot_task_parses_and_places_every_process(tmp_path):
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    subprocess.run(["bash", "-n"], input=task["setup"], text=True, check=True)
    program = "import os, sys; print([os.environ[n] for n in sorted(os.environ) if n[:4] == 'JAX_'], sys.argv[1:])"
    done = subprocess.run(
        ["bash", "-c", task["run"]],
        cwd=tmp_path,
        env={
            **{"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)},
            **{"PYTHONPATH": str(ROOT), "DOMINO_MAX_RESTARTS": "50"},
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


def test_the_jobset_counts_processes_and_gives_time_to_save(capsys):
    spec = manifest(dry_run("gke", capsys))["spec"]
    job = spec["replicatedJobs"][0]
    assert (job["replicas"], job["template"]["spec"]["parallelism"], spec["failurePolicy"]["maxRestarts"]) == (2, 4, 50)
    environment = {entry["name"]: entry["value"] for entry in job_pod({"spec": spec})["containers"][0]["env"]}
    assert environment == {**restarts.ENVIRONMENT, "DOMINO_NUM_PROCESSES": "8"}
    assert job_pod({"spec": spec})["terminationGracePeriodSeconds"] == restarts.GRACE
