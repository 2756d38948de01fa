"""Ray Train: a worker is killed, Ray starts the group again, and it goes on bit for bit. Ray keeps references."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.conftest import Service

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: docs/integrations.md"),
]
JOB = "tests.support.ray_job"
STEPS = 5


def trained(run: str, folder: Path, kill_at: int) -> dict[str, Any]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", JOB, run, folder, str(STEPS), str(kill_at)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    told: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return told


@pytest.mark.timeout(1200)
def test_a_killed_worker_goes_on_bit_for_bit_and_ray_keeps_references_of_the_restore_points(
    run: str, service: Service, tmp_path: Path
) -> None:
    project, name = run.split("/")
    service.client.runs.create(project, f"{name}-whole")
    whole = trained(f"{run}-whole", tmp_path / "whole", -1)
    killed = trained(run, tmp_path / "killed", 2)
    assert (whole["starts"], killed["starts"]) == ([0], [0, 3])
    assert killed["end"] == whole["end"]
    ids = {view.step: view.id for view in service.client.checkpoints.all(project, name)}
    assert killed["latest"] == f"holdfast://{run}@{ids[STEPS - 1]}"
    assert killed["best"] == [[step, f"holdfast://{run}@{ids[step]}"] for step in (STEPS - 2, STEPS - 1)]
