"""Collecting what nothing refers to: protocol rules 5, 24 and 25, on both databases."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event, func, select, update

import holdfast_service.collect.mark
import holdfast_service.uploads.reserve
from holdfast_service.catalog.copies import object_key
from holdfast_service.catalog.store_row import Marker, write_marker
from holdfast_service.catalog.tables import Checkpoint, Chunk, ChunkList, Copy, Project, ShardChunk
from holdfast_service.collect.tick import CollectReport, collect, tick
from holdfast_service.stores.base import ObjectMissing, StoreUnavailable
from tests.service.conftest import Clock
from tests.support.interleave import hold_after, in_background, until_blocked_or_done
from tests.support.rank import Job, Save, digest_of
from tests.support.service import RunningService


@pytest.fixture
def job(service: RunningService) -> Job:
    return Job(service.http())


def let_tickets_expire(service: RunningService, clock: Clock) -> None:
    clock.advance(service.context.settings.ticket_seconds + service.context.settings.longest_upload_seconds + 1)


def states(service: RunningService, data: bytes) -> list[str]:
    with service.context.database.read() as session:
        return list(session.scalars(select(Copy.state).where(Copy.stored_digest == digest_of(data)).order_by(Copy.id)))


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


def unused_chunk(job: Job, data: bytes) -> Save:
    """Uploaded and verified for a checkpoint that was then given up."""
    save = job.begin(999)
    save.upload(0, [data])
    save.abort()
    return save


def test_what_was_uploaded_for_nothing_goes_and_what_is_committed_stays(
    job: Job, service: RunningService, clock: Clock
) -> None:
    job.save(1, content=b"weights")
    unused_chunk(job, b"given up")
    let_tickets_expire(service, clock)
    assert tick(service.context) == CollectReport(done=1, deleted_bytes=8, forgotten_chunks=1)
    assert is_stored(service, b"weights")
    assert is_stored(service, b"index weights")
    assert not is_stored(service, b"given up")
    with service.context.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Chunk)) == 2
        assert session.scalar(select(func.count()).select_from(ShardChunk)) == 0
    assert tick(service.context) == CollectReport()


@pytest.mark.rule("protocol-26")
def test_what_is_in_the_trash_stays_and_what_is_deleted_goes(job: Job, service: RunningService, clock: Clock) -> None:
    view = job.save(1, content=b"weights")
    let_tickets_expire(service, clock)
    for state, stays in (("trashed", True), ("deleted", False)):
        with service.context.database.transaction() as session:
            session.execute(update(Checkpoint).where(Checkpoint.id == view["id"]).values(state=state))
        tick(service.context)
        assert is_stored(service, b"weights") is stays
    with service.context.database.read() as session:
        assert session.scalar(select(func.count()).select_from(ChunkList)) == 0


@pytest.mark.rule("protocol-24")
def test_a_sealed_shard_of_an_open_checkpoint_keeps_its_chunks(service: RunningService, clock: Clock) -> None:
    save = Job(service.http(), world_size=2).begin(1)
    save.write(0, [b"w0", b"i0"])
    save.upload(1, [b"w1", b"i1"])
    let_tickets_expire(service, clock)
    assert tick(service.context).done == 0
    assert save.seal(1, [b"w1", b"i1"])["state"] == "committed"


@pytest.mark.rule("protocol-24")
def test_a_writer_that_comes_while_a_copy_is_marked_is_told_to_send_it(
    job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused_chunk(job, b"wanted again")
    let_tickets_expire(service, clock)
    save = job.begin(1)
    save.negotiate(0)
    gate = hold_after(monkeypatch, holdfast_service.collect.mark, "_claim")
    with in_background(gate) as threads:
        collecting = threads.submit(tick, service.context)
        gate.wait_until_reached()  # marked in a transaction that has not ended
        writing = threads.submit(save.negotiate, 0, [b"wanted again"])
        until_blocked_or_done(service, writing)
        gate.open()
        (each,) = writing.result()["chunks"]
        collecting.result()
    assert each["status"] == "upload"
    assert save.write(0, [b"wanted again"])["state"] == "committed"
    assert is_stored(service, b"wanted again")


@pytest.mark.rule("protocol-24")
def test_a_chunk_that_a_writer_is_just_referring_to_is_left_alone(
    job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused_chunk(job, b"wanted again")
    let_tickets_expire(service, clock)
    save = job.begin(1)
    save.negotiate(0)
    gate = hold_after(monkeypatch, holdfast_service.uploads.reserve, "_refer")
    with in_background(gate) as threads:
        writing = threads.submit(save.negotiate, 0, [b"wanted again"])
        gate.wait_until_reached()  # the reference is inserted in a transaction that has not ended
        collecting = threads.submit(tick, service.context)
        until_blocked_or_done(service, collecting)
        gate.open()
        (each,) = writing.result()["chunks"]
        assert collecting.result().done == 0
    assert each["status"] == "present"
    assert save.seal(0, [b"wanted again"])["state"] == "committed"
    assert is_stored(service, b"wanted again")


@contextmanager
def just_before(service: RunningService, statement: str, act: Callable[[], object]) -> Iterator[list[str]]:
    """Runs `act` once, in the middle of another transaction: just before its first statement that matches."""
    seen: list[str] = []

    def listen(_connection: Any, _cursor: Any, text: str, *_: Any) -> None:
        if not seen and re.search(statement, text, re.DOTALL):
            seen.append(text)
            act()

    event.listen(service.context.database.engine, "before_cursor_execute", listen)
    try:
        yield seen
    finally:
        event.remove(service.context.database.engine, "before_cursor_execute", listen)


@pytest.mark.rule("protocol-24")
def test_a_reference_that_commits_between_looking_and_locking_is_seen(
    job: Job, service: RunningService, clock: Clock
) -> None:
    unused_chunk(job, b"wanted again")
    let_tickets_expire(service, clock)
    save = job.begin(1)
    save.negotiate(0)
    if not service.context.database.is_postgres:
        # One writer at a time: here nobody can come in between, and the writer before is seen.
        save.negotiate(0, [b"wanted again"])
        assert tick(service.context).done == 0
        return
    lock = r"SELECT chunks\.id.*FOR UPDATE SKIP LOCKED"
    with just_before(service, lock, lambda: save.negotiate(0, [b"wanted again"])) as seen:
        assert tick(service.context).done == 0
    assert seen
    assert save.seal(0, [b"wanted again"])["state"] == "committed"
    assert is_stored(service, b"wanted again")


@pytest.mark.rule("protocol-24")
def test_a_collector_that_dies_between_mark_and_delete_is_followed_by_another(
    job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused_chunk(job, b"given up")
    let_tickets_expire(service, clock)

    def away(*_: Any) -> None:
        raise StoreUnavailable("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(service.context.store, "delete", away)
        assert tick(service.context).done == 0
    assert states(service, b"given up") == ["deleting"]
    assert tick(service.context).done == 0  # another's lease is still good
    clock.advance(3600)
    assert tick(service.context).done == 1
    assert states(service, b"given up") == []


@pytest.mark.rule("protocol-24")
def test_deleting_hits_the_exact_copy_and_no_later_one(job: Job, service: RunningService, clock: Clock) -> None:
    unused_chunk(job, b"again and again")
    let_tickets_expire(service, clock)
    with service.context.database.transaction() as session:
        session.execute(update(Copy).values(state="deleting"))  # marked by one that then died
    job.save(1, content=b"again and again")
    assert tick(service.context).done == 1
    assert states(service, b"again and again") == ["verified"]
    assert is_stored(service, b"again and again")


def test_of_two_proven_copies_one_stays(service: RunningService, clock: Clock) -> None:
    save = Job(service.http(), world_size=2).begin(1)
    # Both are told to send it, for neither can rely on the other.
    replies = [save.negotiate(rank, [b"shared"]) for rank in (0, 1)]
    for rank, reply in enumerate(replies):
        save.send([b"shared"], reply["chunks"])
        save.seal(rank, [b"shared"])
    assert states(service, b"shared") == ["verified", "verified"]
    let_tickets_expire(service, clock)
    assert tick(service.context).done == 1
    assert states(service, b"shared") == ["verified"]
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
    let_tickets_expire(service, clock)
    assert collect(service.context, whole=True).done == 0  # each is all that its attempt can rely on
    with service.context.database.transaction() as session:
        newest = session.scalar(select(func.max(Copy.id)).where(Copy.stored_digest == digest_of(b"weights")))
        session.execute(update(Copy).where(Copy.id == newest).values(proof="read"))
    assert collect(service.context, whole=True).done == 1
    assert is_stored(service, b"weights")


@pytest.mark.rule("protocol-25")
def test_a_pending_copy_waits_out_its_ticket_and_the_longest_upload(
    job: Job, service: RunningService, clock: Clock
) -> None:
    save = job.begin(1)
    late = save.negotiate(0, [b"late"])["chunks"][0]["ticket"]
    save.abort()
    clock.advance(service.context.settings.ticket_seconds + service.context.settings.longest_upload_seconds - 5)
    assert tick(service.context).done == 0
    save.put(b"late", late)  # a PUT that began in time lands after the abort
    clock.advance(6)
    assert tick(service.context).done == 1
    listed = [each.key.digest for each in service.context.store.list_objects(project_id(service))]
    assert listed == []


def project_id(service: RunningService) -> str:
    with service.context.database.read() as session:
        return str(session.execute(select(Project.id)).scalar_one())


@pytest.mark.rule("protocol-25")
def test_a_fresh_ticket_counts_and_not_the_first(job: Job, service: RunningService, clock: Clock) -> None:
    settings = service.context.settings
    save = job.begin(1)
    save.negotiate(0, [b"slow"])
    clock.advance(settings.ticket_seconds - 1)
    save.negotiate(0, [b"slow"])
    save.abort()
    clock.advance(settings.longest_upload_seconds + 2)
    assert tick(service.context).done == 0
    clock.advance(settings.ticket_seconds)
    assert tick(service.context).done == 1


@pytest.mark.rule("protocol-5")
@pytest.mark.parametrize("whose", ["another catalog", "another epoch", "nobody"])
def test_nothing_is_deleted_unless_the_store_says_that_it_is_ours(
    job: Job, service: RunningService, clock: Clock, whose: str
) -> None:
    unused_chunk(job, b"given up")
    let_tickets_expire(service, clock)
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
    report = tick(context)
    assert report.done == 0
    assert len(report.skipped_stores) == 1
    assert is_stored(service, b"given up")
    write_marker(context.store, ours)
    assert tick(context).done == 1
