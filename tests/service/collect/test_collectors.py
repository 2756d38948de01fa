"""Several collectors, one after the other or at once: they share the work, and take up what a dead one left (protocol
rule mark-before-delete); and what a pass looks at."""

from __future__ import annotations

import hashlib
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import event, func, select, update

import holdfast_service.collect.controller
import holdfast_service.collect.mark_and_delete
import holdfast_service.collect.references
import holdfast_service.collect.scan_copies
from holdfast_service.collect.controller import collect, reconcile
from holdfast_service.collect.mark_and_delete import delete_marked, mark
from holdfast_service.collect.references import drop_past_references
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Chunk, ChunkList, ChunkListEntry, Copy, ShardChunk
from holdfast_service.db.tables.operations import CollectCandidate
from tests.service.conftest import Clock
from tests.support.death import Killed, kill
from tests.support.garbage import bytes_of, given_up
from tests.support.interleave import hold_after, overlap
from tests.support.rank import Job
from tests.support.rot import copies_of, states_of
from tests.support.service import RunningService

# A checkpoint is purged and its chunks go; the process dies at this call of this function.
STEPS: dict[str, tuple[ModuleType, str, int]] = {
    "references were dropped, their lists are still there": (
        holdfast_service.collect.references,
        "drop_unused_lists",
        1,
    ),
    "lists were dropped, nothing is marked yet": (holdfast_service.collect.controller, "mark", 1),
    "copies are marked, no bytes were deleted": (holdfast_service.collect.controller, "delete_marked", 1),
    "a part of the bytes is deleted": (holdfast_service.collect.mark_and_delete, "_delete", 2),
    "bytes are deleted, nothing is settled": (holdfast_service.collect.mark_and_delete, "_settle", 1),
}


@pytest.mark.rule("mark-before-delete")
def test_two_collectors_at_once_share_the_work_and_do_nothing_twice(
    job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for data in (b"one", b"two", b"three"):
        given_up(job, data)
    clock.let_tickets_expire(service.context.settings)
    gate = hold_after(monkeypatch, holdfast_service.collect.mark_and_delete, "_claim")
    first, second = overlap(service, gate, lambda: reconcile(service.context), lambda: reconcile(service.context))
    reports = [first.result(), second.result()]
    assert sum(report.done for report in reports) == 3
    assert sum(report.deleted_bytes for report in reports) == 11
    reconcile(service.context)
    with service.context.database.read() as session:
        for table in (Copy, Chunk, CollectCandidate):
            assert session.scalar(select(func.count()).select_from(table)) == 0


@pytest.mark.rule("mark-before-delete")
def test_a_collector_that_settles_and_one_that_marks_do_not_wait_for_each_other(
    job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both come to one chunk: its bytes are deleted, and a person's collection has made every candidate due."""
    given_up(job, b"data")
    clock.let_tickets_expire(service.context.settings)
    context = service.context
    drop_past_references(context)
    doomed = context.database.run(partial(mark, context=context, store_ids=context.store_ids)).doomed
    with context.database.transaction() as session:
        session.execute(update(CollectCandidate).values(due_at=database_now(session)))
    gate = hold_after(monkeypatch, holdfast_service.collect.mark_and_delete, "_due_candidates")
    marking, deleting = overlap(service, gate, lambda: reconcile(context), lambda: delete_marked(context, doomed))
    assert marking.result().error is None
    assert (len(doomed), deleting.result().copies) == (1, 1)
    reconcile(context)
    assert states_of(service, b"data", None) == []


@pytest.mark.rule("mark-before-delete")
@pytest.mark.parametrize("step", STEPS)
def test_a_collector_that_dies_between_two_steps_is_followed_by_another(
    job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    job.save(1, content=b"old")
    job.save(2, content=b"new")
    clock.let_tickets_expire(service.context.settings)
    context = service.context
    with context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.step == 1).values(state="deleted"))
    module, name, call = STEPS[step]
    with monkeypatch.context() as broken:
        kill(broken, module, name, at=call)
        with pytest.raises(Killed):
            reconcile(context)
    clock.advance(context.settings.lease_seconds + 61)
    collect(context, whole=True)
    assert states_of(service, b"old", None) == []
    assert [bytes_of(service, copy) for copy in copies_of(service, b"new", None)] == [b"new"]
    with context.database.read() as session:
        project_id = session.execute(select(Chunk.project_id).limit(1)).scalar_one()
        counts = [
            session.scalar(select(func.count()).select_from(table))
            for table in (Copy, Chunk, ChunkList, ChunkListEntry, ShardChunk, CollectCandidate)
        ]
    assert counts == [2, 2, 1, 2, 0, 0]
    stored = {each.key.digest for each in context.store.list_objects(project_id)}
    assert stored == {hashlib.sha256(data).hexdigest() for data in (b"new", b"index new")}
    assert reconcile(context).idle


def test_a_quiet_round_reads_no_table_of_copies_or_chunks_whole(
    job: Job, service: RunningService, clock: Clock
) -> None:
    job.save(1, content=b"weights")
    clock.let_tickets_expire(service.context.settings)
    reconcile(service.context)
    reconcile(service.context)  # the first full scan is over
    seen: list[str] = []

    def listen(_connection: Any, _cursor: Any, text: str, *_: Any) -> None:
        seen.append(text)

    event.listen(service.context.database.engine, "before_cursor_execute", listen)
    try:
        assert reconcile(service.context).idle
    finally:
        event.remove(service.context.database.engine, "before_cursor_execute", listen)
    unbounded = [text for text in seen if "copies" in text and "copies.state" not in text]
    assert not unbounded


def test_what_nobody_left_as_a_candidate_is_found_by_the_full_scan(
    job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdfast_service.collect.scan_copies, "ROWS", 1)
    given_up(job, b"forgotten")
    job.save(1, content=b"weights")
    clock.let_tickets_expire(service.context.settings)
    context = service.context
    for _ in range(5):
        reconcile(context)
    job.save(2, content=b"weights 2")
    with context.database.transaction() as session:  # as an older version, or a crash, would leave it
        session.execute(update(Checkpoint).where(Checkpoint.step == 2).values(state="deleted"))
        session.execute(update(Checkpoint).values(forgotten_at=database_now(session)))
    clock.let_tickets_expire(service.context.settings)
    assert sum(reconcile(context).done for _ in range(8)) == 0
    clock.advance(context.settings.collect_full_scan_seconds + 1)
    assert sum(reconcile(context).done for _ in range(8)) == 2
    assert [bytes_of(service, copy) for copy in copies_of(service, b"weights", None)] == [b"weights"]


def test_a_candidate_that_is_needed_again_is_none_any_more(job: Job, service: RunningService, clock: Clock) -> None:
    given_up(job, b"shared")
    save = job.begin(1)
    save.write(0, [b"shared"])
    clock.let_tickets_expire(service.context.settings)
    assert reconcile(service.context).done == 0
    with service.context.database.read() as session:
        assert session.scalar(select(func.count()).select_from(CollectCandidate)) == 0
