"""A job of the soak: python -m tests.soak.writer PROJECT/RUN FOLDER SEED. It saves step after step until it is killed
or the folder has a file `stop`; started again, it resumes as a job does."""

from __future__ import annotations

import random
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError, StaleAttempt
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.attempts import AttemptOpened, ResumedFrom
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import (
    AbortCheckpoint,
    BeginCheckpoint,
    Component,
    IndexOrdinals,
    MetricValue,
    ShardSummary,
)
from holdfast_protocol.runs import parse_run
from holdfast_protocol.states import CheckpointState
from tests.soak.compare import DifferentError, compare
from tests.soak.content import shard_content
from tests.soak.ledger import COMMITTED, Ledger

RANKS = 2
_PAUSE_SECONDS = 0.3
# Of a hundred saves.
_ABORTED, _FAILED, _LEFT = 8, 6, 4


class Job:
    def __init__(self, client: Client, run: RunName, ledger: Ledger, numbers: random.Random) -> None:
        self._client = client
        self._run = run
        self._ledger = ledger
        self._numbers = numbers
        self._opened: AttemptOpened = client.attempts.open_next(
            run, uuid.uuid4().hex, world_size=RANKS, host="soak", create=True
        )

    def resume(self) -> int:
        """The next step. What is offered must be readable, whatever was killed before."""
        point = self._opened.restore_point
        opened = self._opened
        self._client.attempts.resumed_from(
            self._run.project,
            self._run.run,
            opened.attempt,
            ResumedFrom(
                epoch=opened.epoch, attempt=opened.attempt, checkpoint_id=None if point is None else point.checkpoint_id
            ),
        )
        if point is None:
            return 0
        self._ledger.count("bytes compared", compare(self._client, point.checkpoint_id, self._ledger))
        self._ledger.count("jobs resumed")
        return point.step + 1

    def save(self, step: int) -> None:
        fate = self._numbers.randrange(100)
        seeds = [self._numbers.getrandbits(48) for _ in range(RANKS)]
        loss = self._numbers.random()
        begin = BeginCheckpoint(epoch=self._opened.epoch, attempt=self._opened.attempt, step=step, world_size=RANKS)
        with ThreadPoolExecutor(RANKS) as threads:
            ranks = [
                threads.submit(self._write, rank, begin, random.Random(seeds[rank]), fate, loss)
                for rank in range(RANKS)
            ]
        errors = [error for rank in ranks if (error := rank.exception()) is not None]
        for error in errors:
            if isinstance(error, StaleAttempt) or not isinstance(error, HoldfastError):
                raise error
        if errors:
            self._ledger.count(f"saves that failed with {type(errors[0]).__name__}")
        elif any(rank.result() is CheckpointState.COMMITTED for rank in ranks):
            self._ledger.count(COMMITTED)
        else:
            self._ledger.count("saves given up")

    def _write(
        self, rank: int, begin: BeginCheckpoint, numbers: random.Random, fate: int, loss: float
    ) -> CheckpointState | None:
        writer = ShardWriter(self._client, self._run, rank, begin)
        pieces = shard_content(f"{self._run.project}/{self._run.run}", rank, numbers)
        writer.upload(OutgoingChunk.of(piece.data) for piece in pieces)
        if rank == 0 and fate < _ABORTED:
            request = AbortCheckpoint(epoch=begin.epoch, attempt=begin.attempt, reason="the soak gives it up")
            self._client.checkpoints.abort(writer.checkpoint_id, request)
            return None
        if rank == 0 and fate < _ABORTED + _FAILED:
            writer.fail(MemoryError("the soak's rank failed"))
            return None
        if rank == 0 and fate < _ABORTED + _FAILED + _LEFT:
            return None  # never sealed: the reaper's
        self._ledger.shard(writer.checkpoint_id, rank, pieces)
        summary = ShardSummary(
            components={"model": Component(kind="model", logical_bytes=sum(piece.size for piece in pieces))},
            metrics={"loss": MetricValue.of(loss)} if rank == 0 else None,
        )
        view = writer.seal(summary=summary, index=IndexOrdinals(shard=len(pieces) - 1, layout=0 if rank == 0 else None))
        return view.state


def main(run: str, folder: Path, seed: int) -> None:
    ledger, numbers = Ledger(folder), random.Random(seed)
    with Client() as client:
        try:
            job = Job(client, parse_run(run), ledger, numbers)
            step = job.resume()
            while not (folder / "stop").exists():
                job.save(step)
                step += 1
                time.sleep(_PAUSE_SECONDS * numbers.random())
        except StaleAttempt:
            return  # a killed predecessor's call came late, or a successor is there already
        except (HoldfastError, DifferentError) as error:
            ledger.fault(f"the job {run} ended with {type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
