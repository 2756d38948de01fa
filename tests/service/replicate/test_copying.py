"""One chunk on its way to a second store (rule row-before-copy): under a lease, proven on the way, whole or not at
all."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import update

import holdfast_service.collect.controller
import holdfast_service.copies.copy_chunk as copying
from holdfast_protocol.states import CopyState, StoreRole
from holdfast_service.copies.predicates import object_key
from holdfast_service.db import lease
from holdfast_service.db.tables.core import Copy
from holdfast_service.db.tables.operations import CheckpointCopy
from holdfast_service.replicate.copy_checkpoint import RETRY_SECONDS
from holdfast_service.stores.base import ObjectMismatch
from tests.service.conftest import Clock
from tests.support.death import Killed, kill
from tests.support.interleave import hold_after, overlap
from tests.support.rank import Job, digest_of
from tests.support.replicated import CONTENT, SECOND, begin, file_of, objects_in, put_policy, replicate
from tests.support.rot import attached, copies_of, flip, overwrite, states_of
from tests.support.service import RunningService

# Where a worker dies: before or after its call of this function.
MOMENTS = {
    "before reading": ("_read", False),
    "before writing": ("_write", False),
    "after writing": ("_write", True),
    "after settling": ("settle_copy", True),
}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("row-before-copy")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_killed_between_two_steps_leaves_nothing_that_the_next_one_cannot_finish(
    service: RunningService, saved: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    task = begin(service, CONTENT)
    assert task is not None
    with monkeypatch.context() as patch:
        patch.setattr(copying, "give_up_copy", lambda *_: None)  # the dead give nothing back
        name, after = MOMENTS[moment]
        kill(patch, copying, name, after=after)
        with pytest.raises(Killed):
            copying.copy_now(service.context, task)
    report = replicate(service)
    if moment == "after settling":
        assert (report.done, report.whole) == (1, (saved["id"],))
    else:
        assert (report.done, report.whole) == (1, ()), "the dead worker's chunk was taken under its lease"
        clock.advance(service.context.settings.chunk_lease_seconds + 60)
        report = replicate(service)
        assert (report.done, report.whole) == (1, (saved["id"],))
    (copy,) = copies_of(service, CONTENT, SECOND)
    assert (copy.state, copy.generation) == (CopyState.VERIFIED, task.target_key.generation)
    assert file_of(service, SECOND, copy).read_bytes() == CONTENT
    assert len(objects_in(service, SECOND)) == 2, "something was left behind in the second store"


@pytest.mark.rule("row-before-copy")
def test_two_workers_at_one_chunk_make_one_copy(
    service: RunningService, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_after(monkeypatch, copying, "best_source")
    both = overlap(service, gate, lambda: begin(service, CONTENT), lambda: begin(service, CONTENT))
    begun = [each.result() for each in both]
    assert begun.count(None) == 1, "both workers copy the same chunk"
    assert len(copies_of(service, CONTENT, SECOND)) == 1


@pytest.mark.rule("row-before-copy")
def test_who_lost_the_lease_settles_nothing(service: RunningService, saved: dict[str, Any], clock: Clock) -> None:
    slow = begin(service, CONTENT)
    assert slow is not None
    assert begin(service, CONTENT) is None
    moved = copying.move_bytes(service.context, slow)
    clock.advance(service.context.settings.chunk_lease_seconds + 60)
    quick = begin(service, CONTENT)
    assert quick is not None
    assert quick.copy_id == slow.copy_id, "what a dead worker left is taken up"
    assert not copying.settle_copy(service.context, slow, moved), "a lease that was lost has settled the copy"
    copying.give_up_copy(service.context, slow, copying.TargetBadError())
    assert states_of(service, CONTENT, SECOND) == [CopyState.COPYING]
    assert copying.copy_now(service.context, quick)
    assert states_of(service, CONTENT, SECOND) == [CopyState.VERIFIED]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_worker_whose_lease_is_over_writes_no_more(service: RunningService, saved: dict[str, Any]) -> None:
    task = begin(service, CONTENT)
    assert task is not None
    late = copying.CopyTask(**(vars(task) | {"ends_at": 0.0}))
    with pytest.raises(copying.LeaseOverError):
        copying.move_bytes(service.context, late)
    assert not objects_in(service, SECOND)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_copy_whose_lease_ended_while_it_was_written_is_told(
    service: RunningService, saved: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = copying.settle_copy

    def late(context: Any, task: Any, moved: Any) -> bool:
        clock.advance(context.settings.chunk_lease_seconds + 60)
        with context.database.transaction() as session:
            taken = lease.claim(session, Copy, Copy.id == task.copy_id, seconds=60)
        assert taken is not None
        return real(context, task, moved)

    monkeypatch.setattr(copying, "settle_copy", late)
    report = replicate(service)
    assert report.done == 0
    assert report.error is not None
    assert "took longer to copy than its lease" in report.error
    assert not report.whole


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("row-before-copy")
def test_a_source_that_rots_while_it_is_copied_spoils_nothing(service: RunningService, saved: dict[str, Any]) -> None:
    (source,) = copies_of(service, CONTENT)
    key = object_key(source.project_id, source.stored_digest, source)
    flip(service.context.store, key)
    report = replicate(service)
    assert (report.done, report.failed, report.whole) == (1, 1, ())
    assert report.error is not None
    assert digest_of(CONTENT) in report.error
    assert states_of(service, CONTENT) == [CopyState.SUSPECT], "nobody looks at the rotten source"
    assert states_of(service, CONTENT, SECOND) == [CopyState.COPYING]
    assert {key.digest for key in objects_in(service, SECOND)} == {digest_of(b"index " + CONTENT)}
    overwrite(service.context.store, key, CONTENT)
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.id == source.id).values(state=CopyState.VERIFIED))
        session.execute(update(CheckpointCopy).values(retry_at=None))
    assert replicate(service).whole == (saved["id"],)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_other_bytes_under_the_copys_key_are_not_believed(service: RunningService, saved: dict[str, Any]) -> None:
    task = begin(service, CONTENT)
    assert task is not None
    attached(service, SECOND).store.put_bytes(task.target_key, b"somebody else's")
    with pytest.raises(copying.TargetBadError):
        copying.copy_now(service.context, task)
    assert replicate(service).whole == (saved["id"],)
    bad, good = copies_of(service, CONTENT, SECOND)
    assert (bad.state, good.state) == (CopyState.BAD, CopyState.VERIFIED)
    assert file_of(service, SECOND, good).read_bytes() == CONTENT


def test_a_store_that_spoils_what_is_written_is_tried_more_and_more_seldom(
    service: RunningService, saved: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try leaves an object there."""

    def spoil(*_: Any) -> Any:
        raise ObjectMismatch("it has other bytes")

    Job(service.http(), "demo/other").save(1, content=CONTENT)  # asks for the same chunks
    told = []
    with monkeypatch.context() as patch:
        patch.setattr(copying, "_write", spoil)
        for _ in range(60):
            told.append(replicate(service).error or "")
            clock.advance(RETRY_SECONDS + 1)
    assert 3 <= len(copies_of(service, CONTENT, SECOND)) <= 6, "each minute of this hour has left an object"
    assert any("second store has spoiled a chunk 3 times" in each for each in told)
    clock.advance(86400)
    assert saved["id"] in replicate(service).whole


@pytest.mark.rule("row-before-copy")
def test_what_a_dead_worker_left_is_collected_once_none_of_its_writes_can_land(
    service: RunningService, saved: dict[str, Any], clock: Clock
) -> None:
    task = begin(service, CONTENT)
    assert task is not None
    copying.move_bytes(service.context, task)
    put_policy(service, kinds=["final"])  # nobody takes it up
    settings = service.context.settings
    clock.advance(settings.chunk_lease_seconds + 60)
    holdfast_service.collect.controller.reconcile(service.context)
    assert len(objects_in(service, SECOND)) == 1, "a write of a worker that only slept may still land"
    clock.advance(settings.longest_upload_seconds + settings.ticket_seconds)
    for _ in range(3):
        holdfast_service.collect.controller.reconcile(service.context)
    assert not objects_in(service, SECOND)
    assert len(objects_in(service, StoreRole.PRIMARY)) == 2
