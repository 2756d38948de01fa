"""A job of the soak: python -m tests.soak.writer PROJECT/RUN FOLDER SEED. It saves step after step until it is killed
or the folder has a file `stop`; started again, it resumes as a job does. With HOLDFAST_AGENT its ranks hand their saves
to that agent, and what all of them had handed over when they were killed must be committed."""

from __future__ import annotations

import random
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from pathlib import Path

from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError, StaleAttempt, TransferStopped
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.attempts import AttemptOpened, ResumedFrom
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import (
    BeginCheckpoint,
    Component,
    IndexOrdinals,
    MetricValue,
    ShardSummary,
)
from holdfast_protocol.runs import parse_run
from holdfast_protocol.states import CheckpointState
from tests.soak.agent_rank import AgentRank, StagedSave, notice_agents_soon
from tests.soak.compare import DifferentError, compare
from tests.soak.content import shard_content
from tests.soak.ledger import COMMITTED, Ledger, Save

RANKS = 2
_PAUSE_SECONDS = 0.3
# Of a hundred saves.
_ABORTED, _FAILED, _LEFT = 8, 6, 4
_GIVEN_UP = _ABORTED + _FAILED + _LEFT
_WAS_COMMITTED = (
    CheckpointState.COMMITTED,
    CheckpointState.TRASHED,
    CheckpointState.DELETING,
    CheckpointState.DELETED,
)


class Job:
    def __init__(self, client: Client, run: RunName, ledger: Ledger, numbers: random.Random) -> None:
        self._client = client
        self._run = run
        self._ledger = ledger
        self._numbers = numbers
        self._launch = uuid.uuid4().hex
        self._agents = [
            AgentRank(client, run, rank, host_ranks=RANKS, count=ledger.count)
            for rank in range(RANKS if client.settings.agent is not None else 0)
        ]
        left = self._left_to_agent()
        self._opened: AttemptOpened = client.attempts.open_next(
            run, self._launch, world_size=RANKS, host="soak", create=True
        )
        if left is not None:
            self._expect_committed(left)

    def _left_to_agent(self) -> Save | None:
        """The newest save that all ranks of a killed launch have handed over, if their agent lives and has ended with
        it."""
        for rank in self._agents:
            rank.settle()
        agent = self._agents[0].ended_with_the_dead() if self._agents else None
        return None if agent is None else self._ledger.last_handed(self._run.run, agent, RANKS)

    def _expect_committed(self, save: Save) -> None:
        found = self._client.checkpoints.all(
            self._run.project, self._run.run, min_step=save.step, max_step=save.step, attempt=save.attempt
        )
        states = [view.state for view in found]
        if any(state in _WAS_COMMITTED for state in states):
            self._ledger.count("last saves that an agent had taken, and that are committed")
        else:
            self._ledger.fault(f"an agent had taken {save} of every rank, and lives, and it is {states or 'unknown'}")

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
        with self._agents[0].on_host() if self._agents else nullcontext() as host:
            self._ledger.count("bytes compared", compare(self._client, point.checkpoint_id, self._ledger, host))
        self._ledger.count("jobs resumed")
        return point.step + 1

    def save(self, step: int) -> None:
        fate = self._numbers.randrange(100)
        seeds = [self._numbers.getrandbits(48) for _ in range(RANKS)]
        loss = self._numbers.random()
        begin = BeginCheckpoint(
            epoch=self._opened.epoch,
            attempt=self._opened.attempt,
            launch_id=self._launch,
            step=step,
            world_size=RANKS,
        )
        with ThreadPoolExecutor(RANKS) as threads:
            ranks = [
                threads.submit(self._write, rank, begin, random.Random(seeds[rank]), fate, loss)
                for rank in range(RANKS)
            ]
        errors = [error for rank in ranks if (error := rank.exception()) is not None]
        if errors or all(rank.result() is not CheckpointState.COMMITTED for rank in ranks):
            self._ledger.over(self._name(begin))
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
        summary = ShardSummary(
            components={"model": Component(kind="model", logical_bytes=sum(piece.size for piece in pieces))},
            metrics={"loss": MetricValue.of(loss)} if rank == 0 else None,
        )
        index = IndexOrdinals(shard=len(pieces) - 1, layout=0 if rank == 0 else None)
        self._ledger.shard(self._name(begin), rank, pieces)
        # The agent gets no save of a rank that fails, or stands still, before it has staged.
        if self._agents and (rank > 0 or not _ABORTED <= fate < _GIVEN_UP):
            staged = self._agents[rank].stage(begin, [piece.data for piece in pieces], summary, index)
            if rank == 0 and fate < _ABORTED:
                self._give_up(staged, writer)
                return None
            if fate >= _GIVEN_UP and (agent := staged.taken_by) is not None:
                self._ledger.handed(self._name(begin), rank, agent)
            return staged.write(writer).state
        writer.upload(OutgoingChunk.of(piece.data) for piece in pieces)
        if rank == 0 and fate < _ABORTED:
            writer.abort("the soak gives it up")
            return None
        if rank == 0 and fate < _ABORTED + _FAILED:
            writer.fail(MemoryError("the soak's rank failed"))
            return None
        if rank == 0 and fate < _GIVEN_UP:
            return None  # never sealed: the reaper's
        return writer.seal(summary=summary, index=index).state

    def _give_up(self, staged: StagedSave, writer: ShardWriter) -> None:
        """While the agent is at it."""
        writer.on_begun = writer.stop
        with suppress(TransferStopped):
            staged.write(writer)
        writer.abort("the soak gives it up")

    def _name(self, begin: BeginCheckpoint) -> Save:
        return Save(self._run.run, begin.attempt, begin.step)

    def close(self) -> None:
        for rank in self._agents:
            rank.close(is_finished=False)


def main(run: str, folder: Path, seed: int) -> None:
    notice_agents_soon()
    ledger, numbers = Ledger(folder), random.Random(seed)
    with Client() as client:
        try:
            job = Job(client, parse_run(run), ledger, numbers)
            with closing(job):
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
