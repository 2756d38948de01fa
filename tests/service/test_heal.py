"""Healing: another copy for what is bad, from any store or from whoever sends the same bytes anew; and marks that are
taken back only after the new bytes were read (protocol rules 15, 17 and 28)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import select

import holdfast_service.catalog.copying
import holdfast_service.collect.tick
import holdfast_service.scrub.mend_chunk
import holdfast_service.uploads.reserve
from holdfast_protocol.states import CopyState, Proof, StoreRole
from holdfast_service.catalog.audit import Actor
from holdfast_service.catalog.custody_tables import AuditEvent, ScrubTotal
from holdfast_service.catalog.reread import Finding, claim, settle
from holdfast_service.catalog.tables import Checkpoint, Chunk, Copy
from holdfast_service.clock import database_now
from holdfast_service.scrub import heal, rescrub
from holdfast_service.settings import ServiceSettings
from tests.service.conftest import Clock
from tests.support.interleave import hold_after, in_background, until_blocked_or_done
from tests.support.rank import Job, answer
from tests.support.rot import attached, copies_of, copy_to_second, flip, key_of, remove, stored
from tests.support.service import RunningService

DAY = 86400
CONTENT = b"weights of rank 0" * 1000


@pytest.fixture
def settings(settings: ServiceSettings, tmp_path: Path) -> ServiceSettings:
    return settings.model_copy(update={"second_store": f"posix://{tmp_path / 'second'}", "scrub_days": 30.0})


@pytest.fixture
def job(service: RunningService) -> Job:
    return Job(service.http())


@pytest.fixture
def damaged(service: RunningService, job: Job, clock: Clock) -> dict[str, Any]:
    """A checkpoint whose chunk is rotten in the first store, which was found, and good in the second."""
    saved = job.save(100, content=CONTENT)
    copy_to_second(service)
    flip(service.context.store, key_of(service, CONTENT))
    clock.advance(31 * DAY)
    assert rescrub.tick(service.context).bad == 1
    return saved


@pytest.fixture
def lost(service: RunningService, job: Job, clock: Clock) -> dict[str, Any]:
    """The same, and no other store has it."""
    saved = job.save(100, content=CONTENT)
    flip(service.context.store, key_of(service, CONTENT))
    clock.advance(31 * DAY)
    assert rescrub.tick(service.context).corrupt_checkpoints == (saved["id"],)
    assert heal.tick(service.context).lost_copies == 1
    clock.advance(61)  # what could not be healed is due again
    return saved


def health_of(service: RunningService, checkpoint_id: str) -> tuple[str, str | None]:
    with service.context.database.read() as session:
        row = session.get_one(Checkpoint, checkpoint_id)
        return row.health, row.health_reason


def states(service: RunningService, role: StoreRole = StoreRole.PRIMARY) -> list[str]:
    return [copy.state for copy in copies_of(service, CONTENT, role)]


def actions(service: RunningService) -> list[str]:
    """Of healing only, the oldest first."""
    with service.context.database.read() as session:
        return list(
            session.scalars(select(AuditEvent.action).where(AuditEvent.actor == "heal").order_by(AuditEvent.id))
        )


def let_tickets_expire(service: RunningService, clock: Clock) -> None:
    clock.advance(service.context.settings.ticket_seconds + service.context.settings.longest_upload_seconds + 1)


@pytest.mark.rule("protocol-17")
def test_a_rotten_copy_is_healed_from_the_other_store_in_a_generation_of_its_own(
    service: RunningService, damaged: dict[str, Any], clock: Clock
) -> None:
    report = heal.tick(service.context)
    assert (report.healed_copies, report.lost_copies, report.failed) == (1, 0, 0)
    rotten, new = copies_of(service, CONTENT)
    assert (rotten.state, rotten.healed_at is not None) == (CopyState.BAD, True)
    assert (new.state, new.proof) == (CopyState.VERIFIED, Proof.READ)
    assert new.generation != rotten.generation
    assert stored(service.context.store, key_of(service, CONTENT)) == CONTENT
    assert health_of(service, damaged["id"]) == ("ok", None)
    assert actions(service) == ["copy.heal"]
    assert heal.tick(service.context).idle
    let_tickets_expire(service, clock)
    holdfast_service.collect.tick.tick(service.context)
    assert CopyState.BAD not in states(service), "the collector takes what is rotten, once it is healed"
    assert stored(service.context.store, key_of(service, CONTENT)) == CONTENT
    with service.context.database.read() as session:
        total = session.get_one(ScrubTotal, service.context.store_id)
        assert (total.bad_copies, total.healed_copies) == (1, 1)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("protocol-17")
def test_a_new_copy_counts_only_once_it_was_read(
    service: RunningService, damaged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has said that it took the bytes, with their checksum, and has other ones."""
    real, spoiled = holdfast_service.scrub.mend_chunk.copy_now, []

    def takes_and_spoils(context: Any, task: Any, spend: Any) -> bool:
        copied = real(context, task, spend)
        if not spoiled:
            spoiled.append(task.target_key)
            flip(service.context.store, task.target_key)
        return copied

    monkeypatch.setattr(holdfast_service.scrub.mend_chunk, "copy_now", takes_and_spoils)
    assert heal.tick(service.context).healed_copies >= 1
    assert states(service)[0:2] == [CopyState.BAD, CopyState.BAD]
    assert stored(service.context.store, key_of(service, CONTENT)) == CONTENT
    assert health_of(service, damaged["id"])[0] == "ok"
    heal.tick(service.context)
    assert actions(service).count("copy.heal") == 2, "each of the rotten ones is healed"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_is_not_needed_any_more_is_not_healed(service: RunningService, damaged: dict[str, Any]) -> None:
    with service.context.database.transaction() as session:
        session.get_one(Checkpoint, damaged["id"]).state = "deleted"
    assert heal.tick(service.context).idle
    with service.context.database.read() as session:
        assert heal.backlog(session, service.context).due == 0


