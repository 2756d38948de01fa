"""MLflow: an MLflow run with the restore points by reference. A killed job goes on in the same MLflow run.

holdfast serve &
python examples/mlflow_restore_points.py
"""

from __future__ import annotations

import argparse

import torch
from mlflow import MlflowClient

import holdfast
from holdfast.integrations.mlflow import MlflowRestorePoints


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="examples/mlflow", help="project/run")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    client = MlflowClient()  # MLFLOW_TRACKING_URI says where
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    every = holdfast.Every(steps=20)
    with (
        MlflowRestorePoints(options.run, client=client) as points,
        holdfast.Checkpointer(options.run, save=every, config={"mlflow_run": points.run_id}) as checkpointer,
    ):
        for step in range(checkpointer.restore(state), options.steps):
            inputs = torch.randn(16, 32)
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.9g}", flush=True)
            client.log_metric(points.run_id, "loss", loss.item(), step=step)
            points.log(checkpointer.step(step, state, metrics={"loss": loss}))
    client.set_terminated(points.run_id)


if __name__ == "__main__":
    main()
