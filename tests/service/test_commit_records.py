"""Records beside the data: written from an outbox, however it is cut off, and removed before any chunk (rule
record-outbox)."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy import select, text, update

import holdfast_service.db.lease
import holdfast_service.records.controller
import holdfast_service.records.outbox
import holdfast_service.records.writing
import holdfast_service.retention.delete
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CheckpointState
from holdfast_service.collect.garbage import ready_stores
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import TO_RECORD, Checkpoint, Run
from holdfast_service.db.tables.records import RecordSubject, WrittenRecord
from holdfast_service.errors import ProblemError
from holdfast_service.records.documents import (
    FORMAT,
    FORMAT_VERSION,
    DamagedRecordError,
    ManifestRecord,
    checkpoint_subject,
    decode,
)
from holdfast_service.records.outbox import note_recorded, record_in_store
from holdfast_service.records.scanning import scan_records
from holdfast_service.records.writing import forget_removed, remove_record
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreUnavailable
from tests.service.conftest import Clock
from tests.support.databases import SqliteCatalogs
from tests.support.death import Killed
from tests.support.interleave import hold_after, hold_before, in_background, overlap
from tests.support.rank import Job, answer
from tests.support.rebuilt import rebuild_into, record_all
from tests.support.service import RunningService, running_service

pytestmark = pytest.mark.rule("record-outbox")
_LEASE_OVER_SECONDS = ServiceSettings().lease_seconds + 1


@contextmanager
def killed_at(service: RunningService, call: int) -> Iterator[None]:
    """Whatever the service changes in the store, the process dies instead of the call of this number."""
    store = service.context.store
    made = 0

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any) -> Any:
            nonlocal made
            made += 1
            if made == call:
                raise Killed
            return real(*arguments)

        return change

    with pytest.MonkeyPatch.context() as patched:
        for name in ("write_named", "delete_named"):
            patched.setattr(store, name, guarded(getattr(store, name)))
        with pytest.raises(Killed):
            yield


def label(service: RunningService, checkpoint_id: str, *labels: str) -> None:
    reply = service.http().patch(
        f"/v1/checkpoints/{checkpoint_id}", json={"labels": list(labels)}, headers={"If-Match": "*"}
    )
    reply.raise_for_status()


def going(service: RunningService, checkpoint_id: str, state: CheckpointState) -> str:
    """As a purge leaves it; the project's id."""
    with service.context.database.transaction() as session:
        session.execute(
            update(Checkpoint)
            .where(Checkpoint.id == checkpoint_id)
            .values(state=state, version=Checkpoint.version + 1, deleted_at=database_now(session))
        )
        return session.execute(select(Run.project_id)).scalar_one()


def due(service: RunningService) -> int:
    with service.context.database.read() as session:
        return len(session.scalars(select(Checkpoint.id).where(text(TO_RECORD))).all())


def labels_in_the_bucket(sqlite_catalogs: SqliteCatalogs, tmp_path: Path, settings: ServiceSettings) -> dict[str, Any]:
    """By checkpoint, what a rebuild would give."""
    url = sqlite_catalogs.new(tmp_path)
    report = rebuild_into(url, settings.store_url)
    # What lost its newest record is held until a person has looked, and that is said; nothing else may be lacking.
    assert replace(report, protected=[]).whole, report.lines()
    database = Database(url)
    with database.read() as session:
        found = session.execute(
            select(Checkpoint.id, Checkpoint.labels).where(Checkpoint.state == CheckpointState.COMMITTED)
        )
        labels = {row.id: row.labels for row in found}
    database.dispose()
    return labels