@pytest.mark.rule("protocol-15")
def test_without_another_copy_the_next_negotiate_is_told_to_send_it_and_the_mark_stays_until_it_was_read(
    service: RunningService, job: Job, lost: dict[str, Any]
) -> None:
    decision = answer(service.http().get(f"{job.base}/restore-point"))
    assert decision["restore_point"] is None
    assert [seen["reason"] for seen in decision["passed_over"]] == ["corrupt"]
    save = job.begin(200)
    assert save.negotiate(0, [CONTENT])["chunks"][0]["status"] == "upload"
    assert save.write(0, [CONTENT, b"index"])["state"] == "committed"
    assert health_of(service, lost["id"])[0] == "corrupt", "nobody has read the new copy yet"
    report = heal.tick(service.context)
    assert (report.healed_copies, report.healed_checkpoints) == (1, (lost["id"],))
    assert health_of(service, lost["id"]) == ("ok", None)
    assert actions(service) == ["copy.heal", "checkpoint.heal"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("protocol-17")
def test_what_is_sent_anew_and_rots_before_it_is_read_takes_no_mark_back(
    service: RunningService, job: Job, lost: dict[str, Any]
) -> None:
    assert job.save(200, content=CONTENT)["state"] == "committed"
    remove(service.context.store, key_of(service, CONTENT))
    report = heal.tick(service.context)
    assert (report.healed_copies, report.healed_checkpoints) == (0, ())
    assert health_of(service, lost["id"])[0] == "corrupt"
    assert states(service) == [CopyState.BAD, CopyState.BAD]


@pytest.mark.rule("protocol-17")
def test_a_new_copy_that_somebody_is_still_reading_takes_no_mark_back(
    service: RunningService, job: Job, lost: dict[str, Any]
) -> None:
    assert job.save(200, content=CONTENT)["state"] == "committed"
    new = copies_of(service, CONTENT)[-1]
    with service.context.database.transaction() as session:
        row, chunk = session.get_one(Copy, new.id), session.get_one(Chunk, new.chunk_id)
        reading = claim(session, chunk, row, database_now(session) + timedelta(seconds=60), suspect=False)
    assert heal.tick(service.context).healed_checkpoints == ()
    assert health_of(service, lost["id"])[0] == "corrupt"
    assert settle(service.context, reading, Finding.GOOD, Actor.controller("test")) == []
    assert heal.tick(service.context).healed_checkpoints == (lost["id"],)


@pytest.mark.rule("protocol-17")
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
    assert rescrub.tick(service.context).corrupt_checkpoints == (saved["id"],)
    with service.context.database.transaction() as session:
        session.get_one(Copy, copy.id).state = CopyState.VERIFIED
    flip(attached(service, StoreRole.SECOND).store, key_of(service, CONTENT, StoreRole.SECOND))
    heal.tick(service.context)
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
    rescrub.tick(service.context)
    assert {health_of(service, view["id"])[0] for view in saved.values()} == {"corrupt"}
    job.save(200, content=CONTENT)
    heal.tick(service.context)
    for health, view in saved.items():
        assert health_of(service, view["id"]) == (health, "loss spike")


class Killed(BaseException):
    """The process ends here."""


STEPS: dict[str, tuple[ModuleType, str]] = {
    "the bad copy was claimed": (holdfast_service.scrub.mend_chunk, "claim_damaged"),
    "a new copy was begun": (holdfast_service.scrub.mend_chunk, "_begin"),
    "its bytes were written": (holdfast_service.catalog.copying, "move_bytes"),
    "it was settled": (holdfast_service.scrub.mend_chunk, "copy_now"),
    "it was claimed to be read": (holdfast_service.scrub.mend_chunk, "_claim_another"),
    "it was read": (holdfast_service.scrub.mend_chunk, "_read"),
    "the bad copy was settled": (holdfast_service.scrub.mend_chunk, "_settle_healed"),
}


def kill_after(monkeypatch: pytest.MonkeyPatch, service: RunningService, module: ModuleType, name: str) -> None:
    """A process that ends when this function has done its work. Where that is a transaction's, it is committed."""
    real: Callable[..., Any] = getattr(module, name)
    run = service.context.database.run

    def then_dies(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if name == "_read" or result not in (None, False):  # reading gives nothing: its end is the step
            raise Killed
        return result

    def commits_and_dies(work: Callable[[Any], Any], **kwargs: Any) -> Any:
        died = False

        def noting(session: Any) -> Any:
            nonlocal died
            try:
                return work(session)
            except Killed:
                died = True
                return None

        result = run(noting, **kwargs)
        if died:
            raise Killed
        return result

    monkeypatch.setattr(module, name, then_dies)
    monkeypatch.setattr(holdfast_service.scrub.heal, "claim_damaged", holdfast_service.scrub.mend_chunk.claim_damaged)
    monkeypatch.setattr(service.context.database, "run", commits_and_dies)
    # What a killed process cannot do either.
    monkeypatch.setattr(holdfast_service.catalog.copying, "give_up_copy", lambda *_: None)


@pytest.mark.rule("protocol-28")
def test_a_healer_that_is_killed_after_any_step_is_followed_by_another(
    service: RunningService, job: Job, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (step, (module, name)) in enumerate(STEPS.items(), start=1):
        content = step.encode()
        saved = job.save(number, content=content)
        copy_to_second(service)
        flip(service.context.store, key_of(service, content))
        clock.advance(31 * DAY)
        assert rescrub.tick(service.context).bad == 1
        with monkeypatch.context() as broken:
            kill_after(broken, service, module, name)
            with pytest.raises(Killed):
                heal.tick(service.context)
        clock.advance(15 * 60)
        heal.tick(service.context)
        assert actions(service) == ["copy.heal"] * number, step
        good = [copy for copy in copies_of(service, content) if copy.state == CopyState.VERIFIED]
        assert [copy.proof for copy in good] == [Proof.READ], step
        assert stored(service.context.store, key_of(service, content)) == content
        assert health_of(service, saved["id"]) == ("ok", None)
    let_tickets_expire(service, clock)
    holdfast_service.collect.tick.tick(service.context)
    listed = [each.key.digest for each in service.context.store.list_objects(good[0].project_id)]
    assert len(listed) == len(set(listed)) == 2 * len(STEPS), "nothing is left behind"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("step", ["read_one", "heal_if_whole"])
def test_a_healer_that_is_killed_before_a_mark_is_gone_is_followed_by_another(
    service: RunningService, job: Job, lost: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    assert job.save(200, content=CONTENT)["state"] == "committed"
    with monkeypatch.context() as broken:
        broken.setattr(heal, "_mend_what_is_due", lambda *_: None)  # its own steps are killed above
        kill_after(broken, service, heal, step)
        with pytest.raises(Killed):
            heal.tick(service.context)
    clock.advance(15 * 60)
    heal.tick(service.context)
    assert health_of(service, lost["id"]) == ("ok", None)
    assert actions(service).count("checkpoint.heal") == 1


def test_two_healers_at_once_make_one_copy(
    service: RunningService, damaged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_after(monkeypatch, holdfast_service.catalog.copying, "move_bytes")
    with in_background(gate) as threads:
        first = threads.submit(heal.tick, service.context)
        gate.wait_until_reached()  # written and not settled
        assert heal.tick(service.context).healed_copies == 0
        gate.open()
        assert first.result().healed_copies == 1
    assert states(service) == [CopyState.BAD, CopyState.VERIFIED]
    assert actions(service) == ["copy.heal"]


def test_a_writer_that_comes_while_it_is_healed_sends_it_too_and_both_are_good(
    service: RunningService, job: Job, damaged: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_after(monkeypatch, holdfast_service.catalog.copying, "move_bytes")
    with in_background(gate) as threads:
        healing = threads.submit(heal.tick, service.context)
        gate.wait_until_reached()
        save = job.begin(200)
        (each,) = save.negotiate(0, [CONTENT])["chunks"]
        assert each["status"] == "upload", "a copy that is not there yet is not present"
        save.write(0, [CONTENT, b"index"])
        assert save.now()["state"] == "committed"
        gate.open()
        assert healing.result().healed_copies == 1
    assert states(service).count(CopyState.VERIFIED) == 2
    let_tickets_expire(service, clock)
    holdfast_service.collect.tick.tick(service.context)
    assert states(service).count(CopyState.VERIFIED) == 1
    assert stored(service.context.store, key_of(service, CONTENT)) == CONTENT


@pytest.mark.rule("protocol-15")
def test_a_negotiate_under_way_when_it_is_healed_relies_on_what_it_was_told(
    service: RunningService, job: Job, damaged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the chunk in share mode and has decided; the healer waits for it, or comes after it."""
    save = job.begin(200)
    save.negotiate(0)
    gate = hold_after(monkeypatch, holdfast_service.uploads.reserve, "_refer")
    with in_background(gate) as threads:
        writing = threads.submit(save.negotiate, 0, [CONTENT])
        gate.wait_until_reached()
        healing = threads.submit(heal.tick, service.context)
        until_blocked_or_done(service, healing)
        gate.open()
        assert writing.result()["chunks"][0]["status"] == "upload"
        assert healing.result().healed_copies == 1
    assert save.write(0, [CONTENT, b"index"])["state"] == "committed"


@pytest.mark.rule("protocol-28")
def test_a_collector_that_comes_while_it_is_healed_takes_nothing_of_it(
    service: RunningService, damaged: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_tickets_expire(service, clock)
    gate = hold_after(monkeypatch, holdfast_service.catalog.copying, "move_bytes")
    with in_background(gate) as threads:
        healing = threads.submit(heal.tick, service.context)
        gate.wait_until_reached()
        holdfast_service.collect.tick.tick(service.context)
        assert states(service) == [CopyState.BAD, CopyState.COPYING]
        gate.open()
        assert healing.result().healed_copies == 1
    assert stored(service.context.store, key_of(service, CONTENT)) == CONTENT
    assert health_of(service, damaged["id"])[0] == "ok"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("protocol-28")
def test_a_store_that_is_away_is_healed_when_it_is_back(
    service: RunningService, damaged: dict[str, Any], clock: Clock, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    second.rename(tmp_path / "unmounted")
    report = heal.tick(service.context)
    assert (report.healed_copies, report.failed + report.lost_copies) == (0, 1)
    (tmp_path / "unmounted").rename(second)
    attached(service, StoreRole.SECOND).watch.tick()
    clock.advance(61)
    assert heal.tick(service.context).healed_copies == 1
