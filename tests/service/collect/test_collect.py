"""Collecting what nothing refers to: rules fencing-token, mark-before-delete and late-put-window, on both databases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import func, select, update

import holdfast_service.collect.mark_and_delete
import holdfast_service.training.negotiate
from holdfast_service.attached_stores.ownership import Marker, write_marker
from holdfast_service.collect.controller import CollectReport, collect, reconcile
from holdfast_service.copies.predicates import object_key
from holdfast_service.db.tables.core import Checkpoint, Chunk, ChunkList, Copy, ShardChunk
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import ObjectMissing, StoreUnavailable
from tests.service.conftest import Clock
from tests.support.garbage import given_up, listed
from tests.support.interleave import hold_after, just_before, overlap
from tests.support.rank import Job, digest_of
from tests.support.rot import states_of
from tests.support.service import RunningService


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    """One store: where it is not allowed to, a pass does nothing at all."""
    return settings.model_copy(update={"second_store": None})


def is_stored(service: RunningService, data: bytes) -> bool:
    """Whether every live copy of it can be read whole."""
    with service.context.database.read() as session:
        copies = session.scalars(
            select(Copy).where(Copy.stored_digest == digest_of(data), Copy.state == "verified")
        ).all()
    for copy in copies:
        key = object_key(copy.project_id, copy.stored_digest, copy)
        assert b"".join(service.context.store.open_read(key)) == data
    return bool(copies)


def test_what_was_uploaded_for_nothing_goes_and_what_is_committed_stays(
    job: Job, service: RunningService, clock: Clock
) -> None:
    job.save(1, content=b"weights")
    given_up(job, b"given up")
    clock.let_tickets_expire(service.context.settings)
    assert reconcile(service.context) == CollectReport(done=1, deleted_bytes=8, forgotten_chunks=1)
    assert is_stored(service, b"weights")
    assert is_stored(service, b"index weights")
    assert not is_stored(service, b"given up")
    with service.context.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Chunk)) == 2
        assert session.scalar(select(func.count()).select_from(ShardChunk)) == 0
    assert reconcile(service.context) == CollectReport()


@pytest.mark.rule("trash-first")
def test_what_is_in_the_trash_stays_and_what_is_deleted_goes(job: Job, service: RunningService, clock: Clock) -> None:
    view = job.save(1, content=b"weights")
    clock.let_tickets_expire(service.context.settings)
    for state, stays in (("trashed", True), ("deleted", False)):
        with service.context.database.transaction() as session:
            session.execute(update(Checkpoint).where(Checkpoint.id == view["id"]).values(state=state))
        reconcile(service.context)
        assert is_stored(service, b"weights") is stays
    with service.context.database.read() as session:
        assert session.scalar(select(func.count()).select_from(ChunkList)) == 0


@pytest.mark.rule("mark-before-delete")
def test_a_sealed_shard_of_an_open_checkpoint_keeps_its_chunks(service: RunningService, clock: Clock) -> None:
    save = Job(service.http(), world_size=2).begin(1)
    save.write(0, [b"w0", b"i0"])
    save.upload(1, [b"w1", b"i1"])
    clock.let_tickets_expire(service.context.settings)
    assert reconcile(service.context).done == 0
    assert save.seal(1, [b"w1", b"i1"])["state"] == "committed"


@pytest.mark.rule("mark-before-delete")
def test_a_writer_that_comes_while_a_copy_is_marked_is_told_to_send_it(
    job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up(job, b"wanted again")
    clock.let_tickets_expire(service.context.settings)
    save = job.begin(1)
    save.negotiate(0)
    gate = hold_after(monkeypatch, holdfast_service.collect.mark_and_delete, "_claim")
    # The copy is marked in a transaction that has not ended.
    _, writing = overlap(
        service, gate, lambda: reconcile(service.context), lambda: save.negotiate(0, [b"wanted again"])
    )
    (each,) = writing.result()["chunks"]
    assert each["status"] == "upload"
    assert save.write(0, [b"wanted again"])["state"] == "committed"
    assert is_stored(service, b"wanted again")


@pytest.mark.rule("mark-before-delete")
def test_a_chunk_that_a_writer_is_just_referring_to_is_left_alone(
    job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up(job, b"wanted again")
    clock.let_tickets_expire(service.context.settings)
    save = job.begin(1)
    save.negotiate(0)
    gate = hold_after(monkeypatch, holdfast_service.training.negotiate, "_refer")
    # The reference is inserted in a transaction that has not ended.
    writing, collecting = overlap(
        service, gate, lambda: save.negotiate(0, [b"wanted again"]), lambda: reconcile(service.context)
    )
    (each,) = writing.result()["chunks"]
    assert collecting.result().done == 0
    assert each["status"] == "present"
    assert save.seal(0, [b"wanted again"])["state"] == "committed"
    assert is_stored(service, b"wanted again")


@pytest.mark.races
@pytest.mark.rule("mark-before-delete")
def test_a_reference_that_commits_between_looking_and_locking_is_seen(
    job: Job, service: RunningService, clock: Clock
) -> None:
    given_up(job, b"wanted again")
    clock.let_tickets_expire(service.context.settings)
    save = job.begin(1)
    save.negotiate(0)
    if not service.context.database.is_postgres:
        # One writer at a time: here nobody can come in between, and the writer before is seen.
        save.negotiate(0, [b"wanted again"])
        assert reconcile(service.context).done == 0
        return
    lock = r"SELECT chunks\.id.*FOR UPDATE SKIP LOCKED"
    with just_before(service, lock, lambda: save.negotiate(0, [b"wanted again"])) as seen:
        assert reconcile(service.context).done == 0
    assert seen
    assert save.seal(0, [b"wanted again"])["state"] == "committed"
    assert is_stored(service, b"wanted again")


@pytest.mark.rule("mark-before-delete")
def test_a_collector_that_dies_between_mark_and_delete_is_followed_by_another(
    job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up(job, b"given up")
    clock.let_tickets_expire(service.context.settings)

    def unavailable(*_: Any) -> None:
        raise StoreUnavailable("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(service.context.store, "delete", unavailable)
        assert reconcile(service.context).done == 0
    assert states_of(service, b"given up", None) == ["deleting"]
    assert reconcile(service.context).done == 0  # another's lease is still good
    clock.advance(3600)
    assert reconcile(service.context).done == 1
    assert states_of(service, b"given up", None) == []


@pytest.mark.rule("mark-before-delete")
def test_deleting_hits_the_exact_copy_and_no_later_one(job: Job, service: RunningService, clock: Clock) -> None:
    given_up(job, b"again and again")
    clock.let_tickets_expire(service.context.settings)
    with service.context.database.transaction() as session:
        session.execute(update(Copy).values(state="deleting"))  # marked by one that then died
    job.save(1, content=b"again and again")
    assert reconcile(service.context).done == 1
    assert states_of(service, b"again and again", None) == ["verified"]
    assert is_stored(service, b"again and again")


def test_of_two_proven_copies_one_stays(service: RunningService, clock: Clock) -> None:
    save = Job(service.http(), world_size=2).begin(1)
    # Both are told to send it, for neither can rely on the other.
    replies = [save.negotiate(rank, [b"shared"]) for rank in (0, 1)]
    for rank, reply in enumerate(replies):
        save.send([b"shared"], reply["chunks"])
        save.seal(rank, [b"shared"])
    assert states_of(service, b"shared", None) == ["verified", "verified"]
    clock.let_tickets_expire(service.context.settings)
    assert reconcile(service.context).done == 1
    assert states_of(service, b"shared", None) == ["verified"]
    assert is_stored(service, b"shared")


def test_an_unproven_copy_goes_only_beside_a_proven_one(service: RunningService, clock: Clock) -> None:
    first = Job(service.http())
    first.save(1, content=b"weights")
    with service.context.database.transaction() as session:
        session.execute(update(Copy).values(proof="unproven"))
    second = Job(service.http(), after=1)
    second.save(1, content=b"weights")
    with service.context.database.transaction() as session:
        session.execute(update(Copy).values(proof="unproven"))
    clock.let_tickets_expire(service.context.settings)
    assert collect(service.context, whole=True).done == 0  # each is all that its attempt can rely on
    with service.context.database.transaction() as session:
        newest = session.scalar(select(func.max(Copy.id)).where(Copy.stored_digest == digest_of(b"weights")))
        session.execute(update(Copy).where(Copy.id == newest).values(proof="read"))
    assert collect(service.context, whole=True).done == 1
    assert is_stored(service, b"weights")


@pytest.mark.rule("late-put-window")
def test_a_pending_copy_waits_out_its_ticket_and_the_longest_upload(
    job: Job, service: RunningService, project_id: str, clock: Clock
) -> None:
    save = job.begin(1)
    late = save.negotiate(0, [b"late"])["chunks"][0]["ticket"]
    save.abort()
    clock.advance(service.context.settings.ticket_seconds + service.context.settings.longest_upload_seconds - 60)
    assert reconcile(service.context).done == 0
    save.put(b"late", late)  # a PUT that began in time lands after the abort
    clock.advance(61)
    assert reconcile(service.context).done == 1
    assert not listed(service, project_id)


@pytest.mark.rule("late-put-window")
def test_a_fresh_ticket_counts_and_not_the_first(job: Job, service: RunningService, clock: Clock) -> None:
    settings = service.context.settings
    save = job.begin(1)
    save.negotiate(0, [b"slow"])
    clock.advance(settings.ticket_seconds - 60)
    save.negotiate(0, [b"slow"])
    save.abort()
    clock.advance(settings.longest_upload_seconds + 61)
    assert reconcile(service.context).done == 0
    clock.advance(settings.ticket_seconds)
    assert reconcile(service.context).done == 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("fencing-token")
@pytest.mark.parametrize("whose", ["another catalog", "another epoch", "nobody"])
def test_nothing_is_deleted_unless_the_store_says_that_it_is_ours(
    job: Job, service: RunningService, clock: Clock, whose: str
) -> None:
    given_up(job, b"given up")
    clock.let_tickets_expire(service.context.settings)
    context = service.context
    ours = Marker(context.catalog_id, context.epoch, context.store_id)
    if whose == "another catalog":
        write_marker(context.store, replace(ours, catalog_id="f" * 32))
    elif whose == "another epoch":
        write_marker(context.store, replace(ours, epoch=ours.epoch + 1))
    else:
        context.store.delete_named("holdfast-store.json")
        with pytest.raises(ObjectMissing):
            context.store.read_named("holdfast-store.json")
    report = reconcile(context)
    assert report.done == 0
    assert len(report.skipped_stores) == 1
    assert is_stored(service, b"given up")
    write_marker(context.store, ours)
    assert reconcile(context).done == 1
