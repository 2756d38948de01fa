"""A job of six steps that MLflow or W&B knows: `python -m tests.support.tracked_job RUN TOOL FOLDER KILL_AFTER`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.integrations.restore_points import RestorePointLog


def points_of(tool: str, run: str, folder: Path) -> tuple[RestorePointLog, Any]:
    if tool == "mlflow":
        from mlflow import MlflowClient

        from holdfast.integrations.mlflow import MlflowRestorePoints

        return MlflowRestorePoints(run, client=MlflowClient(folder.as_uri())), None
    import wandb

    from holdfast.integrations.wandb import WandbRestorePoints, wandb_id

    tracked = wandb.init(project="tests", id=wandb_id(run), resume="allow", mode="offline", dir=folder)
    return WandbRestorePoints(run, tracked), tracked


def main() -> None:
    run, tool, folder, kill_after = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    points, tracked = points_of(tool, run, folder)
    model = torch.nn.Linear(4, 4)
    state = {"model": model}
    with points, holdfast.Checkpointer(run, save=holdfast.OnPreemption()) as ckpt:
        for step in range(ckpt.restore(state), 6):
            torch.nn.init.constant_(model.weight, step)
            handle = points.log(ckpt.save(step, state, metrics={"loss": 1.0 / (step + 1)}))
            assert handle is not None
            handle.committed.result(timeout=60)
            if step == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
    if tracked is not None:
        tracked.finish()


if __name__ == "__main__":
    main()
