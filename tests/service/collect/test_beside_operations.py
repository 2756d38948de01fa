"""What the trash, a record beside the data, a hold or a lock keeps from a collector (rules trash-first, holds-outrank
and record-outbox)."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import update

import holdfast_service.retention.trash
from holdfast_service.collect.controller import CollectReport, backlog, collect, reconcile
from holdfast_service.db.tables.core import Checkpoint, Copy
from holdfast_service.stores.base import StoreRefused
from tests.service.conftest import Clock
from tests.support.garbage import bytes_of, given_up
from tests.support.interleave import hold_after, overlap
from tests.support.rank import Job
from tests.support.rot import copies_of, states_of
from tests.support.service import RunningService


def in_the_trash(job: Job, service: RunningService, clock: Clock) -> str:
    for step in (1, 2, 3):
        job.save(step, content=b"weights %d" % step)
    checkpoint_id = str(service.http().get("/v1/projects/demo/runs/gpt/checkpoints/1").json()["id"])
    reply = service.http().post("/v1/projects/demo/runs/gpt/retention/prune", json={"checkpoint_ids": [checkpoint_id]})
    assert reply.json()["trashed"], reply.text
    clock.let_tickets_expire(service.context.settings)
    return checkpoint_id


@pytest.mark.rule("trash-first")
def test_an_undelete_in_flight_has_its_chunks(
    job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_id = in_the_trash(job, service, clock)
    gate = hold_after(monkeypatch, holdfast_service.retention.trash, "_take_back")
    undeleting, collecting = overlap(
        service,
        gate,
        lambda: service.http().post(f"/v1/checkpoints/{checkpoint_id}/undelete", json={"pin": False}),
        lambda: collect(service.context, whole=True),
    )
    assert undeleting.result().json()["state"] == "committed"
    assert collecting.result().done == 0
    assert [bytes_of(service, copy) for copy in copies_of(service, b"weights 1", None)] == [b"weights 1"]


@pytest.mark.rule("record-outbox")
def test_chunks_wait_until_the_record_is_gone_from_every_store(job: Job, service: RunningService, clock: Clock) -> None:
    checkpoint_id = in_the_trash(job, service, clock)
    context = service.context
    with context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(state="deleting"))
    assert collect(context, whole=True).done == 0
    assert states_of(service, b"weights 1", None) == ["verified"]
    with context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(state="deleted"))
    assert reconcile(context).done == 2
    assert states_of(service, b"weights 1", None) == []


@pytest.mark.rule("holds-outrank")
def test_what_is_held_keeps_its_chunks_whatever_state_it_was_given(
    job: Job, service: RunningService, clock: Clock
) -> None:
    job.save(1, content=b"evidence")
    checkpoint_id = str(service.http().get("/v1/projects/demo/runs/gpt/checkpoints/1").json()["id"])
    placed = service.http().post(f"/v1/checkpoints/{checkpoint_id}/holds", json={"reason": "the audit"})
    assert placed.is_success, placed.text
    clock.let_tickets_expire(service.context.settings)
    with service.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(state="deleted"))
    assert collect(service.context, whole=True).done == 0
    assert [bytes_of(service, copy) for copy in copies_of(service, b"evidence", None)] == [b"evidence"]


@pytest.mark.rule("holds-outrank")
def test_what_the_store_may_hold_is_not_marked(job: Job, service: RunningService, clock: Clock) -> None:
    given_up(job, b"locked")
    clock.let_tickets_expire(service.context.settings)
    with service.context.database.transaction() as session:
        session.execute(update(Copy).values(lock="locked"))
    assert reconcile(service.context).done == 0
    assert states_of(service, b"locked", None) == ["verified"]
    with service.context.database.read() as session:
        assert backlog(session, service.context).due == 0  # deferred, and looked at again
    clock.advance(61)
    with service.context.database.transaction() as session:
        assert backlog(session, service.context).due == 1
        session.execute(update(Copy).values(lock=None))
    assert reconcile(service.context).done == 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_the_store_refuses_to_delete_is_told_kept_and_tried_later(
    job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up(job, b"locked")
    clock.let_tickets_expire(service.context.settings)

    def refuses(*_: Any, **__: Any) -> Any:
        raise StoreRefused("AccessDenied, a lock holds it")

    with monkeypatch.context() as broken:
        broken.setattr(service.context.store, "delete", refuses)
        report = reconcile(service.context)
        assert (report.done, report.failed) == (0, 1)
        assert "a lock holds it" in str(report.error)
        assert reconcile(service.context) == CollectReport()
    clock.advance(1801)
    assert reconcile(service.context).done == 0
    clock.advance(1801)
    assert reconcile(service.context).done == 1
