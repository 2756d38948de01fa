"""A collector beside whoever seals, commits, reports a copy or repairs it (rules report-is-suspicion and
mark-before-delete). What a test holds open is a transaction that has not ended."""

from __future__ import annotations

import pytest
from sqlalchemy import select, update

import holdfast_service.training.commit
from holdfast_service.audit.record import Actor
from holdfast_service.collect.controller import collect, reconcile
from holdfast_service.copies.predicates import object_key
from holdfast_service.copies.read_back import Claim, Finding, claim, read_back, settle
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Chunk, Copy
from holdfast_service.db.tables.operations import CollectCandidate
from tests.service.conftest import Clock
from tests.support.damage import flip
from tests.support.garbage import bytes_of
from tests.support.interleave import hold_before, just_before, overlap
from tests.support.rank import Job
from tests.support.rot import copies_of, states_of
from tests.support.service import RunningService

SCRUB = Actor.controller("scrub")
# The collector has locked the chunks, and asks for their copies.
COPIES_ARE_LOCKED = r"^SELECT copies\.id.*FOR UPDATE\s*$"
# SQLite has one writer at a time: nobody can come in between two of its statements.
MANY_WRITERS = pytest.mark.parametrize("database_url", ["postgres"], indirect=True)


@pytest.mark.rule("mark-before-delete")
def test_a_seal_that_is_just_turning_references_into_a_list_keeps_its_chunks(
    job: Job, service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = job.begin(1)
    save.upload(0, [b"weights", b"index"])
    clock.let_tickets_expire(service.context.settings)
    # The references are gone and the list is there, in a transaction that has not ended.
    gate = hold_before(monkeypatch, holdfast_service.training.commit, "complete_if_whole")
    sealing, collecting = overlap(
        service, gate, lambda: save.seal(0, [b"weights", b"index"]), lambda: collect(service.context, whole=True)
    )
    assert sealing.result()["state"] == "committed"
    assert collecting.result().done == 0
    assert [bytes_of(service, copy) for copy in copies_of(service, b"weights", None)] == [b"weights"]


@MANY_WRITERS
@pytest.mark.rule("mark-before-delete")
def test_a_commit_that_comes_between_the_lock_and_the_question_is_seen(
    job: Job, service: RunningService, clock: Clock
) -> None:
    job.save(1, content=b"weights")
    save = job.begin(2)
    save.upload(0, [b"weights", b"index weights"])
    clock.let_tickets_expire(service.context.settings)
    collect(service.context, whole=True)
    with service.context.database.transaction() as session:
        # Only the references of the upload keep them; the list is there, so the seal locks no chunk.
        over = {"state": "deleted", "forgotten_at": database_now(session)}
        session.execute(update(Checkpoint).where(Checkpoint.step == 1).values(over))
        for chunk_id in session.scalars(select(Chunk.id)).all():
            session.add(CollectCandidate(chunk_id=chunk_id, due_at=database_now(session)))
    sealed: list[str] = []
    with just_before(
        service,
        COPIES_ARE_LOCKED,
        lambda: sealed.append(save.seal(0, [b"weights", b"index weights"])["state"]),
    ):
        assert reconcile(service.context).done == 0
    assert sealed == ["committed"]
    assert states_of(service, b"weights", None) == ["verified"]


def two_copies(service: RunningService, clock: Clock) -> tuple[Copy, Copy]:
    save = Job(service.http(), world_size=2).begin(1)
    replies = [save.negotiate(rank, [b"shared"]) for rank in (0, 1)]
    for rank, reply in enumerate(replies):
        save.send([b"shared"], reply["chunks"])
        save.seal(rank, [b"shared"])
    clock.let_tickets_expire(service.context.settings)
    first, second = copies_of(service, b"shared", None)
    return first, second


@pytest.mark.rule("mark-before-delete")
def test_while_one_copy_is_read_again_the_others_stay(service: RunningService, clock: Clock) -> None:
    first, second = two_copies(service, clock)
    context = service.context
    flip(context.store.object_path(object_key(first.project_id, first.stored_digest, first)))
    with context.database.transaction() as session:
        copy, chunk = session.get_one(Copy, first.id), session.get_one(Chunk, first.chunk_id)
        claimed = claim(session, chunk, copy, seconds=60)
    # By the catalog the first one still serves everybody.
    assert collect(context, whole=True).done == 0
    assert settle(context, claimed, read_back(context, claimed), actor=SCRUB) == []
    assert states_of(service, b"shared", None) == ["bad", "verified"]
    assert bytes_of(service, second) == b"shared"


@MANY_WRITERS
@pytest.mark.rule("mark-before-delete")
def test_a_report_that_claims_a_copy_between_the_lock_and_the_question_is_seen(
    service: RunningService, clock: Clock
) -> None:
    first, second = two_copies(service, clock)
    context = service.context
    with context.database.transaction() as session:
        session.add(CollectCandidate(chunk_id=first.chunk_id, due_at=database_now(session)))
    claimed: list[Claim] = []

    def report() -> None:
        with context.database.transaction() as session:
            copy = session.execute(select(Copy).where(Copy.id == first.id).with_for_update()).scalar_one()
            chunk = session.get_one(Chunk, first.chunk_id)
            claimed.append(claim(session, chunk, copy, seconds=60))

    with just_before(service, COPIES_ARE_LOCKED, report):
        assert reconcile(context).done == 0
    assert settle(context, claimed[0], Finding.WRONG_BYTES, actor=SCRUB) == []
    assert states_of(service, b"shared", None) == ["bad", "verified"]
    assert bytes_of(service, second) == b"shared"


@pytest.mark.rule("report-is-suspicion")
def test_what_was_found_bad_goes_only_beside_a_copy_that_was_read_since(service: RunningService, clock: Clock) -> None:
    first, second = two_copies(service, clock)
    context = service.context
    with context.database.transaction() as session:
        now = database_now(session)
        session.execute(
            update(Copy).where(Copy.id == first.id).values(state="bad", bad_at=now, repaired_at=now, damage=1)
        )
    assert collect(context, whole=True).done == 0
    with context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.id == second.id).values(proof="read", read_after=1))
    assert collect(context, whole=True).done == 1
    assert states_of(service, b"shared", None) == ["verified"]
    assert bytes_of(service, second) == b"shared"
