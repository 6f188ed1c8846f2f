"""launch/: what each launcher would run, word for word."""

import argparse
import importlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import jax
import pytest
import yaml

from launch import queued_resources, tpu_vm
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
    "gke": lambda text: [expanded(word) for word in pod(text)["containers"][0]["command"]],
    "slurm": lambda text: shlex.split(text),
}


def pod(text):
    jobset = yaml.safe_load(text.split("\n", 1)[1].removesuffix("END\n"))
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def expanded(word):
    """What Kubernetes makes of a word of a command without variables: $$ is a dollar."""
    return word.replace("$$", "$")


@pytest.mark.parametrize("name", UNWRAP)
def test_a_dry_run_prints_the_golden_commands_in_which_every_word_survives_and_no_secret_is(name, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    text = dry_run(name, capsys)
    # By lines: to compare long texts as a whole can take pytest minutes.
    assert text.splitlines() == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    assert UNWRAP[name](text)[-len(TRAIN) :] == TRAIN
    assert "hf_canary" not in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("name", "words", "named"),
    [
        *((name, [*flags, "--dry_run"], "write it after --") for name, flags in DRY_RUNS.items()),
        ("xpk", [*DRY_RUNS["xpk"], "--env=a b=c", "--dry_run", "--", "train"], "--env=a b=c"),
        ("ssh", ["--hosts=a,,b", "--dry_run", "--", "train"], "--hosts=a,,b"),
    ],
)
def test_a_mistake_in_the_flags_exits_2_and_is_named(name, words, named, capsys):
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"launch.{name}").main(words)
    assert left.value.code == 2 and named in capsys.readouterr().err


def test_stop_reaches_every_machine():
    tpu = argparse.Namespace(name="n", zone="z", project=None, capacity=None)
    assert tpu_vm.stop(tpu)[-2:] == ["--worker=all", "--command=cd domino_jax && python3 -m launch.host --stop"]
    assert {"--node=all", "--worker=all"} < set(queued_resources.stop(tpu))


# ---------------------------------------------------------------- the files


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_pass_shellcheck(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run([shellcheck, str(script)], check=True)


def test_the_machines_get_the_jax_that_the_tests_run_with():
    pin = (ROOT / "requirements-tpu.txt").read_text()
    assert "--python 3.11 " in (ROOT / "launch" / "on_tpu.sh").read_text()
    if sys.version_info[:2] == (3, 11):
        assert re.search(rf"jax\[\w+\]=={re.escape(jax.__version__)}\b", pin)
