"""MLflow: an MLflow run knows its restore points. Killed and started again, it goes on in the same MLflow run.

holdfast serve &
python examples/mlflow_restore_points.py
"""

from __future__ import annotations

import argparse
import logging
from concurrent.futures import Future

import torch
from mlflow import MlflowClient

import holdfast

log = logging.getLogger("mlflow_restore_points")


def mlflow_run(client: MlflowClient, run: str) -> str:
    """The id of the MLflow run that belongs to this run; made at the first launch."""
    found = client.get_experiment_by_name("holdfast")
    experiment = found.experiment_id if found else client.create_experiment("holdfast")
    runs = client.search_runs([experiment], f"tags.`holdfast.run` = '{run}'", max_results=1)
    return (runs[0] if runs else client.create_run(experiment, tags={"holdfast.run": run})).info.run_id


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="examples/mlflow", help="project/run")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    client = MlflowClient()  # MLFLOW_TRACKING_URI says where
    run_id = mlflow_run(client, options.run)

    def note(committed: Future) -> None:
        # On a thread of the Checkpointer: only what is committed is a restore point, and that is known later.
        if committed.exception() is None:
            view = committed.result()
            try:
                client.log_metric(run_id, "restore_point", view.step, step=view.step)
                client.set_tag(run_id, "holdfast.latest", f"{options.run}@{view.step}")
                client.set_tag(run_id, "holdfast.latest_id", view.id)
            except Exception as error:
                log.warning("MLflow was not told of step %d: %s", view.step, error)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(options.run, save=holdfast.Every(steps=20)) as checkpointer:
        for step in range(checkpointer.restore(state), options.steps):
            inputs = torch.randn(16, 32)
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.9g}", flush=True)
            client.log_metric(run_id, "loss", loss.item(), step=step)
            if handle := checkpointer.step(step, state, metrics={"loss": loss}):
                handle.committed.add_done_callback(note)
    client.set_terminated(run_id)


if __name__ == "__main__":
    main()
