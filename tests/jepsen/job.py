"""A training job: python -m tests.jepsen.job PROJECT/RUN FOLDER SEED BEGAN.

It opens an attempt, restores, and saves until it is killed or the folder has a file `stop`. Steps follow the clock
(they are counted from BEGAN), so two launches that live at once save the same steps at the same time. A job that was
fenced does not believe it for a while: it saves on, as a process does that nobody could reach. None of that may be
committed.

With HOLDFAST_AGENT its ranks hand their saves to that agent, also when it was fenced.
"""

from __future__ import annotations

import random
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path

from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError, StaleAttempt
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.attempts import EndAttempt, ResumedFrom
from holdfast_protocol.base import Fence, RunName
from holdfast_protocol.checkpoints import BeginCheckpoint, Component, IndexOrdinals, MetricValue, ShardSummary
from holdfast_protocol.runs import parse_run
from holdfast_protocol.states import AttemptOutcome, CheckpointState
from tests.jepsen.content import RANKS, MixedError, Saved, WrongError, check_content
from tests.jepsen.journal import Journal, Wrong
from tests.soak.agent_rank import AgentRank, notice_agents_soon
from tests.soak.compare import read_shards

STEP_SECONDS = 1.5
_STUBBORN_SECONDS = 4.0
_WAIT_SECONDS = 5


class Job:
    def __init__(self, client: Client, run: RunName, journal: Journal, numbers: random.Random) -> None:
        self._client = client
        self._run = run
        self._journal = journal
        self._numbers = numbers
        self._launch = uuid.uuid4().hex
        self._agents = [
            AgentRank(client, run, rank, host_ranks=RANKS, count=journal.count)
            for rank in range(RANKS if client.settings.agent is not None else 0)
        ]
        for agent in self._agents:
            agent.settle()
        asked_at = time.monotonic()
        self._opened = client.attempts.open_next(run, self._launch, world_size=RANKS, host="jepsen", create=True)
        self._fence = Fence(epoch=self._opened.epoch, attempt=self._opened.attempt, launch_id=self._launch).model_dump()
        self._fenced_at: float | None = None
        point = self._opened.restore_point
        journal.opened(
            run.run,
            self._launch,
            self._opened.epoch,
            self._opened.attempt,
            asked_at,
            None if point is None else point.step,
            [each.checkpoint_id for each in self._opened.skipped],
        )

    @property
    def gives_up(self) -> bool:
        return self._fenced_at is not None and time.monotonic() > self._fenced_at + _STUBBORN_SECONDS

    def resume(self) -> int:
        """The step that it restored, every byte of it compared; -1 for none."""
        point = self._opened.restore_point
        resumed = ResumedFrom(checkpoint_id=None if point is None else point.checkpoint_id, **self._fence)
        self._client.attempts.resumed_from(self._run.project, self._run.run, self._opened.attempt, resumed)
        if point is None:
            return -1
        with self._agents[0].on_host() if self._agents else nullcontext() as host:
            shards = read_shards(self._client, point.checkpoint_id, host)
        try:
            check_content(self._run.run, point.attempt, point.step, shards)
        except MixedError as error:
            self._journal.found(Wrong.MIXED, f"{point.checkpoint_id} was restored: {error}")
        except WrongError as error:
            self._journal.found(Wrong.WRONG, f"{point.checkpoint_id} was restored: {error}")
        self._journal.count("restores, every byte compared")
        return point.step

    def save(self, step: int) -> None:
        begun_at = time.monotonic()
        begin = BeginCheckpoint(step=step, world_size=RANKS, **self._fence)
        pauses = [self._numbers.random() * STEP_SECONDS / 3 for _ in range(RANKS)]
        with ThreadPoolExecutor(RANKS) as threads:
            ranks = [threads.submit(self._save_shard, rank, begin, pauses[rank]) for rank in range(RANKS)]
        errors = [error for rank in ranks if (error := rank.exception()) is not None]
        for error in errors:
            self._journal.count(f"saves refused or cut off: {type(error).__name__}")
            if isinstance(error, StaleAttempt) and self._fenced_at is None:
                self._fenced_at = time.monotonic()
                self._journal.fenced(self._run.run, self._launch)
            elif not isinstance(error, HoldfastError):
                raise error
        sealed = next((rank.result() for rank in ranks if rank.exception() is None), None)
        if sealed is None:
            return
        checkpoint_id, state = sealed
        if any(rank.result()[1] is CheckpointState.COMMITTED for rank in ranks if rank.exception() is None):
            state = CheckpointState.COMMITTED
        if state is not CheckpointState.COMMITTED:
            # The other rank's reply was lost, or the other rank is: the service knows.
            state = self._client.checkpoints.get(checkpoint_id, wait_seconds=_WAIT_SECONDS).state
        if state is CheckpointState.COMMITTED:
            after_fence = self._fenced_at is not None and self._fenced_at < begun_at
            self._journal.committed(
                checkpoint_id, self._run.run, self._launch, self._opened.attempt, step, begun_at, after_fence
            )

    def _save_shard(self, rank: int, begin: BeginCheckpoint, pause: float) -> tuple[str, CheckpointState]:
        writer = ShardWriter(self._client, self._run, rank, begin)
        chunks = Saved(self._run.run, self._launch, begin.attempt, begin.step, rank).chunks()
        summary = ShardSummary(
            components={"model": Component(kind="model", logical_bytes=sum(len(data) for data in chunks))},
            metrics={"loss": MetricValue.of(1 / (begin.step + 1))} if rank == 0 else None,
        )
        index = IndexOrdinals(shard=len(chunks) - 1, layout=0 if rank == 0 else None)
        if self._agents:
            staged = self._agents[rank].stage(begin, chunks, summary, index)
            time.sleep(pause)
            view = staged.write(writer)
        else:
            writer.upload(OutgoingChunk.of(data) for data in chunks)
            time.sleep(pause)
            view = writer.seal(summary=summary, index=index)
        return view.id, view.state

    def end(self) -> None:
        request = EndAttempt(outcome=AttemptOutcome.FINISHED, **self._fence)
        self._client.attempts.end(self._run.project, self._run.run, self._opened.attempt, request)

    def close(self) -> None:
        for agent in self._agents:
            agent.close(is_finished=False)


def train(run: RunName, folder: Path, numbers: random.Random, began: float, journal: Journal) -> None:
    with Client() as client, closing(Job(client, run, journal, numbers)) as job:
        step = job.resume()
        while not (folder / "stop").exists():
            due = max(step + 1, int((time.monotonic() - began) / STEP_SECONDS))
            time.sleep(max(0.0, began + due * STEP_SECONDS - time.monotonic()))
            step = due
            try:
                job.save(step)
            except HoldfastError as error:
                journal.count(f"outcomes that could not be asked for: {type(error).__name__}")
            if job.gives_up:
                return
        job.end()


def main(run: str, folder: Path, seed: int, began: float) -> None:
    notice_agents_soon()
    journal = Journal(folder)
    try:
        train(parse_run(run), folder, random.Random(seed), began, journal)
    except HoldfastError as error:
        # It could not be opened, restored or ended: the launcher starts the next one.
        journal.count(f"launches that ended with {type(error).__name__}")
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
