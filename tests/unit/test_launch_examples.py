"""The script for Slurm, and the help, say of each exit code what the code says. Jobs: e2e/test_kubernetes_jobs.py."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast_client.cli.main import app
from holdfast_client.cli.output import ExitCode

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SBATCH = EXAMPLES / "slurm" / "train.sbatch"


class FakeSlurm:
    """Slurm's commands on a path of their own: srun ends with the code that it is told, after its signal."""

    def __init__(self, folder: Path, code: int, state: str = "RUNNING") -> None:
        self.requeued = folder / "requeued"
        self._write(folder / "squeue", f"echo {state}")
        node = "NodeName=node1 NodeAddr=10.0.0.1 State=IDLE"
        told = f'requeue*) echo "$2" > {self.requeued};; *hostnames) echo node1;; *) echo {node};;'
        self._write(folder / "scontrol", f'case "$1 $2" in {told} esac')
        self._write(
            folder / "srun",
            f'echo "$@" > {folder / "arguments"}\n'
            f"trap 'exit {code}' USR1\n"
            "kill -USR1 $PPID\n"
            "while :; do sleep 0.05; done",
        )
        self.arguments = folder / "arguments"
        self.environment = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_ON_NODE": "8",
        }

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)


@pytest.mark.rule("told-outcome")
@pytest.mark.parametrize(
    ("code", "again"),
    [(0, False), (ExitCode.PREEMPTED, True), (ExitCode.UNKNOWN, True), (ExitCode.FENCED, False), (1, False)],
)
def test_the_slurm_script_hands_its_signal_on_and_requeues_what_may_be_launched_again(tmp_path, code, again):
    slurm = FakeSlurm(tmp_path, int(code))
    ended = subprocess.run(
        ["bash", str(SBATCH)], env=slurm.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert slurm.requeued.exists() is again
    arguments = slurm.arguments.read_text()
    assert "holdfast launch --grace 110 -- torchrun" in arguments
    assert "--nproc-per-node=8 " in arguments
    assert "--rdzv-endpoint=10.0.0.1:29417 " in arguments
    assert arguments.endswith(" train.py\n")


def test_the_slurm_script_requeues_no_job_that_was_cancelled(tmp_path):
    slurm = FakeSlurm(tmp_path, int(ExitCode.PREEMPTED), state="COMPLETING")
    ended = subprocess.run(["bash", str(SBATCH)], env=slurm.environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == ExitCode.PREEMPTED
    assert not slurm.requeued.exists()
    assert "cancelled: not again" in ended.stdout


def test_the_slurm_script_leaves_the_job_less_than_slurm_does():
    text = SBATCH.read_text()
    (seconds,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)
    (grace,) = re.findall(r"--grace (\d+) --", text)
    assert int(grace) < int(seconds)


def test_the_help_of_holdfast_launch_names_its_codes():
    shown = CliRunner().invoke(app, ["launch", "--help"]).stdout
    for code in (ExitCode.PREEMPTED, ExitCode.UNKNOWN, ExitCode.FENCED):
        assert f"{int(code)}:" in shown
