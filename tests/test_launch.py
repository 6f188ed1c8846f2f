"""launch/: what each launcher would run, word for word, and what the local one does with its processes."""

import importlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from launch import local, queued_resources, tpu_vm

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


# ---------------------------------------------------------------- the local launcher's processes


def launched(tmp_path, program, *flags):
    """The local launcher as a process of its own, running a Python program in each of two ranks."""
    command = [sys.executable, "-m", "launch.local", f"--log_dir={tmp_path / 'logs'}", *flags]
    command += [
        "--",
        sys.executable,
        "-c",
        f"import os, sys, time, signal\nrank = os.environ['JAX_PROCESS_ID']\n{program}",
    ]
    environment = {**os.environ, "HERE": str(tmp_path)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(process, seconds=20):
    out, error = process.communicate(timeout=seconds)
    return process.returncode, out, error


def log(tmp_path, rank):
    return (tmp_path / "logs" / f"rank-{rank}.log").read_text()


def test_every_rank_has_its_place_and_its_log(tmp_path):
    names = ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
    process = launched(tmp_path, f"print([os.environ[name] for name in {names}])", "--devices=3")
    code, out, _ = finished(process)
    assert code == 0
    assert log(tmp_path, 0) == "['0', '2', 'cpu', '3']\n" == out
    assert log(tmp_path, 1) == "['1', '2', 'cpu', '3']\n"


def test_the_ranks_share_a_free_port_of_the_loopback(tmp_path):
    assert finished(launched(tmp_path, "print(os.environ['JAX_COORDINATOR_ADDRESS'])"))[0] == 0
    assert log(tmp_path, 0) == log(tmp_path, 1)
    assert re.fullmatch(r"127\.0\.0\.1:\d+\n", log(tmp_path, 0))
    assert local.free_port() > 1024


# The first attempt leaves with what the test names, the second one well.
ONCE = "first = not os.path.exists(f'{os.environ[\"HERE\"]}/{rank}')\nopen(f'{os.environ[\"HERE\"]}/{rank}', 'w')\n"


@pytest.mark.parametrize("end", ["sys.exit(42)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_all_ranks_start_again_after_42_and_after_a_signal(tmp_path, end):
    program = f"print('start')\n{ONCE}\nif first and rank == '1':\n    {end}"
    code, _, error = finished(launched(tmp_path, program))
    assert code == 0
    assert log(tmp_path, 0) == log(tmp_path, 1) == "start\nstart\n"
    assert "start 1 of 10 again" in error


@pytest.mark.parametrize(("end", "code"), [("sys.exit(42)", 42), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_restarts_are_bounded(tmp_path, end, code):
    assert finished(launched(tmp_path, f"print('start')\n{end}", "--max_restarts=1"))[0] == code
    assert log(tmp_path, 1) == "start\nstart\n"


def test_another_failure_is_final_and_wins_over_the_signals_it_caused(tmp_path):
    program = (
        "print('start')\nif rank == '1':\n    time.sleep(0.5)\n    sys.exit(3)\nos.kill(os.getpid(), signal.SIGABRT)"
    )
    assert finished(launched(tmp_path, program))[0] == 3
    assert log(tmp_path, 1) == "start\n"


def test_a_survivor_is_ended_after_the_grace(tmp_path):
    started = time.monotonic()
    program = "if rank == '0':\n    sys.exit(4)\ntime.sleep(60)"
    assert finished(launched(tmp_path, program, "--grace=0.5"))[0] == 4
    assert time.monotonic() - started < 10


SAVES = """
def save(*_):
    print('saved')
    sys.exit(42)
signal.signal(signal.SIGTERM, save)
print('up')
time.sleep(60)
"""


def test_sigterm_reaches_every_rank_and_nothing_starts_again(tmp_path):
    process = launched(tmp_path, SAVES)
    assert process.stdout.readline() == "up\n"
    wait_for(lambda: "up" in log(tmp_path, 1))
    process.send_signal(signal.SIGTERM)
    assert finished(process)[0] == 42
    assert log(tmp_path, 0) == log(tmp_path, 1) == "up\nsaved\n"


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_a_killed_rank_had_started_ends_with_it_and_nothing_else_does(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        program = (
            "import subprocess\n"
            "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            "print(worker.pid)\nif rank == '1':\n    sys.exit(4)\ntime.sleep(60)"
        )
        assert finished(launched(tmp_path, program, "--grace=0.5"))[0] == 4
        workers = [int(log(tmp_path, rank)) for rank in (0, 1)]
        wait_for(lambda: not any(is_running(worker) for worker in workers))
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def is_running(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # dead, and not yet collected by whoever inherited it
