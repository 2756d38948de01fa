"""Pushing what is in the spool, by the next attempt and by a person: cut off at any point, it can be done again."""

from __future__ import annotations

import errno
import os
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from holdfast.distributed.ranks import Ranks
from holdfast.local.adoption import Adoption
from holdfast.save.job import SaveStats
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.errors import ManifestConflict, QuotaExceeded, StoreFull
from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.local.push import SavePusher, push_late
from holdfast_client.local.spool import SpoolRecord, record_name, saves_of
from holdfast_client.local.tier import LocalTier, keep_shard
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.base import Fence, RunName
from holdfast_protocol.checkpoints import BeginCheckpoint, Component, IndexOrdinals
from holdfast_protocol.states import CheckpointKind, CheckpointState

pytestmark = pytest.mark.rule("late-save-adoption")

STEP = 5


class Spooled:
    """Two ranks of attempt 1 have kept a step on this node, and it is not committed."""

    def __init__(self, client, run, path):
        self.client = client
        self.run = RunName(*run.split("/"))
        self.tier = LocalTier(path, None)
        self.attempt = self.open()
        self.records = [self.keep(rank) for rank in (0, 1)]

    def open(self):
        """A new attempt."""
        launch_id = os.urandom(16).hex()
        opened = self.client.attempts.open_next(
            self.run, launch_id, world_size=2, host="node1", environment={}, create=None
        )
        return SimpleNamespace(
            fence=Fence(epoch=opened.epoch, attempt=opened.attempt, launch_id=launch_id),
            launch_id=launch_id,
            number=opened.attempt,
        )

    def keep(self, rank):
        def record(kept):
            return SpoolRecord(
                project=self.run.project,
                run=self.run.run,
                epoch=self.attempt.fence.epoch,
                attempt=self.attempt.number,
                launch_id=self.attempt.launch_id,
                number=1,
                step=STEP,
                kind=CheckpointKind.PERIODIC,
                world_size=2,
                rank=rank,
                chunks=kept,
                index=IndexOrdinals(shard=1, layout=2 if rank == 0 else None),
                components={"model": Component(kind="model", logical_bytes=10)},
                finite=True,
                metrics=None,
                host="node1",
                created_at=datetime.now(UTC),
            )

        bodies = [OutgoingChunk.of(f"{self.run} {rank} {each}".encode()) for each in ("state", "index", "layout")]
        with TransferWorkers(1) as workers:
            name = record_name(self.attempt.launch_id, 1, rank)
            return keep_shard(self.tier.spool, name, bodies, record, workers=workers)

    def push_rank(self, rank, fence):
        return push_late(self.client, self.tier.folder, self.records[rank], fence)

    def push(self):
        """As `holdfast spool push` does."""
        pusher = SavePusher(self.client, self.tier, allow_detached=False)
        return [pusher.push(save) for save in saves_of(self.tier.spool.read().records)]

    def adopt(self):
        """As the next attempt does."""
        with TransferWorkers(1) as workers:
            adoption = Adoption(self.client, self.run, Ranks(timeout_seconds=10), workers, self.tier, SaveStats())
            return adoption.adopt(self.open().fence)

    def left(self):
        return [record.rank for record in self.tier.spool.read().records]

    def states(self):
        return [view.state for view in self.client.checkpoints.all(self.run.project, self.run.run)]

    def begin_itself(self):
        """The attempt that saved it has begun it, and may be writing it."""
        begin = BeginCheckpoint(
            **self.attempt.fence.model_dump(), step=STEP, world_size=2, kind=CheckpointKind.PERIODIC
        )
        return ShardWriter(self.client, self.run, 0, begin).begin()


@pytest.fixture
def spooled(service, run, tmp_path):
    made = Spooled(service.client, run, tmp_path / "nvme")
    yield made
    made.tier.close()


@pytest.mark.parametrize("again", ["push", "adopt"])
def test_a_push_that_was_cut_off_behind_one_ranks_seal_is_completed_by_the_next(spooled, again):
    assert spooled.push_rank(0, spooled.attempt.fence).missing_ranks == [1]
    if again == "push":
        assert [outcome.told for outcome in spooled.push()] == ["committed"]
    else:
        assert spooled.adopt() == [STEP]
    assert spooled.states().count(CheckpointState.COMMITTED) == 1
    assert spooled.left() == []


