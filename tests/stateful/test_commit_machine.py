"""The whole commit protocol through HTTP, in any order, against a model, with a crash or a lost reply at each step.

One invariant: every committed checkpoint is fully readable, and it is what the ranks sealed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from hypothesis import strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select

import holdfast_service.collect.controller
import holdfast_service.db.dialect
import holdfast_service.liveness.abandoned_uploads
from holdfast_protocol.digests import checkpoint_digest, shard_digest
from holdfast_service.copies.predicates import is_usable_by, object_key
from holdfast_service.db.tables.core import Checkpoint, Chunk, ChunkListEntry, Copy, Shard
from tests.stateful.conftest import PROFILE
from tests.stateful.faults import Fault, FaultyDatabase, faults
from tests.stateful.model import RANKS, RunModel, SaveModel, ShardModel
from tests.support.rank import Job, Refused, Save, digest_of
from tests.support.service import RunningService

STEPS = strategies.sampled_from([10, 20, 30])
A_RANK = strategies.integers(0, RANKS - 1)
# Few contents, so that steps, ranks and attempts share chunks all the time.
CONTENTS = strategies.lists(
    strategies.sampled_from([b"frozen base", b"weights 1", b"weights 2", b"index"]), min_size=1, max_size=4
)
# Hours. After three every ticket has expired and every late upload has landed.
PAUSES = strategies.sampled_from([0, 0, 3])
_examples = itertools.count(1)


class CommitMachine(RuleBasedStateMachine):
    def __init__(self, service: RunningService) -> None:
        super().__init__()
        self.service = service
        self.http = service.http()
        # A project of its own: another example's chunks must not be present in this one.
        self.run = f"stateful-{next(_examples)}/gpt"
        self.model = RunModel()
        self.jobs: list[Job] = []
        self.changed = False
        self.database = FaultyDatabase()
        self.database.__enter__()

    def teardown(self) -> None:
        self.database.__exit__()
        self.http.close()

    # Attempts.

    @initialize()
    def first_attempt(self) -> None:
        self.open_attempt(Fault(), resume=True)

    @rule(fault=faults, resume=strategies.booleans())
    def relaunch(self, fault: Fault, resume: bool) -> None:
        """The job was killed between two calls, and is launched again."""
        self.open_attempt(fault, resume=resume)

    @precondition(lambda self: self.uploading())
    @rule(data=strategies.data(), fault=faults)
    def relaunch_after_dying_in_a_seal(self, data: strategies.DataObject, fault: Fault) -> None:
        """Nobody of the old job ever learns whether its last seal was heard."""
        save, rank = self.draw_open_shard(data)
        if self.complete(save.shards[rank]):
            content = tuple(save.shards[rank].negotiated)
            self.database.attempt(fault, lambda: self.save_of(save).seal(rank, content))
            state = self.save_of(save).now()["state"]
            assert state in ("uploading", "committed")
            if state == "committed":
                save.shards[rank].sealed = content
                assert save.whole
                self.model.commit(save)
        self.open_attempt(Fault(), resume=True)

    def open_attempt(self, fault: Fault, *, resume: bool) -> None:
        after, launch_id = len(self.jobs), f"launch-{len(self.jobs)}"
        job = self.database.retried(
            fault,
            lambda: Job(self.http, self.run, after=after, world_size=RANKS, launch_id=launch_id, create=True),
        )
        latest = self.model.latest
        point = job.opened["restore_point"]
        assert (None if point is None else point["checkpoint_id"]) == (None if latest is None else latest.id)
        assert job.opened["ever_committed"] == any(save.state == "committed" for save in self.model.saves)
        fenced = self.uploading()
        self.jobs.append(job)
        self.model.open(resume=resume)
        assert {self.save_of(save).now()["state"] for save in fenced} <= {"aborted"}
        if resume and latest is not None:
            self.database.retried(fault, lambda: job.resumed_from(latest.id))
        self.changed = True

    @precondition(lambda self: len(self.jobs) > 1)
    @rule(data=strategies.data())
    def a_fenced_attempt_still_writes(self, data: strategies.DataObject) -> None:
        old = data.draw(strategies.sampled_from(self.jobs[:-1]))
        with pytest.raises(Refused) as caught:
            old.begin(data.draw(STEPS))
        assert caught.value.code == "stale_attempt"
        mine = [save for save in self.model.saves if save.attempt == old.number]
        if mine:
            save = data.draw(strategies.sampled_from(mine))
            with pytest.raises(Refused) as caught:
                Save(old, {"id": save.id}).seal(0, [b"frozen base"])
            assert caught.value.code == "stale_attempt"

    # One checkpoint.

    @rule(
        data=strategies.data(),
        step=STEPS,
        rank=A_RANK,
        contents=CONTENTS,
        sends=strategies.sampled_from([0, 1, 4]),
        pause=PAUSES,
        seals=strategies.booleans(),
        fault=faults,
    )
    def work(
        self,
        data: strategies.DataObject,
        step: int,
        rank: int,
        contents: list[bytes],
        sends: int,
        pause: int,
        seals: bool,
        fault: Fault,
    ) -> None:
        """One rank comes as far as it comes: it may send only some of its chunks, and seal too early or not at all."""
        save = self.begin(step, fault)
        shard = save.shards[rank]
        if shard.sealed is not None:
            return
        self.negotiate(save, rank, contents, fault)
        self.send(save, rank, list(shard.negotiated)[:sends], fault, report=data.draw(strategies.booleans()))
        self.collect(pause)
        if seals:
            self.seal(save, rank, fault)

    @rule(step=STEPS, contents=CONTENTS, pause=PAUSES, fault=faults)
    def save_whole(self, step: int, contents: list[bytes], pause: int, fault: Fault) -> None:
        """What mostly happens: every rank that has not sealed sends what is asked for and seals."""
        save = self.begin(step, fault)
        for rank, shard in enumerate(save.shards):
            if shard.sealed is None:
                self.negotiate(save, rank, list({*contents, *shard.negotiated}), fault)
                self.send(save, rank, list(shard.negotiated), fault, report=rank == 0)
                self.collect(pause)
                self.seal(save, rank, fault)
                assert shard.sealed is not None
        assert save.state == "committed"

    def begin(self, step: int, fault: Fault) -> SaveModel:
        begun = self.database.retried(fault, lambda: self.jobs[-1].begin(step))
        known = self.model.live(step)
        if known is None:
            known = SaveModel(begun.id, self.model.attempt.number, step)
            self.model.saves.append(known)
        assert (begun.id, begun.view["state"]) == (known.id, known.state)
        return known

    def negotiate(self, save: SaveModel, rank: int, contents: list[bytes], fault: Fault) -> None:
        shard = save.shards[rank]
        reply = self.database.retried(fault, lambda: self.save_of(save).negotiate(rank, contents))
        for content, answer in zip(contents, reply["chunks"], strict=True):
            assert answer["digest"] == digest_of(content)
            if answer["status"] == "present":
                shard.ready.add(content)
                shard.unsure.discard(content)
                shard.negotiated.setdefault(content, None)
            else:
                # What was sent may have been sent to a copy that has expired since.
                if content in shard.ready:
                    shard.ready.discard(content)
                    shard.unsure.add(content)
                shard.negotiated[content] = answer["ticket"]

    def send(self, save: SaveModel, rank: int, contents: list[bytes], fault: Fault, *, report: bool) -> None:
        shard = save.shards[rank]
        for content in contents:
            if shard.negotiated[content] is None or content in shard.ready:
                continue
            ticket = shard.negotiated[content]
            assert ticket is not None
            self.save_of(save).put(content, ticket).raise_for_status()
            shard.ready.add(content)
            shard.unsure.discard(content)
            if report:
                reply = self.database.retried(
                    fault, lambda content=content: self.save_of(save).negotiate(rank, finished=[content])
                )
                assert [each["state"] for each in reply["finished"]] == ["verified"]

    def seal(self, save: SaveModel, rank: int, fault: Fault) -> None:
        shard = save.shards[rank]
        content = tuple(shard.negotiated)
        try:
            view = self.database.retried(fault, lambda: self.save_of(save).seal(rank, content))
        except Refused as problem:
            if problem.code != "incomplete_checkpoint":
                raise
            missing = set(problem.context["digests"])
            assert missing
            assert not missing & {digest_of(each) for each in shard.ready}, "the service said that it was there"
            return
        assert not [each for each in content if each not in shard.ready | shard.unsure], "sealed without its bytes"
        shard.sealed = content
        if save.whole:
            self.model.commit(save)
        assert view["state"] == save.state
        self.changed = True

    @precondition(lambda self: any(self.sealed_shards()))
    @rule(data=strategies.data(), fault=faults)
    def seal_again(self, data: strategies.DataObject, fault: Fault) -> None:
        save, rank = data.draw(strategies.sampled_from(list(self.sealed_shards())))
        content = save.shards[rank].sealed
        assert content is not None
        view = self.database.retried(fault, lambda: self.save_of(save).seal(rank, content))
        assert view["state"] == save.state
        with pytest.raises(Refused) as caught:
            self.save_of(save).seal(rank, [*content, content[0]])
        assert caught.value.code == "manifest_conflict"
        with pytest.raises(Refused) as caught:
            self.save_of(save).fail(rank)
        assert caught.value.code == "shard_sealed"

    @precondition(lambda self: self.uploading())
    @rule(data=strategies.data(), fault=faults, whole=strategies.booleans())
    def give_up(self, data: strategies.DataObject, fault: Fault, whole: bool) -> None:
        save, rank = self.draw_open_shard(data)
        if whole:
            view = self.database.retried(fault, self.save_of(save).abort)
        else:
            view = self.database.retried(fault, lambda: self.save_of(save).fail(rank))
            assert view["abort_rank"] == rank
        assert view["state"] == "aborted"
        save.state = "aborted"

    # Time passes, and the controllers run.

    @rule(hours=strategies.sampled_from([1, 3]))
    def collect(self, hours: int) -> None:
        _ahead[0] += timedelta(hours=hours)
        holdfast_service.collect.controller.reconcile(self.service.context)
        self.changed = True

    @rule()
    def the_service_was_unavailable(self) -> None:
        """The reaper finds a gap and leaves it out: nothing is given up."""
        _ahead[0] += timedelta(hours=2)
        assert holdfast_service.liveness.abandoned_uploads.reconcile(self.service.context).aborted == ()

    # What must always hold.

    @invariant()
    def every_committed_checkpoint_is_fully_readable(self) -> None:
        if not self.changed:
            return
        self.changed = False
        for save in self.model.saves:
            if save.state == "committed":
                self.read_back(save)

    def read_back(self, save: SaveModel) -> None:
        context = self.service.context
        with context.database.read() as session:
            checkpoint = session.execute(select(Checkpoint).where(Checkpoint.id == save.id)).scalar_one()
            assert (checkpoint.state, checkpoint.health) == ("committed", "ok")
            shards = [[digest_of(content) for content in shard.sealed or ()] for shard in save.shards]
            assert checkpoint.digest == checkpoint_digest([shard_digest(shard) for shard in shards])
            for rank, digests in enumerate(shards):
                rows = session.execute(
                    select(ChunkListEntry.ordinal, Chunk.digest, Copy)
                    .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
                    .join(Chunk, Chunk.id == ChunkListEntry.chunk_id)
                    .join(Copy, Copy.chunk_id == Chunk.id)
                    .where(
                        Shard.checkpoint_id == save.id,
                        Shard.rank == rank,
                        is_usable_by(context.store_id, checkpoint.attempt_id),
                    )
                ).all()
                assert dict(sorted({row.ordinal: row.digest for row in rows}.items())) == dict(enumerate(digests))
                for row in rows:
                    key = object_key(row.Copy.project_id, row.digest, row.Copy)
                    data = b"".join(context.store.open_read(key))
                    assert hashlib.sha256(data).hexdigest() == row.digest

    # Choosing.

    def uploading(self) -> list[SaveModel]:
        return [save for save in self.model.saves if save.state == "uploading"]

    def sealed_shards(self) -> Iterator[tuple[SaveModel, int]]:
        """Of the newest attempt, for an older one may not even ask."""
        for save in self.model.saves:
            if save.state != "aborted" and save.attempt == self.model.attempt.number:
                for rank, shard in enumerate(save.shards):
                    if shard.sealed is not None:
                        yield save, rank

    def draw_open_shard(self, data: strategies.DataObject) -> tuple[SaveModel, int]:
        shards = [
            (save, rank) for save in self.uploading() for rank, shard in enumerate(save.shards) if shard.sealed is None
        ]
        return data.draw(strategies.sampled_from(shards))

    def save_of(self, save: SaveModel) -> Save:
        return Save(self.jobs[save.attempt - 1], {"id": save.id})

    @staticmethod
    def complete(shard: ShardModel) -> bool:
        return bool(shard.negotiated) and set(shard.negotiated) <= shard.ready


_ahead = [timedelta()]


@contextmanager
def movable_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = holdfast_service.db.dialect._read_clock
    _ahead[0] = timedelta()
    monkeypatch.setattr(holdfast_service.db.dialect, "_read_clock", lambda *read: real(*read) + _ahead[0])
    yield


@pytest.mark.timeout(1800)
def test_every_committed_checkpoint_is_fully_readable_whatever_happens(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with movable_clock(monkeypatch):
        # As at a service's start: what was before the first round of all is no downtime.
        holdfast_service.liveness.abandoned_uploads.reconcile(service.context)
        run_state_machine_as_test(lambda: CommitMachine(service), settings=PROFILE)
