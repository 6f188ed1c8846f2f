"""The commands of the cloud launchers, given to the real tools' parsers: pytest -m slow.

gcloud (Google Cloud CLI), xpk and SkyPilot (`pip install xpk skypilot`, each in a separate environment) are found on
the PATH, or through DOMINO_XPK and DOMINO_SKY, which name the programs. Nothing is reached: gcloud without an account
stops after parsing, xpk runs dry, SkyPilot's task is read only.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

from launch import queued_resources, skypilot, tpu_vm, xpk
from tests.helpers.paths import ROOT

TRAIN = ["--dry_run", "--", "python", "-m", "domino_jax.train", "--config=configs/tiny.py"]
CLOUD = ["--name=domino", "--zone=us-west4-a", "--type=v5litepod-16", "--version=v2-alpha-tpuv5-lite", "--project=p"]
XPK = os.environ.get("DOMINO_XPK") or shutil.which("xpk")
SKY = os.environ.get("DOMINO_SKY") or shutil.which("sky")
pytestmark = pytest.mark.slow


def gcloud_lines(launcher, capsys, *flags):
    assert launcher.main([*CLOUD, *flags, *TRAIN]) == 0
    lines = [line.partition(" >> ")[0] for line in capsys.readouterr().out.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("gcloud ")]


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="not installed: gcloud")
@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        (tpu_vm, ["--spot", "--autocheckpoint", "--delete"]),
        (tpu_vm, []),
        (tpu_vm, ["--stop"]),
        (queued_resources, ["--storage=gs://b/l", "--nodes=2", "--spot"]),
        (queued_resources, ["--storage=gs://b/l", "--capacity=best-effort"]),
        (queued_resources, ["--storage=gs://b/l", "--stop"]),
    ],
)
def test_gcloud_knows_every_word(launcher, flags, capsys, tmp_path):
    (tmp_path / queued_resources.STARTUP).write_text("true\n")
    lines = gcloud_lines(launcher, capsys, *flags)
    assert lines
    # A new folder for its settings: no account, so that nothing can be reached.
    environment = {**os.environ, "CLOUDSDK_CONFIG": str(tmp_path / "config"), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    environment["CLOUDSDK_CORE_CHECK_GCE_METADATA"] = "false"
    for line in lines:
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, "active account" in done.stderr) == (1, True), (line, done.stderr)


@pytest.mark.skipif(XPK is None, reason="not installed: xpk")
def test_xpk_knows_every_word(capsys, tmp_path):
    flags = ["--name=domino", "--cluster=c", "--type=v5litepod-16", "--image=i", "--zone=us-west4-a", "--project=p"]
    assert xpk.main([*flags, *TRAIN]) == 0
    words = shlex.split(capsys.readouterr().out)
    done = subprocess.run(
        [XPK, *words[1:], "--no-such-flag"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert "unrecognized arguments: --no-such-flag\n" in done.stderr


@pytest.mark.skipif(SKY is None, reason="not installed: sky")
def test_skypilot_reads_the_task(capsys):
    assert skypilot.main(["--name=domino", "--nodes=2", "--gpus=H100:8", *TRAIN]) == 0
    words = shlex.split(capsys.readouterr().out)
    command = next(word for word in words if word.startswith("--env=DOMINO_COMMAND="))
    program = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(task.num_nodes, resources.job_recovery, sorted(task.envs))
"""
    python = pathlib.Path(SKY).resolve().parent / "python"
    environment = {**os.environ, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    task = re.sub(r"(DOMINO_\w+): null", r"\1: 'true'", (ROOT / "launch" / "skypilot.yaml").read_text())
    done = subprocess.run(
        [str(python), "-c", program, "/dev/stdin"],
        input=task,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "'recover_on_exit_codes': [42, 143]" in done.stdout
    assert command.endswith("configs/tiny.py")
