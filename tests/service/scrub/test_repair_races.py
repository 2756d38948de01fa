"""A repairer beside another, a writer, a collector, a reader of the new copy (rules present-is-referenced,
random-generation and row-before-copy)."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast_service.collect.controller
import holdfast_service.copies.copy_chunk
import holdfast_service.training.negotiate
from holdfast_protocol.states import CopyState
from holdfast_service.audit.record import Actor
from holdfast_service.copies.read_back import Finding, claim, settle
from holdfast_service.db.tables.core import Chunk, Copy
from holdfast_service.scrub import repair
from tests.service.conftest import Clock
from tests.support.interleave import hold_after, in_background, overlap
from tests.support.rank import Job
from tests.support.repairing import CONTENT, actions, health_of
from tests.support.rot import copies_of, key_of, states_of, stored
from tests.support.service import RunningService


def test_two_healers_at_once_make_one_copy(
    service: RunningService, damaged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_after(monkeypatch, holdfast_service.copies.copy_chunk, "move_bytes")
    with in_background(gate) as threads:
        first = threads.submit(repair.reconcile, service.context)
        gate.wait_until_reached()  # written and not settled
        assert repair.reconcile(service.context).repaired_copies == 0
        gate.open()
        assert first.result().repaired_copies == 1
    assert states_of(service, CONTENT) == [CopyState.BAD, CopyState.VERIFIED]
    assert actions(service) == ["copy.repair"]


def test_a_writer_that_comes_while_it_is_repaired_sends_it_too_and_both_are_good(
    service: RunningService, job: Job, damaged: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_after(monkeypatch, holdfast_service.copies.copy_chunk, "move_bytes")
    with in_background(gate) as threads:
        repairing = threads.submit(repair.reconcile, service.context)
        gate.wait_until_reached()
        save = job.begin(200)
        (each,) = save.negotiate(0, [CONTENT])["chunks"]
        assert each["status"] == "upload", "a copy that is not there yet is not present"
        save.write(0, [CONTENT, b"index"])
        assert save.now()["state"] == "committed"
        gate.open()
        assert repairing.result().repaired_copies == 1
    assert states_of(service, CONTENT).count(CopyState.VERIFIED) == 2
    clock.let_tickets_expire(service.context.settings)
    holdfast_service.collect.controller.reconcile(service.context)
    assert states_of(service, CONTENT).count(CopyState.VERIFIED) == 1
    assert stored(service.context.store, key_of(service, CONTENT)) == CONTENT


@pytest.mark.rule("present-is-referenced")
def test_a_negotiate_under_way_when_it_is_repaired_relies_on_what_it_was_told(
    service: RunningService, job: Job, damaged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the chunk in share mode and has decided; the repairer waits for it, or comes after it."""
    save = job.begin(200)
    save.negotiate(0)
    gate = hold_after(monkeypatch, holdfast_service.training.negotiate, "_refer")
    writing, repairing = overlap(
        service, gate, lambda: save.negotiate(0, [CONTENT]), lambda: repair.reconcile(service.context)
    )
    assert writing.result()["chunks"][0]["status"] == "upload"
    assert repairing.result().repaired_copies == 1
    assert save.write(0, [CONTENT, b"index"])["state"] == "committed"


@pytest.mark.rule("row-before-copy")
def test_a_collector_that_comes_while_it_is_repaired_takes_nothing_of_it(
    service: RunningService, damaged: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.let_tickets_expire(service.context.settings)
    gate = hold_after(monkeypatch, holdfast_service.copies.copy_chunk, "move_bytes")
    with in_background(gate) as threads:
        repairing = threads.submit(repair.reconcile, service.context)
        gate.wait_until_reached()
        holdfast_service.collect.controller.reconcile(service.context)
        assert states_of(service, CONTENT) == [CopyState.BAD, CopyState.COPYING]
        gate.open()
        assert repairing.result().repaired_copies == 1
    assert stored(service.context.store, key_of(service, CONTENT)) == CONTENT
    assert health_of(service, damaged["id"])[0] == "ok"


@pytest.mark.rule("random-generation")
def test_a_new_copy_that_somebody_is_still_reading_takes_no_mark_back(
    service: RunningService, job: Job, lost: dict[str, Any]
) -> None:
    assert job.save(200, content=CONTENT)["state"] == "committed"
    new = copies_of(service, CONTENT)[-1]
    with service.context.database.transaction() as session:
        row, chunk = session.get_one(Copy, new.id), session.get_one(Chunk, new.chunk_id)
        reading = claim(session, chunk, row, seconds=60)
    assert repair.reconcile(service.context).repaired_checkpoints == ()
    assert health_of(service, lost["id"])[0] == "corrupt"
    assert settle(service.context, reading, Finding.GOOD, Actor.controller("test")) == []
    assert repair.reconcile(service.context).repaired_checkpoints == (lost["id"],)
