"""The sweep: a store's listing against the catalog, both ways. Rules fencing-token and late-put-window, on both
databases."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

import holdfast_service.collect.orphans
import tests.support.s3_fake.server
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import StoreRole
from holdfast_protocol.stores import StoreSweep
from holdfast_service.attached_stores.ownership import Marker, write_marker
from holdfast_service.audit.record import Actor
from holdfast_service.collect import orphans as sweep_tick
from holdfast_service.collect.controller import reconcile as collect_tick
from holdfast_service.collect.orphans import sweep_store
from holdfast_service.copies.predicates import object_key
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Attempt, Checkpoint, Chunk, Copy
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.errors import ProblemError
from holdfast_service.scrub.verify import reconcile as prove_reconcile
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import ObjectKey, StoredObject, StoreUnavailable
from holdfast_service.stores.s3.s3_store import S3Store
from tests.service.conftest import Clock
from tests.support.garbage import age_it, listed, orphan
from tests.support.interleave import hold_before, in_background
from tests.support.rank import Job, digest_of
from tests.support.rot import attached, key_of, states_of
from tests.support.s3_fake.server import s3_fake
from tests.support.service import RunningService, running_service

ACTOR = Actor.controller("sweep")
INDEX = b"index weights"


@pytest.fixture
def job(job: Job) -> Job:
    job.save(1, content=b"weights")
    return job


def sweep(service: RunningService, role: StoreRole = StoreRole.PRIMARY, **how: Any) -> StoreSweep:
    how = {"dry_run": False, "force": False, "actor": ACTOR} | how
    return sweep_store(service.context, attached(service, role), **how)


@pytest.mark.rule("late-put-window")
def test_an_orphan_goes_when_every_urls_life_is_over_and_nothing_else_does(
    service: RunningService, project_id: str
) -> None:
    known = listed(service, project_id)
    old, young = orphan(service, project_id), orphan(service, project_id, old=False)
    settings = service.context.settings
    almost = orphan(service, project_id, old=False)
    age_it(service, almost, settings.ticket_seconds + settings.longest_upload_seconds - 60)
    looked = sweep(service, dry_run=True)
    assert (looked.orphans, looked.due_orphans, looked.deleted) == (3, 1, 0)
    assert listed(service, project_id) == known | {old, young, almost}
    swept = sweep(service)
    assert (swept.orphans, swept.deleted, swept.deleted_bytes, swept.stopped) == (3, 1, 50, None)
    assert listed(service, project_id) == known | {young, almost}
    assert sweep(service).deleted == 0


def test_a_sweep_that_is_cut_off_tells_what_it_has_deleted(
    service: RunningService, project_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphans = {orphan(service, project_id), orphan(service, project_id)}
    delete, calls = service.context.store.delete, itertools.count(1)

    def once(key: ObjectKey, version_id: str | None = None) -> None:
        if next(calls) > 1:
            raise StoreUnavailable("no answer")
        delete(key, version_id)

    with monkeypatch.context() as failing:
        failing.setattr(service.context.store, "delete", once)
        with pytest.raises(StoreUnavailable):
            sweep(service)
    assert len(listed(service, project_id) & orphans) == 1
    with service.context.database.read() as session:
        event = session.scalars(select(AuditEvent).where(AuditEvent.action == "store.sweep")).one()
    assert event.reason == "It ended before all of them were gone. no answer"
    assert event.after == {
        "store": "primary",
        "dry_run": False,
        "due_orphans": 2,
        "deleted": 1,
        "deleted_bytes": 50,
        "forced": False,
    }


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("late-put-window")
def test_the_age_of_an_object_is_told_by_the_clock_that_dated_it(
    service: RunningService, project_id: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan(service, project_id, old=False)
    clock.advance(10 * 86400)  # the catalog's clock, and its host's, say nothing about the store's
    assert sweep(service).due_orphans == 0
    later = service.context.store.clock() + timedelta(days=1)
    monkeypatch.setattr(service.context.store, "clock", lambda: later)
    assert sweep(service).deleted == 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("cut_off_at", [1, 2])
def test_an_orphan_whose_deletion_was_cut_off_in_a_versioned_bucket_is_still_found(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch, cut_off_at: int
) -> None:
    with s3_fake(versioned=True) as fake:
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        bucket = settings.model_copy(update={"store": fake.store_url_for("checkpoints")})
        with running_service(bucket) as service:
            store, project_id = service.context.store, service.make_project("demo")
            assert isinstance(store, S3Store)
            age = settings.ticket_seconds + settings.longest_upload_seconds + 5
            fake.advance(-age)
            key = orphan(service, project_id, old=False)
            store.write(store.location.key_of(key.path), b"by the same ticket", overwrite=True)
            fake.advance(age)
            real, deletes = store.calls.do, itertools.count(1)

            def cut_off(operation: str, **parameters: Any) -> dict[str, Any]:
                if "VersionId" in parameters and next(deletes) == cut_off_at:
                    raise StoreUnavailable("the process is killed")
                return real(operation, **parameters)

            monkeypatch.setattr(store.calls, "do", cut_off)
            with pytest.raises(StoreUnavailable, match="killed"):
                sweep(service)
            assert b"".join(store.open_read(key)) == b"by the same ticket"
            assert sweep(service).deleted == 1
            assert not fake.objects.versions("checkpoints/" + key.path)
            assert listed(service, project_id) == set()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_of_what_was_written_again_and_again_in_a_versioned_bucket_the_newest_goes_last(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More versions than a page of the listing has: the document of a process has one for each moment with a change."""
    monkeypatch.setattr(tests.support.s3_fake.server, "_PAGE", 4)
    with s3_fake(versioned=True) as fake:
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        bucket = settings.model_copy(update={"store": fake.store_url_for("checkpoints")})
        with running_service(bucket) as service:
            store = service.context.store
            assert isinstance(store, S3Store)
            for name in ("history/one.json", "history/one.json.other"):
                for number in range(10):
                    store.write_named(name, str(number).encode())
            real, seen = store.calls.do, list[bytes]()

            def looks_first(operation: str, **parameters: Any) -> dict[str, Any]:
                seen.append(store.read_named("history/one.json"))
                return real(operation, **parameters)

            monkeypatch.setattr(store.calls, "do", looks_first)
            store.delete_named("history/one.json")
            assert seen == [b"9"] * 10
            left = {key for key, _ in fake.objects.versions("checkpoints/history/one")}
            assert left == {"checkpoints/history/one.json.other"}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("late-put-window")
