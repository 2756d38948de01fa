"""A job on a real Slurm cluster with examples/slurm/train.sbatch: preempted, out of time, requeued, and the same to the
bit."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast_client import Client, ClientSettings
from holdfast_protocol.states import AttemptOutcome
from tests.support.ports import free_ports
from tests.support.prepare import NotHereError
from tests.support.serve import ServedHoldfast, holdfast_serve
from tests.support.slurm import CPUS, SlurmCluster, slurm_cluster

SBATCH = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "train.sbatch"
JOB = Path(__file__).with_name("slurm_job.py")
STEPS = 600
# No GPUs, and all CPUs of a node: there is room for one job at a time.
SMALL = ("--gpus-per-node=0", f"--cpus-per-task={CPUS}")
_WITHIN_SECONDS = 240
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    """Skips only where there is no apt."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    try:
        with slurm_cluster(folder) as running:
            yield running
    except NotHereError as reason:
        # pip cannot install Slurm, and no other part of Holdfast needs it.
        pytest.skip(str(reason))


def until(reached: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + _WITHIN_SECONDS
    while not reached():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


class Jobs:
    """Submits the script, and reads what its ranks and Slurm have written."""

    def __init__(self, cluster: SlurmCluster, service: ServedHoldfast, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        scripts = sysconfig.get_path("scripts")
        self._settings = service.environment | {
            "PATH": f"{scripts}:{cluster.environment['PATH']}",
            "HOLDFAST_PREEMPTION_CLOUD": "none",
            "HOLDFAST_RUN": "demo/gpt",
            "PROCESSES_PER_NODE": "1",
            "RENDEZVOUS_PORT": str(free_ports()),
        }

    def submit(self, *options: str, slow_launches: int = 0) -> str:
        output = f"--output={self._folder}/%x-%j.log"
        arguments = [str(JOB), str(self._folder), str(STEPS), str(slow_launches)]
        return self._cluster.submit(SBATCH, arguments, [*SMALL, output, *options], self._settings)

    def wait_for_step(self, run: str, launch: int, number: str) -> None:
        """Until both ranks of that launch have trained a step."""
        names = [f"demo-{run}-reached-{launch}-{rank}" for rank in range(2)]
        until(lambda: all((self._folder / name).exists() for name in names), lambda: self.told(number))

    def wait_for_requeue(self, number: str, restarts: int) -> None:
        """Until it is in the queue again. slurmctld would let it wait there for two minutes; here it begins earlier,
        but not at once: a node takes no launch of a job in the second in which it has ended the one before."""
        again = {"JobState": "PENDING", "Restarts": str(restarts)}
        until(lambda: again.items() <= self._cluster.job(number).items(), lambda: self.told(number))
        self._cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now+3")

    def minutes_run(self, number: str) -> int:
        """Whole ones, of its launch: on a crowded machine it has run for some before it trains."""
        hours, minutes, _ = self._cluster.job(number)["RunTime"].split(":")
        return 60 * int(hours) + int(minutes)

    def told_the_script(self, number: str) -> int:
        """How often SIGUSR1 has come to it."""
        return self._log(number).count("SIGUSR1: the ranks save and leave")

    def wait_for_end(self, number: str) -> dict[str, str]:
        until(lambda: self._cluster.job(number)["JobState"] in _ENDED, lambda: self.told(number))
        return self._cluster.job(number)

    def starts(self, run: str) -> list[int]:
        """The step that each launch began with, by rank 0."""
        found = sorted(self._folder.glob(f"demo-{run}-began-*-0"))
        return [int(each.read_text()) for each in found]

    def ended(self, run: str) -> list[str]:
        return [(self._folder / f"demo-{run}-ended-{rank}").read_text() for rank in range(2)]

    def told(self, number: str) -> str:
        return f"{self._cluster.job(number)}\n{self._log(number)[-6000:]}"

    def _log(self, number: str) -> str:
        return "".join(each.read_text(errors="replace") for each in self._folder.glob(f"*-{number}.log"))


@pytest.mark.timeout(900)
@pytest.mark.rule("told-outcome")
def test_a_job_that_slurm_preempts_is_requeued_and_ends_bit_for_bit(cluster: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    with holdfast_serve(tmp_path) as service:
        jobs = Jobs(cluster, service, folder)
        preempted = jobs.submit("--array=7", slow_launches=3)
        jobs.wait_for_step("gpt-7", 0, preempted)

        # It needs both nodes, and takes them from the other one, whose ranks get SIGTERM.
        undisturbed = jobs.submit("--partition=urgent", "--job-name=urgent")
        jobs.wait_for_requeue(preempted, 1)
        assert jobs.wait_for_end(undisturbed)["ExitCode"] == "0:0", jobs.told(undisturbed)
        assert jobs.starts("gpt") == [0]
        assert jobs.told_the_script(preempted) == 0

        # The time limit comes nearer than --signal=B:USR1@120 says, and Slurm sends SIGUSR1 to the script.
        jobs.wait_for_step("gpt-7", 1, preempted)
        limit = cluster.job(preempted)["TimeLimit"]
        cluster.run("scontrol", "update", f"JobId={preempted}", f"TimeLimit={jobs.minutes_run(preempted) + 2}")
        jobs.wait_for_requeue(preempted, 2)
        cluster.run("scontrol", "update", f"JobId={preempted}", f"TimeLimit={limit}")
        assert jobs.told_the_script(preempted) == 1

        # A preemption on a cluster that sends the job's own signal then.
        cluster.configure("SlurmctldParameters=preempt_send_user_signal")
        jobs.wait_for_step("gpt-7", 2, preempted)
        cluster.run("sbatch", "--partition=urgent", "--nodes=2", f"--cpus-per-task={CPUS}", "--wrap=true")
        jobs.wait_for_requeue(preempted, 3)
        end = jobs.wait_for_end(preempted)
        assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", "3"), jobs.told(preempted)
        assert jobs.told_the_script(preempted) == 2

        # A person's scancel is no preemption, though the ranks save as they do then.
        cancelled = jobs.submit("--array=8", slow_launches=1)
        jobs.wait_for_step("gpt-8", 0, cancelled)
        cluster.run("scancel", cancelled)
        end = jobs.wait_for_end(cancelled)
        assert (end["JobState"], end["Restarts"]) == ("CANCELLED", "0"), jobs.told(cancelled)

        first, second, third, fourth = jobs.starts("gpt-7")
        assert first == 0 < second < third < fourth < STEPS
        assert jobs.ended("gpt-7") == jobs.ended("gpt")
        url, data = service.environment["HOLDFAST_URL"], Path(service.environment["HOLDFAST_DATA_DIR"])
        with Client(ClientSettings(url=url, data_dir=data)) as client:
            outcomes = [each.outcome for each in client.attempts.list("demo", "gpt-7").items]
            assert [each.outcome for each in client.attempts.list("demo", "gpt-8").items] == [AttemptOutcome.PREEMPTED]
    assert outcomes == [AttemptOutcome.FINISHED, *[AttemptOutcome.PREEMPTED] * 3]
