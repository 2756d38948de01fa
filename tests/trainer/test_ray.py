"""Ray Train: a worker is killed, Ray starts the group again, and it goes on bit for bit. Ray keeps references."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from tests.trainer.conftest import Service

from holdfast.integrations import restore_points
from holdfast.save.job import SaveHandle
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import Health

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


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: docs/integrations.md")
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


class Worker:
    """What RayRestorePoints sees of Ray on one worker, and what this one has reported: the step of the metrics, and
    that of the checkpoint."""

    def __init__(self, rank: int, told: int | None = None) -> None:
        self.reported: list[tuple[int, int | None]] = []
        ray, train, collective = (ModuleType(name) for name in ("ray", "ray.train", "ray.train.collective"))
        parts: dict[ModuleType, dict[str, Any]] = {
            ray: {"train": train},
            train: {
                "get_context": lambda: mock.Mock(get_world_rank=lambda: rank),
                "report": lambda metrics, checkpoint=None: self.reported.append((metrics["step"], checkpoint)),
                "Checkpoint": mock.Mock(
                    from_directory=lambda it: json.loads((Path(it) / "holdfast.json").read_text())["step"]
                ),
            },
            collective: {"broadcast_from_rank_zero": lambda data: data if told is None else told},
        }
        for module, names in parts.items():
            vars(module).update(names)
        assert restore_points  # imported before: what is imported in here is forgotten
        with mock.patch.dict(sys.modules, {module.__name__: module for module in parts}):
            sys.modules.pop("holdfast.integrations.ray", None)
            self.points = importlib.import_module("holdfast.integrations.ray").RayRestorePoints("demo/gpt")


def test_each_save_that_is_committed_is_reported_once_with_its_own_metrics() -> None:
    first, handles = Worker(0), [SaveHandle(step) for step in range(6)]

    def ends(step: int, health: Health = Health.OK) -> None:
        view = CheckpointView.model_construct(
            step=step, health=health, id=f"c{step}", digest="", attempt=1, logical_bytes=0, metrics={}
        )
        handles[step].committed.set_result(view)

    for step, handle in enumerate(handles):
        if step == 2:
            ends(0)
            ends(1)
        first.points.report({"step": step}, handle)
    assert first.reported == [(0, None), (1, None), (0, 0), (1, 1), (4, None), (5, None)]
    handles[2].committed.set_exception(OSError())
    ends(3, Health.DIVERGED)
    ends(4)
    ends(5)
    first.points.close()
    assert first.reported[6:] == [(4, 4), (5, 5)]


def test_the_other_workers_report_as_often_as_the_first_at_the_end() -> None:
    other = Worker(1, told=2)
    other.points.report({"step": 0}, SaveHandle(0))
    other.points.close()
    assert other.reported == [(0, None)] * 3
