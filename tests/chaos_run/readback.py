"""Restores every committed checkpoint of a run: python -m tests.chaos_run.readback RUN SEED

A line of JSON for each: its id, and the digest of what was restored or why it was not. Nothing is read from a local
tier, and each restore is a job's own, with the same checks.
"""

from __future__ import annotations

import json
import logging
import sys

import holdfast
from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError
from holdfast_client.settings import ClientSettings
from holdfast_protocol.states import CheckpointState
from tests.chaos_run.trainer import Training


def main(run: str, seed: int) -> None:
    logging.getLogger("holdfast").setLevel(logging.ERROR)
    project, name = run.split("/")
    with Client(ClientSettings()) as client:
        ids = [view.id for view in client.checkpoints.all(project, name, state=CheckpointState.COMMITTED)]
    for checkpoint_id in ids:
        print(json.dumps([checkpoint_id, restored(run, seed, checkpoint_id)]), flush=True)


def restored(run: str, seed: int, checkpoint_id: str) -> str:
    training = Training(seed)
    try:
        with holdfast.Checkpointer(run, replicated=["dataloader"]) as ckpt:
            ckpt.restore(training.state, at=checkpoint_id)
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return training.digest()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
