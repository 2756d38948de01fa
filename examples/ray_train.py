"""Ray Train: a worker dies, Ray starts the group again, and it goes on from the run. Ray keeps references.

holdfast serve &
python examples/ray_train.py
"""

from __future__ import annotations

import argparse
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model

import holdfast
from holdfast.integrations.ray import RayRestorePoints, url_in


def train(config: dict[str, Any]) -> None:
    """On each worker, after Ray has joined them by torch.distributed. HOLDFAST_URL must be set on every node."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    # find_unused_parameters keeps DDP's first buckets, so that a resumed run adds gradients in the same order.
    model = prepare_model(model, parallel_strategy_kwargs={"find_unused_parameters": True})
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    state = {"model": model, "optimizer": optimizer}
    every = holdfast.Every(steps=20)
    with RayRestorePoints(config["run"]) as points, holdfast.Checkpointer(config["run"], save=every) as checkpointer:
        for step in range(checkpointer.restore(state), config["steps"]):
            inputs = torch.randn(16, 32, device=get_device())
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                print(f"step {step} loss {loss.item():.9g}", flush=True)
            handle = checkpointer.step(step, state, metrics={"loss": loss})
            points.report({"step": step, "loss": loss.item()}, handle)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="examples/ray", help="project/run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    trainer = TorchTrainer(
        train,
        train_loop_config={"run": options.run, "steps": options.steps},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    result = trainer.fit()
    if result.checkpoint is not None:
        print(f"the last checkpoint is {url_in(result.checkpoint)}")


if __name__ == "__main__":
    main()
