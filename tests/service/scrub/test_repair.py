"""Repairing: another copy for what is bad, from any store or from whoever sends the same bytes anew; and marks that are
taken back only after the new bytes were read (rules present-is-referenced, random-generation and row-before-copy)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast_service.collect.controller
import holdfast_service.scrub.repair
from holdfast_protocol.states import CopyState, Proof, StoreRole
from holdfast_service.db.tables.core import Checkpoint, Copy
from holdfast_service.db.tables.operations import ScrubTotal
from holdfast_service.scrub import controller as rescrub
from holdfast_service.scrub import repair
from tests.service.conftest import Clock
from tests.support.rank import Job, answer
from tests.support.repairing import CONTENT, DAY, actions, health_of
from tests.support.rot import attached, copies_of, copy_to_second, flip, key_of, remove, states_of, stored
from tests.support.service import RunningService


@pytest.mark.rule("random-generation")
def test_a_rotten_copy_is_repaired_from_the_other_store_in_a_generation_of_its_own(
    service: RunningService, damaged: dict[str, Any], clock: Clock
) -> None:
    report = repair.reconcile(service.context)
    assert (report.repaired_copies, report.lost_copies, report.failed) == (1, 0, 0)
    rotten, new = copies_of(service, CONTENT)
    assert (rotten.state, rotten.repaired_at is not None) == (CopyState.BAD, True)
    assert (new.state, new.proof) == (CopyState.VERIFIED, Proof.READ)
    assert new.generation != rotten.generation
    assert stored(service.context.store, key_of(service, CONTENT)) == CONTENT
    assert health_of(service, damaged["id"]) == ("ok", None)
    assert actions(service) == ["copy.repair"]
    assert repair.reconcile(service.context).idle
    clock.let_tickets_expire(service.context.settings)
    holdfast_service.collect.controller.reconcile(service.context)
    assert CopyState.BAD not in states_of(service, CONTENT), "the collector takes what is rotten, once it is repaired"
    assert stored(service.context.store, key_of(service, CONTENT)) == CONTENT
    with service.context.database.read() as session:
        total = session.get_one(ScrubTotal, service.context.store_id)
        assert (total.bad_copies, total.repaired_copies) == (1, 1)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("random-generation")
def test_a_new_copy_counts_only_once_it_was_read(
    service: RunningService, damaged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has said that it took the bytes, with their checksum, and has other ones."""
    real, spoiled = holdfast_service.scrub.repair.copy_now, []

    def takes_and_spoils(context: Any, task: Any, acquire: Any) -> bool:
        copied = real(context, task, acquire)
        if not spoiled:
            spoiled.append(task.target_key)
            flip(service.context.store, task.target_key)
        return copied

    monkeypatch.setattr(holdfast_service.scrub.repair, "copy_now", takes_and_spoils)
    assert repair.reconcile(service.context).repaired_copies >= 1
    assert states_of(service, CONTENT)[0:2] == [CopyState.BAD, CopyState.BAD]
    assert stored(service.context.store, key_of(service, CONTENT)) == CONTENT
    assert health_of(service, damaged["id"])[0] == "ok"
    repair.reconcile(service.context)
    assert actions(service).count("copy.repair") == 2, "each of the rotten ones is repaired"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_is_not_needed_any_more_is_not_repaired(service: RunningService, damaged: dict[str, Any]) -> None:
    with service.context.database.transaction() as session:
        session.get_one(Checkpoint, damaged["id"]).state = "deleted"
    assert repair.reconcile(service.context).idle
    with service.context.database.read() as session:
        assert repair.backlog(session, service.context).due == 0


@pytest.mark.rule("present-is-referenced")
def test_without_another_copy_the_next_negotiate_is_told_to_send_it_and_the_mark_stays_until_it_was_read(
    service: RunningService, job: Job, lost: dict[str, Any]
) -> None:
    decision = answer(service.http().get(f"{job.base}/restore-point"))
    assert decision["restore_point"] is None
    assert [seen["reason"] for seen in decision["skipped"]] == ["corrupt"]
    save = job.begin(200)
    assert save.negotiate(0, [CONTENT])["chunks"][0]["status"] == "upload"
    assert save.write(0, [CONTENT, b"index"])["state"] == "committed"
    assert health_of(service, lost["id"])[0] == "corrupt", "nobody has read the new copy yet"
    report = repair.reconcile(service.context)
    assert (report.repaired_copies, report.repaired_checkpoints) == (1, (lost["id"],))
    assert health_of(service, lost["id"]) == ("ok", None)
    assert actions(service) == ["copy.repair", "checkpoint.repair"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("random-generation")
def test_what_is_sent_anew_and_rots_before_it_is_read_takes_no_mark_back(
    service: RunningService, job: Job, lost: dict[str, Any]
) -> None:
    assert job.save(200, content=CONTENT)["state"] == "committed"
    remove(service.context.store, key_of(service, CONTENT))
    report = repair.reconcile(service.context)
    assert (report.repaired_copies, report.repaired_checkpoints) == (0, ())
    assert health_of(service, lost["id"])[0] == "corrupt"
    assert states_of(service, CONTENT) == [CopyState.BAD, CopyState.BAD]


@pytest.mark.rule("random-generation")
def test_a_copy_elsewhere_takes_the_mark_back_only_after_it_was_read(
    service: RunningService, job: Job, clock: Clock
) -> None:
    """Two stores; the second one's copy was not known while the first one's was lost."""
    saved = job.save(100, content=CONTENT)
    copy_to_second(service)
    with service.context.database.transaction() as session:
        (copy,) = copies_of(service, CONTENT, StoreRole.SECOND)
        session.get_one(Copy, copy.id).state = CopyState.PENDING
    remove(service.context.store, key_of(service, CONTENT))
    clock.advance(31 * DAY)
    assert rescrub.reconcile(service.context).corrupt_checkpoints == (saved["id"],)
    with service.context.database.transaction() as session:
        session.get_one(Copy, copy.id).state = CopyState.VERIFIED
    flip(attached(service, StoreRole.SECOND).store, key_of(service, CONTENT, StoreRole.SECOND))
    repair.reconcile(service.context)
    assert health_of(service, saved["id"])[0] == "corrupt", "its bytes were read, and they are rotten too"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_health_under_the_mark_comes_back(service: RunningService, job: Job, clock: Clock) -> None:
    saved = {health: job.save(step, content=CONTENT) for step, health in enumerate(("quarantined", "diverged"))}
    with service.context.database.transaction() as session:
        for health, view in saved.items():
            row = session.get_one(Checkpoint, view["id"])
            row.health, row.health_reason = health, "loss spike"
    flip(service.context.store, key_of(service, CONTENT))
    clock.advance(31 * DAY)
    rescrub.reconcile(service.context)
    assert {health_of(service, view["id"])[0] for view in saved.values()} == {"corrupt"}
    job.save(200, content=CONTENT)
    repair.reconcile(service.context)
    for health, view in saved.items():
        assert health_of(service, view["id"]) == (health, "loss spike")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("row-before-copy")
def test_a_store_that_is_unavailable_is_repaired_when_it_is_back(
    service: RunningService, damaged: dict[str, Any], clock: Clock, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    second.rename(tmp_path / "unmounted")
    report = repair.reconcile(service.context)
    assert (report.repaired_copies, report.failed + report.lost_copies) == (0, 1)
    (tmp_path / "unmounted").rename(second)
    attached(service, StoreRole.SECOND).watch.reconcile()
    clock.advance(61)
    assert repair.reconcile(service.context).repaired_copies == 1
