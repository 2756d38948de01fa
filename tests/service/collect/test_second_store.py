"""A collector and a second store: a copy on its way, a store that is unavailable or foreign (rules fencing-token,
late-put-window and row-before-copy)."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_protocol.states import StoreRole
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.collect.controller import collect, reconcile
from holdfast_service.copies.copy_chunk import CopyTask, copy_now
from holdfast_service.stores.base import StoreUnavailable
from tests.service.conftest import Clock
from tests.support.garbage import given_up
from tests.support.rank import Job
from tests.support.replicated import begin
from tests.support.rot import attached, states_of
from tests.support.service import RunningService


def begun(service: RunningService, data: bytes) -> CopyTask:
    """A worker that is about to copy it to the second store."""
    task = begin(service, data)
    assert task is not None
    return task


@pytest.mark.rule("row-before-copy")
def test_a_copy_that_another_is_being_made_from_stays_until_that_is_done(
    job: Job, service: RunningService, clock: Clock
) -> None:
    given_up(job, b"source")
    clock.let_tickets_expire(service.context.settings)
    context = service.context
    task = begun(service, b"source")
    assert reconcile(context).done == 0  # the row is there, and its bytes are on the way
    assert copy_now(context, task)
    assert states_of(service, b"source", None) == ["verified", "verified"]
    clock.advance(context.settings.chunk_lease_seconds)
    clock.let_tickets_expire(context.settings)
    assert collect(context, whole=True).done == 2
    assert list(attached(service, StoreRole.SECOND).store.list_objects(task.target_key.project_id)) == []


@pytest.mark.rule("late-put-window")
def test_what_a_dead_worker_was_copying_goes_when_its_put_can_no_longer_land(
    job: Job, service: RunningService, clock: Clock
) -> None:
    job.save(1, content=b"weights")
    context, second = service.context, attached(service, StoreRole.SECOND)
    task = begun(service, b"weights")
    lease = context.settings.chunk_lease_seconds
    clock.advance(lease + context.settings.longest_upload_seconds - 60)
    assert collect(context, whole=True).done == 0
    second.store.put_bytes(task.target_key, b"weights")  # it was begun in time, and lands now
    clock.advance(65)
    assert collect(context, whole=True).done == 1
    assert states_of(service, b"weights", None) == ["verified"]
    assert list(second.store.list_objects(task.target_key.project_id)) == []


@pytest.fixture
def both(job: Job, service: RunningService, clock: Clock) -> AttachedStore:
    """A chunk that nobody needs is in both stores; the second one."""
    given_up(job, b"both")
    assert copy_now(service.context, begun(service, b"both"))
    clock.advance(service.context.settings.chunk_lease_seconds)
    clock.let_tickets_expire(service.context.settings)
    return attached(service, StoreRole.SECOND)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("row-before-copy")
def test_an_outage_of_one_store_leaves_the_other_ones_copies_to_go(
    both: AttachedStore, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(both.store, "delete", unavailable)
        report = reconcile(service.context)
    assert (report.done, report.failed, report.error) == (1, 1, "no answer")
    assert states_of(service, b"both", None) == ["gone", "deleting"] or states_of(service, b"both", None) == [
        "deleting"
    ]
    clock.advance(3600)
    assert reconcile(service.context).done == 1
    assert states_of(service, b"both", None) == []


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("fencing-token")
def test_a_foreign_second_store_is_left_alone_and_the_first_is_not(
    both: AttachedStore, service: RunningService
) -> None:
    both.store.write_named("holdfast-store.json", b"{}")
    report = reconcile(service.context)
    assert report.done == 1
    assert len(report.skipped_stores) == 1
    assert "second store" in report.skipped_stores[0]
    assert states_of(service, b"both", StoreRole.SECOND) == ["verified"]
