"""A job of Ray Train whose first worker kills itself once: `python -m tests.support.ray_job RUN FOLDER STEPS KILL_AT`.

It writes into FOLDER/result.json where each launch began, the bits of the model at the end, and what Ray has kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import holdfast
from holdfast.integrations.ray import RayRestorePoints, url_in

WORKERS = 2


def train(config: dict[str, Any]) -> None:
    folder, run, rank = Path(config["folder"]), config["run"], ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(6, 3), parallel_strategy_kwargs={"find_unused_parameters": True})
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    with RayRestorePoints(run) as points, holdfast.Checkpointer(run, save=holdfast.Every(steps=1)) as checkpointer:
        start = checkpointer.restore(state)
        if rank == 0:
            with (folder / "starts").open("a") as file:
                file.write(f"{start}\n")
        for step in range(start, config["steps"]):
            loss = model(torch.randn(4, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            handle = checkpointer.step(step, state, metrics={"loss": loss})
            points.report({"step": step, "loss": loss.item()}, handle)
            if handle is not None and rank == 0:
                handle.committed.result(timeout=60)
            if rank == 0 and step == config["kill_at"] and start == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        parameters = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
        (folder / "end").write_text(hashlib.sha256(parameters).hexdigest())


def main() -> None:
    run, folder, steps, kill_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    kept = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="step")
    environment = {name: value for name, value in os.environ.items() if name.startswith(("HOLDFAST_", "PYTHONPATH"))}
    ray.init(num_cpus=WORKERS, include_dashboard=False, runtime_env={"env_vars": environment}, log_to_driver=True)
    result = TorchTrainer(
        train,
        train_loop_config={"run": run, "folder": str(folder), "steps": steps, "kill_at": kill_at},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=kept,
        ),
    ).fit()
    assert result.checkpoint is not None
    best = sorted((metrics["step"], url_in(checkpoint)) for checkpoint, metrics in result.best_checkpoints or [])
    told = {
        "starts": [int(line) for line in (folder / "starts").read_text().split()],
        "end": (folder / "end").read_text(),
        "latest": url_in(result.checkpoint),
        "best": best,
    }
    (folder / "result.json").write_text(json.dumps(told))
    ray.shutdown()


if __name__ == "__main__":
    main()
