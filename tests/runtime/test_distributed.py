"""How processes connect and leave, with real ones: who listens where, who finds whom, what a wrong environment gets."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from domino_jax.runtime import distributed
from domino_jax.runtime.errors import DominoError
from launch.local import free_port
from tests.helpers.paths import ROOT

# A command as ours are: connect, look around, leave together.
PROGRAM = """
import os, sys, time
from domino_jax.runtime import agreement, distributed
from domino_jax.recipe import cli

def listening():
    # (local address in hex, state) of this process' own sockets; 0A is LISTEN.
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    sockets = {os.readlink(link) for link in links if os.path.exists(link)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in list(open(f"/proc/net/{name}"))[1:]]
    return sorted({row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets})

def main(flags):
    distributed.initialize(flags.distributed)
    import jax
    print("process", jax.process_index(), "of", jax.process_count(), "primary", distributed.is_primary())
    print("listening", listening())
    ACT
    agreement.barrier("end")

cli.run(main, (), ("distributed",))
"""
LOOPBACK_ONLY = {"0100007F", "0000000000000000FFFF00000100007F"}
OURS = re.compile(r"JAX_|DOMINO_|SLURM_|OMPI_|.*_proxy$", re.IGNORECASE)


def start(act="pass", mode="auto", prelude="", **environment):
    """The program as a process that knows nothing of this one's own place."""
    kept = {name: value for name, value in os.environ.items() if not OURS.match(name) and name != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, "-c", prelude + PROGRAM.replace("ACT", act), f"--distributed={mode}"],
        cwd=ROOT,
        env={**kept, "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, seconds=180):
    """(exit code, standard output, standard error)"""
    out, error = process.communicate(timeout=seconds)
    return process.returncode, out, error


def by_hand(port, count, process):
    return {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(process),
    }


def pair(act="pass", **environment):
    """Two processes of one run, placed by hand; their (code, out, error)."""
    port = free_port()
    return [finish(process) for process in [start(act, **by_hand(port, 2, i), **environment) for i in (0, 1)]]


def listened(out):
    return set(re.findall(r"'([0-9A-F]+)'", re.search(r"listening (.*)", out)[1]))


# ---------------------------------------------------------------- who finds whom


def test_one_process_starts_no_service():
    code, out, error = finish(start())
    assert code == 0, error
    assert "topology: 1 process, 1 device (cpu)\n" in out
    assert "process 0 of 1 primary True" in out
    assert listened(out) == set()


@pytest.mark.long
def test_two_processes_by_hand_share_their_devices_and_stay_on_the_loopback():
    """Process 0 works on while the other one is done."""
    ends = pair("if jax.process_index() == 0: time.sleep(3)", JAX_NUM_CPU_DEVICES="2", DOMINO_NUM_PROCESSES="2")
    assert [code for code, _, _ in ends] == [0, 0], ends
    first, second = (out for _, out, _ in ends)
    assert "topology: 2 processes, 4 devices (cpu)\n" in first and "topology" not in second
    assert "process 0 of 2 primary True" in first and "process 1 of 2 primary False" in second
    assert listened(first) and listened(first) | listened(second) <= LOOPBACK_ONLY


@pytest.mark.long
def test_two_slurm_tasks_on_one_node_find_each_other_on_the_loopback():
    address = f"127.0.0.1:{free_port()}"  # as launch/slurm.sbatch sets it for one node
    step = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    step |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_COORDINATOR_BIND_ADDRESS": address}
    ends = [finish(task) for task in [start(**step, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in (0, 1)]]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert ["process 0 of 2" in ends[0][1], "process 1 of 2" in ends[1][1]] == [True, True]
    assert listened(ends[0][1]) <= LOOPBACK_ONLY


# ---------------------------------------------------------------- a wrong environment


def test_a_missing_device_exits_2_and_names_the_variable():
    code, _, error = finish(start(JAX_PLATFORMS="rocm"))
    assert (code, "Traceback" in error) == (2, False), error
    assert "error: JAX_PLATFORMS is 'rocm', and jax finds no such device" in error


@pytest.mark.parametrize(
    ("mode", "environment", "message"),
    [
        ("auto", {"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS is None"),
        ("auto", {"DOMINO_INIT_SECONDS": "15m"}, "DOMINO_INIT_SECONDS is '15m'"),
        ("off", {"DOMINO_NUM_PROCESSES": "2"}, "DOMINO_NUM_PROCESSES is 2, but 1 came up"),
    ],
)
def test_a_place_that_is_wrong_or_incomplete_is_refused(mode, environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DominoError, match=message):
        distributed.initialize(mode)


def test_a_process_whose_peers_never_come_counts_as_lost():
    code, _, error = finish(start(**by_hand(free_port(), 3, 1), DOMINO_INIT_SECONDS="2"))
    assert code == -signal.SIGABRT, error


# ---------------------------------------------------------------- leaving


def test_the_exit_code_of_a_process_that_fails_alone_survives():
    fails = "from domino_jax.runtime.errors import NonFiniteError\n    if not jax.process_index(): "
    ends = pair(f"{fails}raise NonFiniteError('a loss')", DOMINO_HEARTBEAT_SECONDS="5")
    code, _, error = ends[0]
    assert (code, "error: a loss" in error) == (4, True)
    assert ends[1][0] != 0


@pytest.mark.long
def test_an_unexpected_exception_in_one_process_keeps_its_traceback_and_counts_as_a_loss():
    first, second = pair("if jax.process_index(): 1 / 0", DOMINO_HEARTBEAT_SECONDS="5")
    assert (second[0], "ZeroDivisionError" in second[2]) == (-signal.SIGABRT, True)
    assert first[0] != 0


def test_a_survivor_leaves_within_30_seconds_when_its_peer_is_killed():
    act = "if jax.process_index() == 1: print('dies at', time.time(), flush=True); os.kill(os.getpid(), 9)"
    survivor, killed = pair(act, DOMINO_HEARTBEAT_SECONDS="10")
    left = time.time()
    assert killed[0] == -signal.SIGKILL
    # By a signal, which launchers answer with a new start.
    assert survivor[0] == -signal.SIGABRT
    assert left - float(re.search(r"dies at (\S+)", killed[1])[1]) < 30


ALIKE = """
    from etils import epath
    from domino_jax.runtime.errors import DominoError
    agreement.SHARED_SECONDS = 0.5
    def tried(check, *of):
        try: check(*of)
        except DominoError as error: print("refused:", error)
        else: print("fine")
    folder, own = epath.Path("FOLDER"), str(jax.process_index())
    (folder / own).mkdir()
    tried(agreement.refuse_differences, {"the recipe": "a", "the code": "b"})
    tried(agreement.refuse_differences, {"the recipe": "a", "the code": own})
    tried(agreement.refuse_own_folder, folder)
    tried(agreement.refuse_own_folder, folder / own)
    def fails(): raise DominoError("no room")
    tried(agreement.from_primary, fails)
    print("answer", agreement.from_primary(lambda: ["of", jax.process_index()]))
    agreement.barrier("the end of these")
"""


@pytest.mark.long
def test_what_differs_between_machines_and_what_process_0_meets_is_reported_in_all_processes(tmp_path):
    ends = pair(ALIKE.strip().replace("FOLDER", str(tmp_path)))
    assert [code for code, _, _ in ends] == [0, 0], ends
    for number, (_, out, _) in enumerate(ends):
        lines = [line for line in out.splitlines() if line.startswith(("fine", "refused"))]
        assert lines[0] == lines[2] == "fine"
        assert lines[1].startswith("refused: the code of process 1 and of process 0 differ: start the same")
        assert lines[3].startswith(
            f"refused: the folders {tmp_path}/{number} of process 1 and of process 0 differ: name one"
        )
        assert ("no room" in lines[4], "process 0" in lines[4]) == (number == 0, number == 1)
        assert "answer ['of', 0]" in out
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0", "1"]
