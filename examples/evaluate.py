"""Evaluates each checkpoint of a run as it is committed, beside the training job, and writes the score back. Kill it,
start it again, and it goes on: it skips what has a score already. Start it once the run is there; its token needs the
scopes `read` and `operate`.

holdfast serve &
python examples/plain.py examples/evaluated &
python examples/evaluate.py examples/evaluated

`best:eval_loss` then names the best one, for `restore(at=…)`, `holdfast checkpoints pull` and a policy's `keep_best`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

import holdfast
from holdfast_client import Client
from holdfast_client.errors import CheckpointConflict, EditConflict, NotFound
from holdfast_protocol.checkpoints import CheckpointView, EditCheckpoint, MetricValue
from holdfast_protocol.events import EventType
from holdfast_protocol.states import CheckpointState

METRIC = "eval_loss"


def committed(client: Client, project: str, run: str) -> Iterator[CheckpointView]:
    """The checkpoints that are there, then each new one. The position is taken first, so none falls between the two."""
    position = client.events.position()
    there = client.checkpoints.all(project, run, state=CheckpointState.COMMITTED)
    yield from sorted(there, key=lambda checkpoint: checkpoint.step)
    for event in client.events.follow(project=project, run=run, types=[EventType.CHECKPOINT_COMMITTED], after=position):
        if event.data.checkpoint_id is not None:
            yield client.checkpoints.get(event.data.checkpoint_id)


def evaluate(checkpoint: CheckpointView, run: str) -> float:
    """Your own evaluation; here the loss of examples/plain.py on data that it never saw."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(64, 1))
    holdfast.load_weights(f"{run}@{checkpoint.id}", model)
    inputs = torch.randn(1024, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return (model.eval()(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean().item()


def write_back(client: Client, checkpoint: CheckpointView, score: float) -> None:
    """An edit goes onto the version that was seen. If a person has edited it meanwhile, it is read again."""
    edit = EditCheckpoint(metrics={METRIC: MetricValue.of(score)})
    while True:
        try:
            client.checkpoints.edit(checkpoint.id, edit, checkpoint.etag)
            return
        except EditConflict:
            checkpoint = client.checkpoints.get(checkpoint.id)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="examples/evaluated", help="project/run")
    parser.add_argument("--until-step", type=int, help="ends after this step; without it never")
    options = parser.parse_args()
    project, _, run = options.run.partition("/")
    with Client() as client:
        for checkpoint in committed(client, project, run):
            if METRIC not in checkpoint.metrics and checkpoint.state == CheckpointState.COMMITTED:
                try:
                    score = evaluate(checkpoint, options.run)
                    write_back(client, checkpoint, score)
                    print(f"step {checkpoint.step} {METRIC} {score:.6g}", flush=True)
                except (NotFound, CheckpointConflict) as gone:  # a policy or a person was quicker
                    print(f"step {checkpoint.step} is left out: {gone}", flush=True)
            if options.until_step is not None and checkpoint.step >= options.until_step:
                return


if __name__ == "__main__":
    main()
