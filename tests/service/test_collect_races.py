"""The collector against everybody else, each interleaving of protocol rules 5, 15, 17, 21, 24, 25 and 28, and its death
between every two steps. On both databases; what a test holds open is a transaction that has not ended.

What is here beside test_protocol_collect.py needs a gate in another verb, a second store, or a crash.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sqlalchemy import event, func, select, update

import holdfast_service.collect.delete
import holdfast_service.collect.look
import holdfast_service.collect.mark
import holdfast_service.collect.references
import holdfast_service.collect.tick
import holdfast_service.commit.seal
import holdfast_service.retention.purge
import holdfast_service.retention.undelete
from holdfast_protocol.states import StoreRole
from holdfast_service.catalog.audit import Actor
from holdfast_service.catalog.copies import object_key
from holdfast_service.catalog.copying import begin_copy, copy_now
from holdfast_service.catalog.custody_tables import CollectCandidate
from holdfast_service.catalog.reread import Finding, claim, read_back, settle
from holdfast_service.catalog.tables import Checkpoint, Chunk, ChunkList, ChunkListEntry, Copy, ShardChunk
from holdfast_service.clock import database_now
from holdfast_service.collect.tick import CollectReport, backlog, collect, tick
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import ObjectMissing, StoreRefused, StoreUnavailable
from tests.service.conftest import Clock
from tests.support.damage import flip
from tests.support.interleave import hold_after, hold_before, in_background, until_blocked_or_done
from tests.support.rank import Job, Save, digest_of
from tests.support.service import RunningService

SCRUB = Actor.controller("scrub")


@pytest.fixture
def settings(settings: ServiceSettings, tmp_path: Path) -> ServiceSettings:
    return settings.model_copy(update={"second_store": f"posix://{tmp_path / 'second'}"})


@pytest.fixture
def job(service: RunningService) -> Job:
    return Job(service.http())


def wait_out(service: RunningService, clock: Clock) -> None:
    clock.advance(service.context.settings.ticket_seconds + service.context.settings.longest_upload_seconds + 1)


def given_up(job: Job, data: bytes) -> Save:
    save = job.begin(999)
    save.upload(0, [data])
    save.abort()
    return save


def copies_of(service: RunningService, data: bytes) -> list[Copy]:
    with service.context.database.read() as session:
        statement = select(Copy).where(Copy.stored_digest == digest_of(data)).order_by(Copy.id)
        return list(session.scalars(statement))


def states(service: RunningService, data: bytes) -> list[str]:
    return [copy.state for copy in copies_of(service, data)]


def bytes_of(service: RunningService, copy: Copy) -> bytes | None:
    """What its store has under its key."""
    store = service.context.store_of(copy.store_id)
    assert store is not None
    try:
        return b"".join(store.open_read(object_key(copy.project_id, copy.stored_digest, copy)))
    except ObjectMissing:
        return None


class TestAgainstSealAndCommit:
    @pytest.mark.rule("protocol-24")
    def test_a_seal_that_is_just_turning_references_into_a_list_keeps_its_chunks(
        self, job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save = job.begin(1)
        save.upload(0, [b"weights", b"index"])
        wait_out(service, clock)
        # The references are gone and the list is there, in a transaction that has not ended.
        gate = hold_before(monkeypatch, holdfast_service.commit.seal, "complete_if_whole")
        with in_background(gate) as threads:
            sealing = threads.submit(save.seal, 0, [b"weights", b"index"])
            gate.wait_until_reached()
            collecting = threads.submit(collect, service.context, whole=True)
            until_blocked_or_done(service, collecting)
            gate.open()
            assert sealing.result()["state"] == "committed"
            assert collecting.result().done == 0
        assert [bytes_of(service, copy) for copy in copies_of(service, b"weights")] == [b"weights"]

    @pytest.mark.rule("protocol-24")
    def test_a_commit_that_comes_between_the_lock_and_the_question_is_seen(
        self, job: Job, service: RunningService, clock: Clock
    ) -> None:
        if not service.context.database.is_postgres:
            return  # one writer at a time: nobody can come in between
        job.save(1, content=b"weights")
        save = job.begin(2)
        save.upload(0, [b"weights", b"index weights"])
        wait_out(service, clock)
        collect(service.context, whole=True)
        with service.context.database.transaction() as session:
            # Only the references of the upload keep them; the list is there, so the seal locks no chunk.
            over = {"state": "deleted", "forgotten_at": database_now(session)}
            session.execute(update(Checkpoint).where(Checkpoint.step == 1).values(over))
            for chunk_id in session.scalars(select(Chunk.id)).all():
                session.add(CollectCandidate(chunk_id=chunk_id, due_at=database_now(session)))
        done: list[Any] = []

        def seal(_connection: Any, _cursor: Any, text: str, *_: Any) -> None:
            # The chunks are locked; now their copies are to be.
            if not done and text.startswith("SELECT copies.id") and text.rstrip().endswith("FOR UPDATE"):
                done.append(None)
                done.append(save.seal(0, [b"weights", b"index weights"])["state"])

        engine = service.context.database.engine
        event.listen(engine, "before_cursor_execute", seal)
        try:
            assert tick(service.context).done == 0
        finally:
            event.remove(engine, "before_cursor_execute", seal)
        assert done[1:] == ["committed"]
        assert states(service, b"weights") == ["verified"]


class TestAgainstReportAndHeal:
    def two_copies(self, service: RunningService, clock: Clock) -> tuple[Copy, Copy]:
        save = Job(service.http(), world_size=2).begin(1)
        replies = [save.negotiate(rank, [b"shared"]) for rank in (0, 1)]
        for rank, reply in enumerate(replies):
            save.send([b"shared"], reply["chunks"])
            save.seal(rank, [b"shared"])
        wait_out(service, clock)
        first, second = copies_of(service, b"shared")
        return first, second

    @pytest.mark.rule("protocol-24")
    def test_while_one_copy_is_read_again_the_others_stay(self, service: RunningService, clock: Clock) -> None:
        first, second = self.two_copies(service, clock)
        context = service.context
        flip(context.store.object_path(object_key(first.project_id, first.stored_digest, first)))
        with context.database.transaction() as session:
            copy, chunk = session.get_one(Copy, first.id), session.get_one(Chunk, first.chunk_id)
            until = database_now(session) + timedelta(seconds=60)
            claimed = claim(session, chunk, copy, until, suspect=False)
        # By the catalog the first one still serves everybody.
        assert collect(context, whole=True).done == 0
        assert settle(context, claimed, read_back(context, claimed), actor=SCRUB) == []
        assert states(service, b"shared") == ["bad", "verified"]
        assert bytes_of(service, second) == b"shared"

    @pytest.mark.rule("protocol-24")
    def test_a_report_that_claims_a_copy_between_the_lock_and_the_question_is_seen(
        self, service: RunningService, clock: Clock
    ) -> None:
        first, second = self.two_copies(service, clock)
        context = service.context
        with context.database.transaction() as session:
            session.add(CollectCandidate(chunk_id=first.chunk_id, due_at=database_now(session)))
        claimed: list[Any] = []

        def report(_connection: Any, _cursor: Any, text: str, *_: Any) -> None:
            if not claimed and text.startswith("SELECT copies.id") and text.rstrip().endswith("FOR UPDATE"):
                claimed.append(None)
                with context.database.transaction() as session:
                    copy = session.execute(select(Copy).where(Copy.id == first.id).with_for_update()).scalar_one()
                    until = database_now(session) + timedelta(seconds=60)
                    chunk = session.get_one(Chunk, first.chunk_id)
                    claimed.append(claim(session, chunk, copy, until, suspect=False))

        if not context.database.is_postgres:
            return  # one writer at a time: nobody can come in between
        event.listen(context.database.engine, "before_cursor_execute", report)
        try:
            assert tick(context).done == 0
        finally:
            event.remove(context.database.engine, "before_cursor_execute", report)
        assert len(claimed) == 2
        assert settle(context, claimed[1], Finding.WRONG_BYTES, actor=SCRUB) == []
        assert states(service, b"shared") == ["bad", "verified"]
        assert bytes_of(service, second) == b"shared"

    @pytest.mark.rule("protocol-22")
    def test_what_was_found_bad_goes_only_beside_a_copy_that_was_read_since(
        self, service: RunningService, clock: Clock
    ) -> None:
        first, second = self.two_copies(service, clock)
        context = service.context
        with context.database.transaction() as session:
            now = database_now(session)
            session.execute(update(Copy).where(Copy.id == first.id).values(state="bad", bad_at=now, healed_at=now))
        assert collect(context, whole=True).done == 0
        with context.database.transaction() as session:
            session.execute(
                update(Copy)
                .where(Copy.id == second.id)
                .values(proof="read", verified_at=database_now(session) + timedelta(seconds=1))
            )
        assert collect(context, whole=True).done == 1
        assert states(service, b"shared") == ["verified"]
        assert bytes_of(service, second) == b"shared"


class TestAgainstTheTrash:
    def in_the_trash(self, job: Job, service: RunningService, clock: Clock) -> str:
        for step in (1, 2, 3):
            job.save(step, content=b"weights %d" % step)
        checkpoint_id = str(service.http().get("/v1/projects/demo/runs/gpt/checkpoints/1").json()["id"])
        reply = service.http().post("/v1/projects/demo/runs/gpt/prune", json={"checkpoint_ids": [checkpoint_id]})
        assert reply.json()["trashed"], reply.text
        wait_out(service, clock)
        return checkpoint_id

    def purge(self, service: RunningService) -> None:
        holdfast_service.retention.purge.tick(service.context)

    @pytest.mark.rule("protocol-26")
    def test_an_undelete_in_flight_has_its_chunks(
        self, job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoint_id = self.in_the_trash(job, service, clock)
        gate = hold_after(monkeypatch, holdfast_service.retention.undelete, "_take_back")
        with in_background(gate) as threads:
            undeleting = threads.submit(
                service.http().post, f"/v1/checkpoints/{checkpoint_id}/undelete", json={"pin": False}
            )
            gate.wait_until_reached()
            collecting = threads.submit(collect, service.context, whole=True)
            until_blocked_or_done(service, collecting)
            gate.open()
            assert undeleting.result().json()["state"] == "committed"
            assert collecting.result().done == 0
        assert [bytes_of(service, copy) for copy in copies_of(service, b"weights 1")] == [b"weights 1"]

    @pytest.mark.rule("protocol-30")
    def test_chunks_wait_until_the_record_is_gone_from_every_store(
        self, job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoint_id = self.in_the_trash(job, service, clock)
        context = service.context
        with context.database.transaction() as session:
            session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(state="deleting"))
        assert collect(context, whole=True).done == 0
        assert states(service, b"weights 1") == ["verified"]
        with context.database.transaction() as session:
            session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(state="deleted"))
        assert tick(context).done == 2
        assert states(service, b"weights 1") == []

    @pytest.mark.rule("protocol-29")
    def test_what_is_held_keeps_its_chunks_whatever_state_it_was_given(
        self, job: Job, service: RunningService, clock: Clock
    ) -> None:
        job.save(1, content=b"evidence")
        checkpoint_id = str(service.http().get("/v1/projects/demo/runs/gpt/checkpoints/1").json()["id"])
        placed = service.http().post(f"/v1/checkpoints/{checkpoint_id}/holds", json={"reason": "the audit"})
        assert placed.is_success, placed.text
        wait_out(service, clock)
        with service.context.database.transaction() as session:
            session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(state="deleted"))
        assert collect(service.context, whole=True).done == 0
        assert [bytes_of(service, copy) for copy in copies_of(service, b"evidence")] == [b"evidence"]


@pytest.mark.rule("protocol-24")
def test_two_collectors_at_once_share_the_work_and_do_nothing_twice(
    job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for data in (b"one", b"two", b"three"):
        given_up(job, data)
    wait_out(service, clock)
    gate = hold_after(monkeypatch, holdfast_service.collect.mark, "_claim")
    with in_background(gate) as threads:
        first = threads.submit(tick, service.context)
        gate.wait_until_reached()
        second = threads.submit(tick, service.context)
        until_blocked_or_done(service, second)
        gate.open()
        reports = [first.result(), second.result()]
    assert sum(report.done for report in reports) == 3
    assert sum(report.deleted_bytes for report in reports) == 11
    tick(service.context)
    with service.context.database.read() as session:
        for table in (Copy, Chunk, CollectCandidate):
            assert session.scalar(select(func.count()).select_from(table)) == 0


class TestSecondStore:
    def copied(self, service: RunningService, data: bytes) -> None:
        context = service.context
        second = context.attached(StoreRole.SECOND)
        (copy,) = copies_of(service, data)
        task = context.database.run(lambda session: begin_copy(session, context, copy.chunk_id, second.store_id))
        assert task is not None
        assert copy_now(context, task)

    @pytest.mark.rule("protocol-28")
    def test_a_copy_that_another_is_being_made_from_stays_until_that_is_done(
        self, job: Job, service: RunningService, clock: Clock
    ) -> None:
        given_up(job, b"source")
        wait_out(service, clock)
        context = service.context
        second = context.attached(StoreRole.SECOND)
        assert second is not None
        (copy,) = copies_of(service, b"source")
        task = context.database.run(lambda session: begin_copy(session, context, copy.chunk_id, second.store_id))
        assert task is not None
        assert tick(context).done == 0  # the row is there, and its bytes are on the way
        assert copy_now(context, task)
        assert states(service, b"source") == ["verified", "verified"]
        clock.advance(context.settings.chunk_lease_seconds)
        wait_out(service, clock)
        assert collect(context, whole=True).done == 2
        assert list(second.store.list_objects(copy.project_id)) == []

    @pytest.mark.rule("protocol-25")
    def test_what_a_dead_worker_was_copying_goes_when_its_put_can_no_longer_land(
        self, job: Job, service: RunningService, clock: Clock
    ) -> None:
        job.save(1, content=b"weights")
        context = service.context
        second = context.attached(StoreRole.SECOND)
        (copy,) = copies_of(service, b"weights")
        task = context.database.run(lambda session: begin_copy(session, context, copy.chunk_id, second.store_id))
        assert task is not None
        lease = context.settings.chunk_lease_seconds
        clock.advance(lease + context.settings.longest_upload_seconds - 5)
        assert collect(context, whole=True).done == 0
        second.store.put_bytes(task.target_key, b"weights")  # it was begun in time, and lands now
        clock.advance(10)
        assert collect(context, whole=True).done == 1
        assert states(service, b"weights") == ["verified"]
        assert list(second.store.list_objects(copy.project_id)) == []

    @pytest.mark.rule("protocol-28")
    def test_an_outage_of_one_store_leaves_the_other_ones_copies_to_go(
        self, job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given_up(job, b"both")
        self.copied(service, b"both")
        clock.advance(service.context.settings.chunk_lease_seconds)
        wait_out(service, clock)
        second = service.context.attached(StoreRole.SECOND)
        assert second is not None

        def away(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable("no answer")

        with monkeypatch.context() as broken:
            broken.setattr(second.store, "delete", away)
            report = tick(service.context)
        assert (report.done, report.failed, report.error) == (1, 1, "no answer")
        assert states(service, b"both") == ["gone", "deleting"] or states(service, b"both") == ["deleting"]
        clock.advance(3600)
        assert tick(service.context).done == 1
        assert states(service, b"both") == []

    @pytest.mark.rule("protocol-5")
    def test_a_foreign_second_store_is_left_alone_and_the_first_is_not(
        self, job: Job, service: RunningService, clock: Clock
    ) -> None:
        given_up(job, b"both")
        self.copied(service, b"both")
        clock.advance(service.context.settings.chunk_lease_seconds)
        wait_out(service, clock)
        second = service.context.attached(StoreRole.SECOND)
        assert second is not None
        second.store.write_named("holdfast-store.json", b"{}")
        report = tick(service.context)
        assert report.done == 1
        assert len(report.skipped_stores) == 1
        assert "second store" in report.skipped_stores[0]
        states_now = {copy.store_id: copy.state for copy in copies_of(service, b"both")}
        assert states_now[second.store_id] == "verified"


class TestLocked:
    @pytest.mark.rule("protocol-29")
    def test_what_the_store_may_hold_is_not_marked(self, job: Job, service: RunningService, clock: Clock) -> None:
        given_up(job, b"locked")
        wait_out(service, clock)
        with service.context.database.transaction() as session:
            session.execute(update(Copy).values(lock="locked"))
        assert tick(service.context).done == 0
        assert states(service, b"locked") == ["verified"]
        with service.context.database.read() as session:
            assert backlog(session, service.context).due == 0  # put off, and looked at again
        clock.advance(61)
        with service.context.database.transaction() as session:
            assert backlog(session, service.context).due == 1
            session.execute(update(Copy).values(lock=None))
        assert tick(service.context).done == 1

    def test_what_the_store_refuses_to_delete_is_told_kept_and_tried_later(
        self, job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given_up(job, b"locked")
        wait_out(service, clock)

        def refuses(*_: Any, **__: Any) -> Any:
            raise StoreRefused("AccessDenied, a lock holds it")

        with monkeypatch.context() as broken:
            broken.setattr(service.context.store, "delete", refuses)
            report = tick(service.context)
            assert (report.done, report.failed) == (0, 1)
            assert "a lock holds it" in str(report.error)
            assert tick(service.context) == CollectReport()
        clock.advance(1801)
        assert tick(service.context).done == 0
        clock.advance(1801)
        assert tick(service.context).done == 1


class _Died(BaseException):
    """The process ends here."""


class TestDeathBetweenTwoSteps:
    """A checkpoint is purged, its chunks go; the process dies after each step in turn, and another ends the work."""

    STEPS: ClassVar = {
        "references were dropped, their lists are still there": (
            holdfast_service.collect.references,
            "drop_unused_lists",
        ),
        "lists were dropped, nothing is marked yet": (holdfast_service.collect.tick, "mark"),
        "copies are marked, no bytes were deleted": (holdfast_service.collect.tick, "delete_marked"),
        "bytes are deleted, nothing is settled": (holdfast_service.collect.delete, "_settle"),
        "a part of the bytes is deleted": (holdfast_service.collect.delete, "_delete"),
    }

    @pytest.mark.rule("protocol-24")
    @pytest.mark.parametrize("step", list(STEPS))
    def test_another_one_goes_on(
        self, job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        job.save(1, content=b"old")
        job.save(2, content=b"new")
        wait_out(service, clock)
        context = service.context
        with context.database.transaction() as session:
            session.execute(update(Checkpoint).where(Checkpoint.step == 1).values(state="deleted"))
        module, name = self.STEPS[step]
        real = getattr(module, name)
        calls: list[None] = []

        def dies(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            if name == "_delete" and len(calls) == 1:
                return real(*args, **kwargs)
            raise _Died

        with monkeypatch.context() as broken:
            broken.setattr(module, name, dies)
            with pytest.raises(_Died):
                tick(context)
        clock.advance(context.settings.lease_seconds + 61)
        collect(context, whole=True)
        assert states(service, b"old") == []
        assert [bytes_of(service, copy) for copy in copies_of(service, b"new")] == [b"new"]
        with context.database.read() as session:
            project_id = session.execute(select(Chunk.project_id).limit(1)).scalar_one()
            counts = [
                session.scalar(select(func.count()).select_from(table))
                for table in (Copy, Chunk, ChunkList, ChunkListEntry, ShardChunk, CollectCandidate)
            ]
        assert counts == [2, 2, 1, 2, 0, 0]
        stored = {each.key.digest for each in context.store.list_objects(project_id)}
        assert stored == {hashlib.sha256(data).hexdigest() for data in (b"new", b"index new")}
        assert tick(context).idle


class TestCheapRounds:
    """What changed is looked at; everything only now and then."""

    def test_a_quiet_round_reads_no_table_of_copies_or_chunks_whole(
        self, job: Job, service: RunningService, clock: Clock
    ) -> None:
        job.save(1, content=b"weights")
        wait_out(service, clock)
        tick(service.context)
        tick(service.context)  # the first full look is over
        seen: list[str] = []

        def listen(_connection: Any, _cursor: Any, text: str, *_: Any) -> None:
            seen.append(text)

        event.listen(service.context.database.engine, "before_cursor_execute", listen)
        try:
            assert tick(service.context).idle
        finally:
            event.remove(service.context.database.engine, "before_cursor_execute", listen)
        unbounded = [text for text in seen if "copies" in text and "copies.state" not in text]
        assert not unbounded

    def test_what_nobody_left_as_a_candidate_is_found_by_the_full_look(
        self, job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(holdfast_service.collect.look, "ROWS", 1)
        given_up(job, b"forgotten")
        job.save(1, content=b"weights")
        wait_out(service, clock)
        context = service.context
        for _ in range(5):
            tick(context)
        job.save(2, content=b"weights 2")
        with context.database.transaction() as session:  # as an older version, or a crash, would leave it
            session.execute(update(Checkpoint).where(Checkpoint.step == 2).values(state="deleted"))
            session.execute(update(Checkpoint).values(forgotten_at=database_now(session)))
        wait_out(service, clock)
        assert sum(tick(context).done for _ in range(8)) == 0
        clock.advance(context.settings.collect_full_look_seconds + 1)
        assert sum(tick(context).done for _ in range(8)) == 2
        assert [bytes_of(service, copy) for copy in copies_of(service, b"weights")] == [b"weights"]

    def test_a_candidate_that_is_needed_again_is_none_any_more(
        self, job: Job, service: RunningService, clock: Clock
    ) -> None:
        given_up(job, b"shared")
        save = job.begin(1)
        save.write(0, [b"shared"])
        wait_out(service, clock)
        assert tick(service.context).done == 0
        with service.context.database.read() as session:
            assert session.scalar(select(func.count()).select_from(CollectCandidate)) == 0
