"""A reader of the soak: python -m tests.soak.reader PROJECT FOLDER SEED. It restores checkpoints of all runs, old and
new ones, until it is killed or the folder has a file `stop`."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from holdfast_client.client import Client
from holdfast_client.errors import ChunkGone, HoldfastError, NotFound
from holdfast_protocol.states import CheckpointState
from tests.soak.compare import DifferentError, compare
from tests.soak.ledger import Ledger

_GOING = (CheckpointState.DELETING, CheckpointState.DELETED)
_PAUSE_SECONDS = 0.2


def read_one(client: Client, project: str, numbers: random.Random, ledger: Ledger) -> None:
    run = numbers.choice([run.name for run in client.runs.all(project)] or [""])
    if not run:
        return
    if numbers.random() < 0.5:
        point = client.restores.restore_point(project, run).restore_point
        wanted = None if point is None else point.checkpoint_id
    else:
        there = [
            view.id
            for state in (CheckpointState.COMMITTED, CheckpointState.TRASHED)
            for view in client.checkpoints.list(project, run, state=state, limit=50).items
        ]
        wanted = numbers.choice(there) if there else None
    if wanted is None:
        return
    try:
        ledger.count("bytes compared", compare(client, wanted, ledger))
        ledger.count("checkpoints read and compared")
    except (ChunkGone, NotFound):
        # Refused before the first ticket: its purge had begun. What was begun to be read must come to its end.
        state = client.checkpoints.get(wanted).state
        if state not in _GOING:
            raise
        ledger.count("reads that came after a purge")


def main(project: str, folder: Path, seed: int) -> None:
    ledger, numbers = Ledger(folder), random.Random(seed)
    with Client() as client:
        while not (folder / "stop").exists():
            try:
                read_one(client, project, numbers, ledger)
            except NotFound:
                ledger.count("reads before there was a run")
            except (HoldfastError, DifferentError) as error:
                ledger.fault(f"a read failed with {type(error).__name__}: {error}")
            time.sleep(_PAUSE_SECONDS * numbers.random())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
