"""The examples for Slurm and Kubernetes say of each exit code what the code says."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from holdfast_client.cli.launch import is_torchrun
from holdfast_client.cli.main import app
from holdfast_client.cli.output import ExitCode

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SBATCH = EXAMPLES / "slurm" / "train.sbatch"


@pytest.mark.rule("told-outcome")
def test_the_kubernetes_job_restarts_what_is_preempted_and_never_what_is_fenced():
    job = yaml.safe_load((EXAMPLES / "kubernetes" / "job.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    actions = {
        code: rule["action"]
        for rule in reversed(rules)  # the first that fits counts
        if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
    }
    assert actions == {ExitCode.FENCED: "FailJob", ExitCode.PREEMPTED: "Ignore"}
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {container["name"]}
    assert all(rule["onExitCodes"]["operator"] == "In" for rule in rules if "onExitCodes" in rule)
    assert pod["restartPolicy"] == "Never"
    assert job["spec"]["backoffLimit"] > 0
    command = container["command"] + container["args"]
    assert command[:2] == ["holdfast", "launch"]
    assert int(command[command.index("--grace") + 1]) < pod["terminationGracePeriodSeconds"]
    assert is_torchrun(command[command.index("--") + 1 :])


class FakeSlurm:
    """`srun` and `scontrol` on a path of their own: srun ends with the code that it is told, after its signal."""

    def __init__(self, folder: Path, code: int) -> None:
        self.requeued = folder / "requeued"
        self._write(folder / "scontrol", f'case $1 in requeue) echo "$2" > {self.requeued};; *) echo node1;; esac')
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
    assert "holdfast launch --grace 110 -- torchrun" in slurm.arguments.read_text()


def test_the_slurm_script_leaves_the_job_less_than_slurm_does():
    text = SBATCH.read_text()
    (seconds,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)
    (grace,) = re.findall(r"--grace (\d+) --", text)
    assert int(grace) < int(seconds)


def test_the_help_of_holdfast_launch_names_its_codes():
    shown = CliRunner().invoke(app, ["launch", "--help"]).stdout
    for code in (ExitCode.PREEMPTED, ExitCode.UNKNOWN, ExitCode.FENCED):
        assert f"{int(code)}:" in shown
