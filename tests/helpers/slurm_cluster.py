"""A Slurm of this machine alone for the tests: a controller and two node daemons on the loopback.

Debian: apt-get install slurmctld slurmd slurm-client. Authentication is auth/none, so that munge is not needed.
"""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

from launch.local import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
CONFIG = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
BatchStartTimeout=60
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=4
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=4
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=off
"""


def missing() -> list[str]:
    return [name for name in PROGRAMS if which(name) is None]


def which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Cluster:
    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, check: bool = True, cwd: pathlib.Path | None = None) -> str:
        done = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """The fields that scontrol shows of a job, by name."""
        shown = self.run("scontrol", "show", "-o", "job", number)
        return dict(word.partition("=")[::2] for word in shown.split() if "=" in word)

    def wait(self, number: str, *states: str, seconds: float = 60) -> str:
        """Wait for one of these states of a job."""
        end = time.monotonic() + seconds
        while (state := self.job(number)["JobState"]) not in states:
            assert time.monotonic() < end, (state, states, self.job(number))
            time.sleep(0.2)
        return state

    def wait_for_step_daemons(self, number: str, seconds: float = 30) -> None:
        """Wait until the daemons of a job's steps have ended; they may outlive the job's end by seconds."""
        end = time.monotonic() + seconds
        while sockets := list(self.folder.glob(f"spool-*/node*_{number}.*")):
            assert time.monotonic() < end, sockets
            time.sleep(0.1)


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[Cluster]:
    ports = [free_port() for _ in range(3)]
    host = socket.gethostname().partition(".")[0]
    (folder / "state").mkdir()
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    values = {"controller": ports[0], "port1": ports[1], "port2": ports[2]}
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, folder=folder, user=user, **values))
    cluster = Cluster(folder)
    commands = [[which("slurmctld"), "-D"], *([which("slurmd"), "-D", "-N", f"node{n}"] for n in (1, 2))]
    daemons = []
    try:
        for index, command in enumerate(commands):
            with (folder / f"daemon-{index}.out").open("wb") as log:
                daemons.append(subprocess.Popen(command, env=cluster.environment, stdout=log, stderr=log))
        end = time.monotonic() + 60
        while set(cluster.run("sinfo", "-h", "-o", "%T", check=False).split()) != {"idle"}:
            assert time.monotonic() < end, (folder / "daemon-0.out").read_text()[-2000:]
            assert all(daemon.poll() is None for daemon in daemons), sorted(folder.iterdir())
            time.sleep(0.3)
        yield cluster
    finally:
        cluster.run("scancel", "--user", user, check=False)
        time.sleep(1)
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(30)
