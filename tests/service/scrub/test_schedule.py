"""Scrubbing on its schedule, per store: what is due, what is found, and what is never taken for a finding."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select, update

import holdfast_service.scrub.read_copies
import holdfast_service.scrub.verify
from holdfast_protocol.restores import ReportChunk
from holdfast_protocol.states import CopyState, Proof, Scope, StoreRole
from holdfast_service.attached_stores.ownership import MARKER_NAME
from holdfast_service.auth.principal import Principal
from holdfast_service.db.tables.core import Checkpoint, Copy
from holdfast_service.db.tables.operations import ScrubTotal
from holdfast_service.restore.report_chunk import report_chunk
from holdfast_service.scrub import controller as rescrub
from holdfast_service.scrub import repair
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.posix.posix_store import PosixStore
from tests.service.conftest import Clock
from tests.support.interleave import hold_after, in_background
from tests.support.rank import Job, digest_of
from tests.support.repairing import CONTENT, DAY, health_of
from tests.support.rot import ROT, attached, copies_of, copy_to_second, cut, flip, key_of, overwrite, remove, states_of
from tests.support.service import RunningService


def posix_root(service: RunningService, role: StoreRole) -> PosixStore:
    store = attached(service, role).store
    assert isinstance(store, PosixStore)
    return store


def test_every_copy_is_read_once_in_so_many_days_and_not_before(
    service: RunningService, job: Job, clock: Clock
) -> None:
    for step in range(1, 5):
        job.save(step)
    copy_to_second(service)
    assert rescrub.reconcile(service.context).idle
    clock.advance(0.8 * 30 * DAY - 60)
    assert rescrub.reconcile(service.context).idle
    read = []
    for _ in range(7):
        clock.advance(DAY)
        read.append(rescrub.reconcile(service.context).done)
    assert sum(read) == 16, "8 chunks in two stores, each once"
    assert max(read) < 8, "what came in one burst does not come due in one burst"
    assert rescrub.reconcile(service.context).idle
    with service.context.database.read() as session:
        assert set(session.scalars(select(Copy.proof))) == {Proof.READ}
        assert rescrub.backlog(session, service.context).due == 0
        assert max(rescrub.oldest_seconds(session, service.context).values()) < 8 * DAY


def test_two_workers_share_the_copies_and_read_none_twice(
    service: RunningService, job: Job, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 6):
        job.save(step)
    clock.advance(31 * DAY)
    gate = hold_after(monkeypatch, holdfast_service.scrub.read_copies, "read_back")
    with in_background(gate) as threads:
        first = threads.submit(rescrub.reconcile, service.context)
        gate.wait_until_reached()  # it has claimed a batch, and reads
        second = rescrub.reconcile(service.context)
        gate.open()
        assert (first.result().done, second.done) == (8, 2)
    with service.context.database.read() as session:
        assert session.get_one(ScrubTotal, service.context.store_id).read_copies == 10


def test_the_copy_that_was_not_read_for_longest_comes_first(
    service: RunningService, job: Job, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [b"first", b"second", b"third"]
    for step, content in enumerate(contents, start=1):
        job.save(step, content=content)
        clock.advance(DAY)
    clock.advance(40 * DAY)
    asked: list[str] = []
    real = service.context.store.open_read

    def noting(key: Any) -> Any:
        asked.append(key.digest)
        return real(key)

    monkeypatch.setattr(service.context.store, "open_read", noting)
    rescrub.reconcile(service.context)
    first, second, third = (asked.index(copies_of(service, content)[0].stored_digest) for content in contents)
    assert first < second < third


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_zero_days_switch_it_off(settings: ServiceSettings, service: RunningService, job: Job, clock: Clock) -> None:
    job.save(1)
    clock.advance(400 * DAY)
    object.__setattr__(service.context, "settings", settings.model_copy(update={"scrub_days": 0.0}))
    assert rescrub.reconcile(service.context).idle
    with service.context.database.read() as session:
        assert rescrub.backlog(session, service.context).due == 0


@pytest.mark.rule("row-before-copy")
def test_rot_in_one_store_marks_nothing_while_another_keeps_the_chunk(
    service: RunningService, job: Job, clock: Clock
) -> None:
    saved = {rot: job.save(step, content=rot.encode()) for step, rot in enumerate(ROT)}
    copy_to_second(service)
    clock.advance(31 * DAY)
    for rot, damage in ROT.items():
        damage(service.context.store, key_of(service, rot.encode()))
    report = rescrub.reconcile(service.context)
    assert (report.bad, report.missing, report.corrupt_checkpoints) == (2, 1, ())
    findings = {}
    for rot, view in saved.items():
        (copy,) = copies_of(service, rot.encode())
        assert (copy.state, copy.bad_at is not None) == (CopyState.BAD, True)
        findings[rot] = copy.finding
        assert states_of(service, rot.encode(), StoreRole.SECOND) == [CopyState.VERIFIED]
        assert health_of(service, view["id"])[0] == "ok"
    assert findings == {
        "flipped": "has other bytes in the store",
        "cut": "has another size in the store",
        "deleted": "is not in the store",
    }


@pytest.mark.rule("row-before-copy")
def test_a_chunk_is_lost_when_the_last_store_has_lost_it(service: RunningService, job: Job, clock: Clock) -> None:
    older, newer = job.save(100, content=b"older"), job.save(200, content=CONTENT)
    copy_to_second(service)
    for role, damage in ((StoreRole.PRIMARY, flip), (StoreRole.SECOND, cut)):
        damage(attached(service, role).store, key_of(service, CONTENT, role))
    clock.advance(31 * DAY)
    assert rescrub.reconcile(service.context).corrupt_checkpoints == (newer["id"],)
    assert [health_of(service, each["id"])[0] for each in (older, newer)] == ["ok", "corrupt"]
    assert repair.reconcile(service.context).lost_copies == 2


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("report-is-suspicion")
def test_a_process_that_lacks_the_second_store_condemns_nothing_that_is_whole_there(
    settings: ServiceSettings, service: RunningService, job: Job, clock: Clock
) -> None:
    saved = job.save(100, content=CONTENT)
    copy_to_second(service)
    flip(service.context.store, key_of(service, CONTENT))
    clock.advance(31 * DAY)
    lacking = open_service(settings.model_copy(update={"second_store": None}))
    try:
        assert rescrub.reconcile(lacking).corrupt_checkpoints == ()
        assert copies_of(service, CONTENT)[0].state == CopyState.BAD
        # Nor does a report there, to which no copy is left that it could read.
        reader = Principal("tk_reader", "reader", frozenset(Scope))
        wanted = ReportChunk(digest=digest_of(CONTENT), problem="mismatch")
        told = report_chunk(lacking, reader, saved["id"], wanted)
        assert (told.readable, told.corrupt_checkpoints) == (False, [])
        assert health_of(service, saved["id"])[0] == "ok"
        # A mark from before goes by what the others have read.
        clock.advance(1)
        assert rescrub.reconcile(service.context).good > 0
        with service.context.database.transaction() as session:
            session.get_one(Checkpoint, saved["id"]).health = "corrupt"
        assert repair.reconcile(lacking).repaired_checkpoints == (saved["id"],)
    finally:
        close_service(lacking)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("report-is-suspicion")
def test_while_a_copy_was_not_read_again_nothing_is_marked(service: RunningService, job: Job) -> None:
    """After a new epoch or a rebuild every copy is suspect."""
    good, lost = job.save(100, content=b"good"), job.save(200, content=CONTENT)
    copy_to_second(service)
    for content, roles in ((b"good", [StoreRole.SECOND]), (CONTENT, [StoreRole.PRIMARY, StoreRole.SECOND])):
        for role in roles:
            flip(attached(service, role).store, key_of(service, content, role))
    with service.context.database.transaction() as session:
        session.execute(update(Copy).values(state=CopyState.SUSPECT))
    second_first = replace(service.context, stores=(attached(service, StoreRole.SECOND),))
    assert holdfast_service.scrub.verify.reconcile(second_first).bad == 2
    assert [health_of(service, each["id"])[0] for each in (good, lost)] == ["ok", "ok"]
    # It comes with the last one.
    assert holdfast_service.scrub.verify.reconcile(service.context).corrupt_checkpoints == (lost["id"],)
    assert [health_of(service, each["id"])[0] for each in (good, lost)] == ["ok", "corrupt"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("report-is-suspicion")
def test_a_store_that_is_unavailable_stops_only_its_own_part(service: RunningService, job: Job, clock: Clock) -> None:
    saved = job.save(100, content=CONTENT)
    copy_to_second(service)
    for role in (StoreRole.PRIMARY, StoreRole.SECOND):
        clock.advance(31 * DAY)
        root = posix_root(service, role).root
        root.rename(root.with_name("unmounted"))
        report = rescrub.reconcile(service.context)
        assert (report.good, report.bad, report.missing, report.failed) == (2, 0, 0, 1)
        assert report.error is not None
        assert report.error.startswith(f"{role} store: ")
        assert health_of(service, saved["id"])[0] == "ok"
        root.with_name("unmounted").rename(root)
        clock.advance(60)
        assert rescrub.reconcile(service.context).good == 2


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("report-is-suspicion")
def test_a_wrong_mount_is_no_finding_about_a_copy(service: RunningService, job: Job, clock: Clock) -> None:
    saved = job.save(100, content=CONTENT)
    key = key_of(service, CONTENT)
    clock.advance(31 * DAY)
    store = posix_root(service, StoreRole.PRIMARY)
    store.root.rename(store.root.with_name("elsewhere"))
    store.prepare()  # an empty folder stands where the mount was
    assert rescrub.reconcile(service.context).failed == 1
    (store.root / MARKER_NAME).write_text(json.dumps({"catalog_id": "f" * 32, "epoch": 1, "store_id": 1}))
    store.object_path(key).parent.mkdir(parents=True)
    store.object_path(key).write_bytes(b"another's")
    clock.advance(60)
    report = rescrub.reconcile(service.context)
    assert (report.bad, report.missing, report.failed) == (0, 0, 1)
    assert health_of(service, saved["id"])[0] == "ok"
    assert {copy.state for copy in copies_of(service, CONTENT)} == {CopyState.VERIFIED}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_cold_copy_is_not_read(service: RunningService, job: Job, clock: Clock) -> None:
    job.save(100, content=CONTENT)
    with service.context.database.transaction() as session:
        session.execute(update(Copy).values(state=CopyState.COLD))
    clock.advance(400 * DAY)
    assert rescrub.reconcile(service.context).idle
    assert holdfast_service.scrub.verify.reconcile(service.context).idle


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("reuse-only-hashed")
def test_copies_of_the_second_store_are_proven_there(service: RunningService, job: Job) -> None:
    job.save(100, content=CONTENT)
    copy_to_second(service)
    with service.context.database.transaction() as session:
        second = attached(service, StoreRole.SECOND).store_id
        session.execute(update(Copy).where(Copy.store_id == second).values(proof=Proof.UNPROVEN))
    remove(attached(service, StoreRole.SECOND).store, key_of(service, CONTENT, StoreRole.SECOND))
    report = holdfast_service.scrub.verify.reconcile(service.context)
    assert (report.good, report.bad) == (1, 1)
    assert states_of(service, CONTENT) == [CopyState.VERIFIED], "read from its own store"
    assert states_of(service, CONTENT, StoreRole.SECOND) == [CopyState.BAD]


@pytest.mark.rule("row-before-copy")
def test_a_lease_that_another_took_over_settles_nothing(service: RunningService, job: Job, clock: Clock) -> None:
    """It was marked for deletion meanwhile: whoever reads it then must not bring it back."""
    job.save(100, content=CONTENT)
    clock.advance(31 * DAY)
    real = service.context.store.open_read

    def reads_while_it_is_collected(key: Any) -> Any:
        with service.context.database.transaction() as session:
            session.execute(update(Copy).values(state=CopyState.DELETING))
        return real(key)

    service.context.store.open_read = reads_while_it_is_collected  # type: ignore[method-assign]
    assert rescrub.reconcile(service.context).done == 0
    assert {copy.state for copy in copies_of(service, CONTENT)} == {CopyState.DELETING}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_is_found_is_written_down_as_an_event(service: RunningService, job: Job, clock: Clock) -> None:
    saved = job.save(100, content=CONTENT)
    overwrite(service.context.store, key_of(service, CONTENT), b"x" * len(CONTENT))
    clock.advance(31 * DAY)
    rescrub.reconcile(service.context)
    events = service.http().get("/v1/audit-events", params={"project": "demo"})
    found = {each["action"]: each for each in events.json()["items"]}
    assert found["copy.bad"]["actor"] == "scrub"
    assert found["copy.bad"]["reason"] == "The copy has other bytes in the store."
    marked = found["checkpoint.mark_corrupt"]
    assert (marked["checkpoint_id"], marked["before"]["health"], marked["after"]["health"]) == (
        saved["id"],
        "ok",
        "corrupt",
    )