def test_a_recorder_that_dies_at_any_step_loses_no_commit(
    service: RunningService,
    settings: ServiceSettings,
    sqlite_catalogs: SqliteCatalogs,
    tmp_path: Path,
    clock: Clock,
) -> None:
    job = Job(service.http(), world_size=2)
    record_all(service.context)
    for step in range(1, 5):
        saved = job.save(step)
        label(service, saved["id"], "keep")
        with killed_at(service, step):
            holdfast_service.records.controller.reconcile(service.context)
        torn = labels_in_the_bucket(sqlite_catalogs, tmp_path, settings).get(saved["id"])
        # Two lists, the manifest, the version: with the manifest it is a commit, with the version it has its state.
        assert torn == (None if step <= 3 else [] if step == 4 else ["keep"])
        clock.advance(_LEASE_OVER_SECONDS)
        record_all(service.context)
        assert due(service) == 0
        assert labels_in_the_bucket(sqlite_catalogs, tmp_path, settings)[saved["id"]] == ["keep"]
    label(service, saved["id"], "newer")
    with killed_at(service, 2):  # the newer version is there, and the older one too
        holdfast_service.records.controller.reconcile(service.context)
    assert labels_in_the_bucket(sqlite_catalogs, tmp_path, settings)[saved["id"]] == ["newer"]
    clock.advance(_LEASE_OVER_SECONDS)
    record_all(service.context)
    assert labels_in_the_bucket(sqlite_catalogs, tmp_path, settings)[saved["id"]] == ["newer"]