def test_the_same_attempt_may_push_a_sealed_shard_again(spooled):
    fence = spooled.open().fence
    for _ in range(2):
        assert spooled.push_rank(0, fence).missing_ranks == [1]
    assert spooled.push_rank(1, fence).state is CheckpointState.COMMITTED
    assert spooled.push_rank(0, fence).state is CheckpointState.COMMITTED


def test_other_content_for_a_shard_that_is_sealed_is_refused(spooled):
    spooled.push_rank(0, spooled.attempt.fence)
    altered = spooled.records[0].model_copy(update={"finite": False})
    with pytest.raises(ManifestConflict):
        push_late(spooled.client, spooled.tier.folder, altered, spooled.attempt.fence)


@pytest.mark.parametrize("again", ["push", "adopt"])
def test_what_a_rank_that_was_killed_behind_the_commit_left_goes_with_the_next_attempt(spooled, again):
    for rank in (0, 1):
        spooled.push_rank(rank, spooled.attempt.fence)
    spooled.tier.spool.forget(spooled.records[0].name)  # and rank 1 was killed before it did the same
    if again == "push":
        assert [outcome.told for outcome in spooled.push()] == ["committed"]
    else:
        assert spooled.adopt() == [STEP]
    assert spooled.left() == []
    assert spooled.states() == [CheckpointState.COMMITTED]


def test_what_is_left_of_a_committed_save_stays_if_its_content_is_not_what_was_committed(spooled, caplog):
    for rank in (0, 1):
        spooled.push_rank(rank, spooled.attempt.fence)
    spooled.tier.spool.forget(spooled.records[0].name)
    file = spooled.tier.path / spooled.records[1].chunks[0].digest[:2] / spooled.records[1].chunks[0].digest
    file.write_bytes(file.read_bytes()[::-1])
    assert spooled.adopt() == []
    assert spooled.left() == [1]
    assert spooled.states() == [CheckpointState.COMMITTED]


def test_a_save_of_which_a_rank_is_missing_and_that_is_not_committed_begins_nothing(spooled, caplog):
    spooled.tier.spool.forget(spooled.records[0].name)
    assert spooled.adopt() == []
    assert "no node of this job has the shards of rank 0" in caplog.text
    assert (spooled.left(), spooled.states()) == ([1], [])


def test_a_moments_trouble_with_the_disk_leaves_an_adopted_save_in_the_spool_and_the_next_attempt_takes_it(
    spooled, monkeypatch, caplog
):
    def refused(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(ChunkFolder, "read_into", refused)
        assert spooled.adopt() == []
    assert "Too many open files" in caplog.text
    assert spooled.left() == [0, 1]
    assert spooled.states() == [CheckpointState.UPLOADING], "no rank has given it up"
    assert spooled.adopt() == [STEP]
    assert spooled.left() == []


@pytest.mark.parametrize("error", [QuotaExceeded("used up"), StoreFull("full")], ids=lambda error: error.code)
def test_a_push_that_finds_no_room_does_not_give_up_what_the_job_is_writing_itself(spooled, monkeypatch, caplog, error):
    def refused(*_):
        raise error

    spooled.begin_itself()
    monkeypatch.setattr(ShardWriter, "upload_and_seal", refused)
    [outcome] = spooled.push()
    assert outcome.told == f"left: {error}"
    assert "attempt 1 may still be writing it itself" in caplog.text
    assert spooled.states() == [CheckpointState.UPLOADING]
    assert spooled.left() == [0, 1]


def test_a_push_that_finds_no_room_gives_its_own_checkpoint_up_so_that_nobody_waits_for_it(spooled, monkeypatch):
    def refused(*_):
        raise QuotaExceeded("used up")

    spooled.open()
    monkeypatch.setattr(ShardWriter, "upload_and_seal", refused)
    assert not spooled.push()[0].committed
    assert spooled.states() == [CheckpointState.ABORTED]
    assert spooled.left() == [0, 1]
