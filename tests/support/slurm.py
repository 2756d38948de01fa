"""A real Slurm cluster on loopback: slurmctld, and a slurmd for each of its nodes, as the tests' own user.

The site's part of its configuration is deploy/slurm/preemption.conf. What this file adds makes it small: no accounting,
no cgroups, no munge (its daemon wants a folder of root's), and nodes that claim more CPUs than this machine may have.
"""

from __future__ import annotations

import getpass
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.debian import unpacked
from tests.support.ports import free_ports
from tests.support.processes import ServerProcess

NODES = ("n1", "n2")
CPUS = 8
"""Of each node, whatever this machine has."""
PREEMPTION = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "preemption.conf"
_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libmunge2")


class SlurmCluster:
    """`environment` is what its commands need."""

    def __init__(self, home: Path, folder: Path) -> None:
        libraries = next((home / "usr" / "lib").glob("*/slurm-wlm"))
        self._home, self._folder, self._plugins = home, folder, libraries
        self._port = free_ports(1 + len(NODES))
        self._write_configuration()
        self.environment = {
            **os.environ,
            "PATH": f"{home}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{libraries}:{libraries.parent}",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def controller(self) -> ServerProcess:
        return self._started("slurmctld", ready=lambda: self._answers("ping"))

    def node(self, name: str) -> ServerProcess:
        """A node that jobs can be given to."""
        stepd = str(self._home / "usr/sbin/slurmstepd-wlm")
        return self._started("slurmd", "-N", name, "-d", stepd, ready=lambda: self._is_idle(name))

    def run(self, *command: str, **settings: str) -> str:
        """What one of Slurm's own commands prints. Raises CalledProcessError."""
        done = subprocess.run(
            list(command),
            env=self.environment | settings,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=self._folder,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def submit(
        self, script: Path, arguments: Sequence[str], options: Sequence[str], settings: Mapping[str, str]
    ) -> str:
        """The job's number."""
        command = ["sbatch", "--parsable", *options, str(script), *arguments]
        return self.run(*command, **settings).strip().partition(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """What slurmctld says of a job, such as JobState and Restarts."""
        words = self.run("scontrol", "show", "job", "--oneliner", number).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def configure(self, line: str) -> None:
        """One more line of its configuration, from here on."""
        with (self._folder / "slurm.conf").open("a") as file:
            file.write(f"{line}\n")
        self.run("scontrol", "reconfigure")

    def end_jobs(self) -> None:
        """Returns when none is left; after KillWait Slurm kills them."""
        me = getpass.getuser()
        while self.run("squeue", "--noheader", "--user", me).strip():
            self.run("scancel", "--user", me)
            time.sleep(0.5)

    def _answers(self, *question: str) -> bool:
        try:
            return "is UP" in self.run("scontrol", *question)
        except RuntimeError:
            return False

    def _is_idle(self, node: str) -> bool:
        return self.run("sinfo", "--noheader", "--nodes", node, "--format", "%t").split()[0] == "idle"

    def _started(self, program: str, *arguments: str, ready: object) -> ServerProcess:
        name = "-".join([program, *arguments[1:2]])
        return ServerProcess(
            [str(self._home / "usr/sbin" / f"{program}-wlm"), "-D", "-f", str(self._folder / "slurm.conf"), *arguments],
            log=self._folder / f"{name}.log",
            ready=ready,  # type: ignore[arg-type]
            env=self.environment,
            cwd=self._folder,
        )

    def _write_configuration(self) -> None:
        me = getpass.getuser()
        (self._folder / "state").mkdir()
        nodes = "\n".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={self._port + 1 + n} CPUs={CPUS}"
            for n, name in enumerate(NODES)
        )
        (self._folder / "slurm.conf").write_text(
            f"""ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={self._port}
SlurmUser={me}
SlurmdUser={me}
AuthType=auth/none
CredType=cred/none
PluginDir={self._plugins}
StateSaveLocation={self._folder}/state
SlurmdSpoolDir={self._folder}/spool-%n
SlurmctldPidFile={self._folder}/slurmctld.pid
SlurmdPidFile={self._folder}/slurmd-%n.pid
SlurmctldTimeout=300
SlurmdTimeout=300
MessageTimeout=60
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
{nodes}
Include {PREEMPTION}
"""
        )


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """All nodes are idle; `folder` must exist. Raises NotHereError without apt."""
    package, *further = _PACKAGES
    cluster = SlurmCluster(unpacked(package, "usr/sbin/slurmctld-wlm", *further), folder)
    with ExitStack() as servers:
        servers.callback(cluster.controller().stop)
        for name in NODES:
            servers.callback(cluster.node(name).stop)
        # Jobs outlive their slurmd: those that a test has left get SIGTERM here, and have KillWait seconds.
        servers.callback(cluster.end_jobs)
        yield cluster