def test_a_recorder_that_loses_its_database_keeps_no_record_waiting(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection is cut between the documents of a record, or right behind the last one."""
    job = Job(service.http(), world_size=2)
    record_all(service.context)
    for step, (module, name) in enumerate(
        (
            (holdfast_service.records.writing, "list_record"),
            (holdfast_service.records.controller, "settle_record"),
        )
    ):
        job.save(step)
        cut = ProblemError(ProblemCode.DATABASE_UNAVAILABLE, "The database did not answer. Try again.")
        with monkeypatch.context() as patched:
            patched.setattr(module, name, Mock(side_effect=cut))
            with pytest.raises(ProblemError):
                holdfast_service.records.controller.reconcile(service.context)
        assert due(service) == 1
        record_all(service.context)
        assert due(service) == 0, "with no wait for the end of a lease"


def test_a_recorder_that_takes_long_keeps_its_lease_for_as_long_as_it_works(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lists, the manifest and the version: each takes three quarters of a lease."""
    job = Job(service.http(), world_size=2)
    record_all(service.context)
    job.save(1)
    store, write = service.context.store, service.context.store.write_named
    real, passed = time.monotonic, 0.0
    others: list[int] = []

    def slow(name: str, data: bytes) -> None:
        nonlocal passed
        passed += _LEASE_OVER_SECONDS * 3 / 4
        clock.advance(_LEASE_OVER_SECONDS * 3 / 4)
        write(name, data)
        with monkeypatch.context() as aside:
            aside.setattr(store, "write_named", write)
            others.append(holdfast_service.records.controller.reconcile(service.context).done)

    with monkeypatch.context() as patched:
        of_the_writer = SimpleNamespace(monotonic=lambda: real() + passed)
        patched.setattr(holdfast_service.records.writing, "time", of_the_writer)
        patched.setattr(store, "write_named", slow)
        assert holdfast_service.records.controller.reconcile(service.context).done == 1
    assert others == [0, 0, 0, 0], "somebody is at it"
    assert due(service) == 0


def test_a_renewal_whose_reply_is_lost_keeps_no_record_waiting(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog has the later end of the lease, and the process does not know it."""
    Job(service.http(), world_size=2).save(1)
    record_all(service.context)
    Job(service.http(), "demo/other", world_size=2).save(1)
    renew = holdfast_service.db.lease.renew
    database = service.context.database
    renewed = False

    def noticed(*arguments: Any, **options: Any) -> bool:
        nonlocal renewed
        renewed = renew(*arguments, **options)
        return renewed

    @contextmanager
    def transaction() -> Iterator[Any]:
        nonlocal renewed
        with Database.transaction(database) as session:
            yield session
        if renewed:
            renewed = False
            raise ProblemError(ProblemCode.DATABASE_UNAVAILABLE, "The database did not answer. Try again.")

    with monkeypatch.context() as patched:
        patched.setattr(holdfast_service.db.lease, "renew", noticed)
        patched.setattr(database, "transaction", transaction)
        # Every write finds more than half of the lease gone.
        real, passed = time.monotonic, itertools.count(step=_LEASE_OVER_SECONDS * 3 / 4)
        of_the_writer = SimpleNamespace(monotonic=lambda: real() + next(passed))
        patched.setattr(holdfast_service.records.writing, "time", of_the_writer)
        with pytest.raises(ProblemError):
            record_all(service.context)
    record_all(service.context)
    assert due(service) == 0, "with no wait for the end of a lease"


def test_of_two_recorders_the_slow_one_never_puts_an_older_state_in_place_of_a_newer(
    service: RunningService,
    settings: ServiceSettings,
    sqlite_catalogs: SqliteCatalogs,
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = Job(service.http()).save(1)
    record_all(service.context)
    label(service, saved["id"], "old")
    gate = hold_before(monkeypatch, holdfast_service.records.controller, "write_record")
    with in_background(gate) as threads:
        slow = threads.submit(holdfast_service.records.controller.reconcile, service.context)
        gate.wait_until_reached()
        label(service, saved["id"], "new")
        assert holdfast_service.records.controller.reconcile(service.context).done == 0, "somebody is at it"
        clock.advance(_LEASE_OVER_SECONDS)
        assert holdfast_service.records.controller.reconcile(service.context).done == 1
        gate.open()
        assert slow.result(60).done == 0, "its lease was over"
    assert labels_in_the_bucket(sqlite_catalogs, tmp_path, settings) == {saved["id"]: ["new"]}
    assert due(service) == 0


def test_a_recorder_that_comes_after_the_purge_raises_nobody_from_the_dead(
    service: RunningService,
    settings: ServiceSettings,
    sqlite_catalogs: SqliteCatalogs,
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(service.http())
    record_all(service.context)
    saved = job.save(1)
    gate = hold_before(monkeypatch, holdfast_service.records.controller, "write_record")
    with in_background(gate) as threads:
        slow = threads.submit(holdfast_service.records.controller.reconcile, service.context)
        gate.wait_until_reached()
        project_id = going(service, saved["id"], CheckpointState.DELETING)
        remove_record(service.context, project_id, saved["id"])
        gate.open()
        slow.result(60)
    going(service, saved["id"], CheckpointState.DELETED)
    assert labels_in_the_bucket(sqlite_catalogs, tmp_path, settings) == {}
    record_all(service.context)
    # A day later the word itself goes, and what the late writer left with it.
    clock.advance(25 * 3600)
    (attached,) = service.context.stores
    assert forget_removed(service.context, attached) == 1
    subject = checkpoint_subject(project_id, saved["id"])
    assert subject not in scan_records(attached.store).by_subject
    assert forget_removed(service.context, attached) == 0


def test_a_purge_that_dies_at_any_step_leaves_it_in_the_trash_with_its_bytes_or_gone(
    service: RunningService, settings: ServiceSettings, sqlite_catalogs: SqliteCatalogs, tmp_path: Path
) -> None:
    job = Job(service.http())
    for step in range(1, 6):
        saved = job.save(step)
        record_all(service.context)
        project_id = going(service, saved["id"], CheckpointState.DELETING)
        # The word, then list, manifest and version.
        if step < 5:
            with killed_at(service, step):
                remove_record(service.context, project_id, saved["id"])
        else:
            remove_record(service.context, project_id, saved["id"])
        there = labels_in_the_bucket(sqlite_catalogs, tmp_path, settings)
        assert (saved["id"] in there) == (step == 1), "before the word is written nothing of it is missing"
        remove_record(service.context, project_id, saved["id"])
        assert saved["id"] not in labels_in_the_bucket(sqlite_catalogs, tmp_path, settings)


def test_a_store_that_is_unavailable_keeps_its_records_due_and_blocks_no_other(
    settings: ServiceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = settings.model_copy(update={"second_store": f"posix://{tmp_path / 'second'}"})
    with running_service(both) as service:
        saved = Job(service.http()).save(1)
        first, second = service.context.stores
        with service.context.database.transaction() as session:
            record_in_store(session, saved["id"], second.store_id)

        def unavailable(*_: object) -> None:
            raise StoreUnavailable("it does not answer")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(second.store, "write_named", unavailable)
            report = holdfast_service.records.controller.reconcile(service.context)
            assert (report.done, report.error) == (3, "it does not answer")
            assert due(service) == 1, "it is told until the second store has it too"
            assert holdfast_service.records.controller.reconcile(service.context).done == 0
        record_all(service.context)
        assert due(service) == 0
        with service.context.database.read() as session:
            written = session.scalars(select(WrittenRecord.store_id).where(WrittenRecord.kind == "checkpoint")).all()
        assert sorted(written) == [first.store_id, second.store_id]
        # The same of a purge: what is removed later is removed before any chunk of that store.
        project_id = going(service, saved["id"], CheckpointState.DELETING)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(second.store, "write_named", unavailable)
            remove_record(service.context, project_id, saved["id"])
        subject = checkpoint_subject(project_id, saved["id"])
        assert scan_records(first.store).by_subject[subject].removed
        assert not scan_records(second.store).by_subject[subject].removed
        going(service, saved["id"], CheckpointState.DELETED)
        assert ready_stores(service.context).store_ids == {first.store_id, second.store_id}
        assert scan_records(second.store).by_subject[subject].removed


@pytest.mark.rule("record-outbox")
def test_a_store_that_gets_a_checkpoint_while_a_pass_notes_what_is_recorded_gets_its_record(
    settings: ServiceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = settings.model_copy(update={"second_store": f"posix://{tmp_path / 'second'}"})
    with running_service(both) as service:
        saved, database = Job(service.http()).save(1), service.context.database
        record_all(service.context)
        with database.transaction() as session:  # a pass that has written the record, and notes it at its end
            session.execute(update(Checkpoint).values(recorded_version=0))
        gate = hold_after(monkeypatch, holdfast_service.records.outbox, "insert_absent")
        second = service.context.stores[1].store_id
        replicating, noting = overlap(
            service,
            gate,
            lambda: database.run(lambda session: record_in_store(session, saved["id"], second)),
            lambda: database.run(lambda session: note_recorded(session, service.context)),
        )
        assert (replicating.result(), noting.result()) == (None, None)
        assert due(service) == 1
        record_all(service.context)
        assert due(service) == 0


@pytest.mark.parametrize("digest", ["0" * 64, "\u00e9", "\ud800", 7, None])
def test_a_record_with_any_other_digest_is_damaged_and_no_bug(digest: object) -> None:
    """Who can write to the bucket must not end a rebuild by it."""
    outer = {"format": FORMAT, "format_version": FORMAT_VERSION, "record": {}, "sha256": digest}
    with pytest.raises(DamagedRecordError, match="not those that were written"):
        decode(json.dumps(outer).encode(), ManifestRecord)


def test_a_record_that_is_left_out_is_damaged_and_no_bug() -> None:
    """With the digest of nothing, which it then has."""
    outer = {"format": FORMAT, "format_version": FORMAT_VERSION, "sha256": hashlib.sha256(b"null").hexdigest()}
    with pytest.raises(DamagedRecordError, match="not as a record has it"):
        decode(json.dumps(outer).encode(), ManifestRecord)


def test_a_pass_that_notes_what_is_recorded_fails_no_deletion_of_a_run(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion holds its checkpoints when it comes to its run's record; the pass goes over both."""
    job = Job(service.http())
    job.save(1)
    job.end()
    record_all(service.context)
    with service.context.database.transaction() as session:  # as another store that was attached leaves it
        for table in (Checkpoint, RecordSubject):
            session.execute(update(table).values(recorded_version=0))
    gate = hold_after(monkeypatch, holdfast_service.retention.delete, "mark_deleted")
    deleting, noting = overlap(
        service,
        gate,
        lambda: answer(service.http().request("DELETE", job.base, json={}, headers={"If-Match": "*"})),
        lambda: holdfast_service.records.controller.reconcile(service.context),
    )
    assert deleting.result()["in_trash"] is not None
    assert noting.result().error is None
    assert due(service) == 1, "what the deletion says is not recorded yet"