def test_a_listing_that_breaks_off_deletes_nothing_in_any_project(
    service: RunningService, project_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_id = service.make_project("other")
    first, last = sorted([project_id, other_id])
    keys = {orphan(service, project_id), orphan(service, other_id)}
    real = service.context.store.list_objects

    def breaks_off(of: str) -> Iterator[StoredObject]:
        yield from real(of)
        if of == last:
            raise StoreUnavailable("the second page does not come")

    assert first != last
    monkeypatch.setattr(service.context.store, "list_objects", breaks_off)
    with pytest.raises(StoreUnavailable):
        sweep(service)
    assert keys <= stored_everywhere(real, [project_id, other_id])
    report = sweep_tick.reconcile(service.context)
    assert report.failed == 1
    assert "the second page" in str(report.error)
    assert keys <= stored_everywhere(real, [project_id, other_id])


def stored_everywhere(listing: Callable[[str], Iterator[StoredObject]], projects: list[str]) -> set[ObjectKey]:
    return {each.key for project_id in projects for each in listing(project_id)}


@pytest.mark.rule("late-put-window")
def test_a_sweep_that_would_delete_more_than_its_share_deletes_nothing_unless_it_is_forced(
    service: RunningService, project_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdfast_service.collect.orphans, "_FLOOR_OBJECTS", 2)
    keys = {orphan(service, project_id) for _ in range(3)}
    assert "3 of 5 objects" in str(sweep_tick.reconcile(service.context).error)
    assert keys <= listed(service, project_id)
    assert sweep(service).deleted == 0
    assert sweep(service, force=True).deleted == 3
    assert not keys & listed(service, project_id)
    with service.context.database.read() as session:
        events = session.scalars(select(AuditEvent).where(AuditEvent.action == "store.sweep")).all()
    assert [(event.after["deleted"], event.after["forced"]) for event in events if event.after] == [
        (0, False),
        (0, False),
        (3, True),
    ]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_share_is_that_of_each_project_too(
    service: RunningService, project_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project whose rows were lost must not hide behind a large store."""
    monkeypatch.setattr(holdfast_service.collect.orphans, "_FLOOR_OBJECTS", 1)
    Job(service.http(), "big/run").begin(1).write(0, [bytes([number]) * 30 for number in range(40)])
    keys = {orphan(service, project_id) for _ in range(2)}
    swept = sweep(service)
    assert 2 < 0.05 * sum(one.objects for one in swept.projects)
    assert swept.deleted == 0
    assert "2 of 4 objects" in str(swept.stopped)
    assert "the project demo" in str(swept.stopped)
    assert keys <= listed(service, project_id)


@pytest.mark.rule("late-put-window")
def test_a_row_that_comes_between_listing_and_deleting_keeps_its_object(
    service: RunningService, project_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = orphan(service, project_id)
    gate = hold_before(monkeypatch, holdfast_service.collect.orphans, "_delete")
    with in_background(gate) as threads:
        sweeping = threads.submit(sweep, service)
        gate.wait_until_reached()
        insert_row(service, key)
        gate.open()
        swept = sweeping.result()
    assert (swept.due_orphans, swept.deleted, swept.kept) == (1, 0, 1)
    assert key in listed(service, project_id)


@pytest.mark.rule("late-put-window")
def test_the_catalog_is_asked_after_the_object_was_seen(
    service: RunningService, project_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in every upload: first the row, then the ticket, then the object; here all of it during the listing."""
    real = service.context.store.list_objects

    def uploads_meanwhile(of: str) -> Iterator[StoredObject]:
        yield from real(of)
        key = ObjectKey(project_id, digest_of(b"new"), uuid.uuid4().hex)
        insert_row(service, key)
        service.context.store.put_bytes(key, b"new")
        yield StoredObject(key, 3, service.context.store.clock() - timedelta(days=1))

    monkeypatch.setattr(service.context.store, "list_objects", uploads_meanwhile)
    assert sweep(service).orphans == 0


def insert_row(service: RunningService, key: ObjectKey) -> None:
    with service.context.database.transaction() as session:
        now = database_now(session)
        chunk = Chunk(project_id=key.project_id, digest=key.digest, bytes=50, created_at=now)
        session.add(chunk)
        session.flush()
        session.add(
            Copy(
                chunk_id=chunk.id,
                project_id=key.project_id,
                store_id=service.context.store_id,
                attempt_id=session.execute(select(Attempt.id).limit(1)).scalar_one(),
                generation=key.generation,
                state="pending",
                codec="raw",
                stored_digest=key.digest,
                stored_bytes=50,
                ticket_expires_at=now,
                created_at=now,
            )
        )


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("fencing-token")
@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_a_store_that_does_not_say_that_it_is_ours_is_not_swept(
    service: RunningService, project_id: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    key = orphan(service, project_id)
    context = service.context
    foreign = replace(Marker(context.catalog_id, context.epoch, context.store_id), epoch=context.epoch + 1)
    gate = hold_before(monkeypatch, holdfast_service.collect.orphans, "_delete")
    with in_background(gate) as threads:
        if when == "before":
            write_marker(context.store, foreign)
        sweeping = threads.submit(sweep, service)
        if when == "in the middle":
            gate.wait_until_reached()
            write_marker(context.store, foreign)
            gate.open()
        with pytest.raises(ProblemError) as refused:
            sweeping.result()
    assert refused.value.code is ProblemCode.STORE_FOREIGN
    assert key in listed(service, project_id)


@pytest.mark.rule("fencing-token")
def test_a_sweep_stops_where_jobs_of_another_database_save_into_the_store(
    service: RunningService, project_id: str
) -> None:
    """The catalog was moved to another database, and a worker of the old one runs on."""
    old, young = orphan(service, project_id), orphan(service, project_id, old=False)
    with service.context.database.transaction() as session:
        called_at = database_now(session) - timedelta(hours=3)
        session.execute(update(Attempt).values(opened_at=called_at, heartbeat_at=called_at))
    swept = sweep(service)
    assert (swept.due_orphans, swept.deleted) == (1, 0)
    assert "jobs of another database save into this store" in str(swept.stopped)
    assert {old, young} <= listed(service, project_id)
    Job(service.http(), "demo/gpt", after=1)
    assert (sweep(service).stopped, listed(service, project_id) & {old, young}) == (None, {young})


@pytest.mark.rule("fencing-token")
def test_an_object_that_a_clock_has_dated_in_the_future_stops_no_sweep(
    service: RunningService, project_id: str
) -> None:
    """A file has the date that its host gave it, and is too young to be deleted for all that time."""
    old, ahead = orphan(service, project_id), orphan(service, project_id, old=False)
    age_it(service, ahead, -365 * 86400)
    swept = sweep(service)
    assert (swept.orphans, swept.due_orphans, swept.deleted, swept.stopped) == (2, 1, 1, None)
    assert listed(service, project_id) & {old, ahead} == {ahead}


@pytest.mark.rule("report-is-suspicion")
def test_what_is_missing_is_handed_over_to_be_read_and_only_then_marked(
    job: Job, service: RunningService, project_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = service.context
    with context.database.read() as session:
        lost = session.execute(select(Copy).where(Copy.stored_digest == digest_of(b"weights"))).scalar_one()
        hidden = session.execute(select(Copy).where(Copy.stored_digest == digest_of(b"index weights"))).scalar_one()
    context.store.delete(object_key(project_id, digest_of(b"weights"), lost))
    real = context.store.list_objects
    # A listing may leave an object out, against its word: the store is asked about this very object.
    monkeypatch.setattr(
        context.store,
        "list_objects",
        lambda of: (each for each in real(of) if each.key.generation != hidden.generation),
    )
    assert [one.missing for one in sweep(service, dry_run=True).projects] == [1]
    assert copy_state(service, lost.id) == "verified"
    assert [one.missing for one in sweep(service).projects] == [1]
    assert (copy_state(service, lost.id), copy_state(service, hidden.id)) == ("suspect", "verified")
    prove_reconcile(context)
    assert copy_state(service, lost.id) == "bad"
    with context.database.read() as session:
        assert session.execute(select(Checkpoint.health)).scalar_one() == "corrupt"


@pytest.mark.rule("late-put-window")
def test_what_a_checkpoint_needs_and_no_store_has_a_good_copy_of_is_taken_back_and_not_swept(
    job: Job, service: RunningService, project_id: str
) -> None:
    """A database that was restored from a backup knows where a copy was, and not where it was moved since."""
    store, settings = service.context.store, service.context.settings
    moved, double = (ObjectKey(project_id, digest_of(data), uuid.uuid4().hex) for data in (b"weights", INDEX))
    for key, data in ((moved, b"weights"), (double, INDEX)):
        store.put_bytes(key, data)
        age_it(service, key, settings.ticket_seconds + settings.longest_upload_seconds + 5)
    store.delete(key_of(service, b"weights"))

    swept = sweep(service)
    assert (swept.due_orphans, swept.deleted, swept.kept) == (2, 1, 1), "what this sweep found missing is asked again"
    assert moved in listed(service, project_id)
    again = sweep(service, force=True)
    assert (again.orphans, again.due_orphans, again.deleted) == (1, 0, 0)
    assert moved in listed(service, project_id)
    assert states_of(service, b"weights") == ["suspect", "suspect"], "nothing relies on it before it was read"
    prove_reconcile(service.context)
    assert states_of(service, b"weights") == ["bad", "verified"]
    with service.context.database.read() as session:
        assert session.execute(select(Checkpoint.health)).scalar_one() == "ok"
        (event,) = session.scalars(select(AuditEvent).where(AuditEvent.action == "copy.take_back")).all()
    assert event.after == {"store": service.context.store_id, "copies": 1}
    assert sweep(service).orphans == 0


def copy_state(service: RunningService, copy_id: int) -> str:
    with service.context.database.read() as session:
        return str(session.execute(select(Copy.state).where(Copy.id == copy_id)).scalar_one())


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("row-before-copy")
def test_an_outage_of_the_second_store_blocks_only_it(
    service: RunningService, project_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = orphan(service, project_id)
    second = attached(service, StoreRole.SECOND)

    def unavailable(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(second.store, "read_named", unavailable)
    report = sweep_tick.reconcile(service.context)
    assert (report.done, report.failed, report.deleted) == (1, 1, 1)
    assert "second store" in str(report.error)
    assert key not in listed(service, project_id)
    collected = collect_tick(service.context)
    assert len(collected.skipped_stores) == 1
    assert "second store" in collected.skipped_stores[0]


def test_the_controller_sweeps_each_store_once_in_its_interval(
    service: RunningService, project_id: str, clock: Clock
) -> None:
    assert sweep_tick.reconcile(service.context).done == 2
    assert sweep_tick.reconcile(service.context).idle
    clock.advance(service.context.settings.sweep_interval_seconds + 1)
    assert sweep_tick.reconcile(service.context).done == 2


@pytest.mark.races
def test_of_two_sweeps_of_a_store_at_once_one_is_told_so_and_a_killed_ones_lease_ends(
    service: RunningService, project_id: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_before(monkeypatch, holdfast_service.collect.orphans, "_look")
    with in_background(gate) as threads:
        first = threads.submit(sweep, service)
        gate.wait_until_reached()
        with pytest.raises(ProblemError) as busy:
            sweep(service)
        assert busy.value.code is ProblemCode.BUSY
        assert sweep_tick.reconcile(service.context).done == 1  # the second store's
        clock.advance(service.context.settings.lease_seconds + 1)
        assert sweep(service).deleted == 0
        gate.open()
        # It went on for longer than its lease: it may end, for it deletes the same or nothing.
        assert first.exception() is None or isinstance(first.exception(), ProblemError)
