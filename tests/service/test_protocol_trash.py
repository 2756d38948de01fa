"""The trash: how long, what is taken back, and that a purge deletes nothing that anybody still wants or reads (protocol
rules read-lease, trash-first, record-outbox and database-clock)."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

import holdfast_service.retention.purge
import holdfast_service.training.begin
from holdfast_service.collect.controller import reconcile as collect
from holdfast_service.db.tables.core import Checkpoint, Project
from holdfast_service.retention.purge import PurgeReport
from holdfast_service.stores.base import StoreUnavailable
from tests.service.conftest import Clock
from tests.support.interleave import hold_after, hold_before, in_background, overlap, refused, until_blocked_or_done
from tests.support.rank import Job, answer, digest_of
from tests.support.retention import (
    HOUR,
    RUN,
    apply,
    events,
    pin,
    plan,
    prune,
    purge,
    put_policy,
    state,
    states,
    stored_bytes,
    undelete,
)
from tests.support.service import RunningService


@pytest.fixture
def ids(service: RunningService) -> list[str]:
    """Three checkpoints; the first one may go."""
    job = Job(service.http())
    return [job.save(step)["id"] for step in (1, 2, 3)]


def read(service: RunningService, checkpoint_id: str) -> Any:
    """As a reader of step 1; the reply."""
    body = {"digests": [digest_of(b"demo/gpt 1 1 0")]}
    return answer(service.http().post(f"/v1/checkpoints/{checkpoint_id}/reads", json=body))


def write(service: RunningService, checkpoint_id: str, **columns: Any) -> None:
    """What another part of the service would write, so that each guard is tried by itself."""
    with service.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(**columns))


@pytest.mark.rule("trash-first")
def test_what_a_policy_expired_goes_after_an_hour_and_then_its_bytes_do(
    service: RunningService, clock: Clock, ids: list[str]
) -> None:
    put_policy(service, keep_last=2)
    shown = plan(service)
    before = stored_bytes(service)
    assert len(apply(service, shown)["trashed"]) == 1
    clock.advance(HOUR - 60)
    assert purge(service) == PurgeReport()
    assert read(service, ids[0])["chunks"][0]["kind"] != "gone"  # it can still be looked into
    clock.advance(2 * HOUR)
    settings = service.context.settings
    assert settings.ticket_seconds + settings.read_lease_seconds < 2 * HOUR
    assert purge(service) == PurgeReport(done=1)
    assert state(service, ids[0]) == "deleted"
    assert [(who, what) for who, what, _ in events(service, ids[0])][1:] == [
        ("purge", "checkpoint.purge"),
        ("purge", "checkpoint.delete"),
    ]
    clock.advance(settings.ticket_seconds + settings.longest_upload_seconds)
    collect(service.context)
    assert before - stored_bytes(service) == shown["freed"]["bytes"]
    with refused("chunk_gone"):
        read(service, ids[0])


@pytest.mark.rule("trash-first")
def test_what_a_person_deleted_can_be_taken_back_for_three_days(
    service: RunningService, clock: Clock, ids: list[str]
) -> None:
    done = prune(service, checkpoint_ids=[ids[0]], reason="too old")
    assert [one["step"] for one in done["trashed"]] == [1]
    view = answer(service.http().get(f"{RUN}/checkpoints/1"))
    assert (view["trashed_by"], view["trash_reason"]) == ("person", "too old")
    clock.advance(72 * HOUR - 60)
    assert purge(service) == PurgeReport()
    back = undelete(service, ids[0])
    assert (back["state"], back["purge_at"], back["pinned_at"]) == ("committed", None, None)
    assert undelete(service, ids[0])["etag"] == back["etag"], "twice is once"
    prune(service, checkpoint_ids=[ids[0]])
    clock.advance(72 * HOUR + 1)
    assert purge(service).done == 1
    with refused("chunk_gone"):
        undelete(service, ids[0])


def test_what_a_policy_expired_is_pinned_for_a_while_when_it_is_taken_back(
    service: RunningService, clock: Clock, ids: list[str]
) -> None:
    put_policy(service, keep_last=2)
    apply(service, plan(service))
    back = undelete(service, ids[0])
    assert back["pin_reason"] == "taken back from the trash"
    assert plan(service)["expired"] == 0
    clock.advance(72 * HOUR + 1)
    shown = answer(service.http().get(f"{RUN}/checkpoints/1"))
    listed = answer(service.http().get(f"{RUN}/checkpoints"))["items"]
    assert {shown["pinned_at"], *(each["pinned_at"] for each in listed)} == {None}, "a pin that is over keeps nothing"
    assert plan(service)["expired"] == 1
    apply(service, plan(service))
    assert undelete(service, ids[0], pin=False)["pinned_at"] is None
    assert plan(service)["expired"] == 1


@pytest.mark.rule("trash-first")
@pytest.mark.parametrize("short", ["disk", "quota", "quota of objects", "quota of rows"])
def test_where_room_is_short_only_what_a_policy_expired_goes_early(
    service: RunningService, monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    job = Job(service.http())
    ids = [job.save(step)["id"] for step in (1, 2, 3, 4)]
    prune(service, checkpoint_ids=[ids[1]])
    put_policy(service, keep_last=2)
    assert len(apply(service, plan(service))["trashed"]) == 1
    assert purge(service) == PurgeReport()
    if short == "quota":
        with service.context.database.transaction() as session:
            session.execute(update(Project).values(quota_bytes=int(stored_bytes(service) * 1.05)))
    elif short == "quota of objects":
        with service.context.database.transaction() as session:
            session.execute(update(Project).values(quota_objects=2 * len(ids)))
    elif short == "quota of rows":
        with service.context.database.transaction() as session:
            session.execute(update(Project).values(quota_rows=4 * len(ids)))
    else:
        usage = holdfast_service.retention.purge.shutil.disk_usage(Path("/"))
        full = usage._replace(used=95, free=5, total=100)
        monkeypatch.setattr(holdfast_service.retention.purge.shutil, "disk_usage", lambda _: full)
    assert purge(service) == PurgeReport(done=1)
    assert states(service) == {1: "deleted", 2: "trashed", 3: "committed", 4: "committed"}
    (told,) = [why or "" for _, what, why in events(service, ids[0]) if what == "checkpoint.purge"]
    assert told.startswith("retention policy of the run, version 1: purged before ")
    assert ("a store's disk is more than 90 % full" if short == "disk" else "more than 90 % of its quota") in told


@pytest.mark.rule("database-clock")
def test_time_in_which_nobody_could_look_into_the_trash_does_not_count(
    service: RunningService, clock: Clock, ids: list[str]
) -> None:
    prune(service, checkpoint_ids=[ids[0]])
    assert purge(service) == PurgeReport()
    clock.advance(100 * HOUR)  # the service was unavailable, or somebody set the clock
    report = holdfast_service.retention.purge.reconcile(service.context)
    assert report.moved_seconds > 99 * HOUR
    assert purge(service) == PurgeReport()
    clock.advance(72 * HOUR)
    assert purge(service) == PurgeReport(done=1)


@pytest.mark.rule("read-lease")
def test_a_purge_waits_for_readers_holds_and_pins(service: RunningService, clock: Clock, ids: list[str]) -> None:
    prune(service, checkpoint_ids=[ids[0]])
    clock.advance(72 * HOUR + 1)
    lease = read(service, ids[0])["lease_id"]
    assert purge(service) == PurgeReport()
    service.http().delete(f"/v1/read-leases/{lease}")
    write(service, ids[0], pinned_at=datetime.fromisoformat("2026-01-01T00:00:00+00:00"))
    assert purge(service) == PurgeReport()
    write(service, ids[0], pinned_at=None)
    write(service, ids[0], state="committed")
    held = answer(service.http().post(f"/v1/checkpoints/{ids[0]}/holds", json={"reason": "case 7"}))
    write(service, ids[0], state="trashed")
    assert purge(service) == PurgeReport()
    other = service.http(token=service.token())
    answer(other.post(f"/v1/holds/{held['id']}/release", json={"reason": "closed"}))
    assert purge(service) == PurgeReport(done=1)


def test_a_pin_is_shortened_replaced_or_taken_away_only_by_a_caller_that_has_seen_it(
    service: RunningService, ids: list[str]
) -> None:
    route = f"/v1/checkpoints/{ids[0]}/pin"
    first = answer(service.http().put(route, json={"reason": "paper", "expires_in_seconds": 3600}))
    # The reply was lost: the same again prolongs it a little, and needs no version.
    longer = answer(service.http().put(route, json={"reason": "paper", "expires_in_seconds": 7200}))
    for body in ({"reason": "paper", "expires_in_seconds": 60}, {"reason": "another"}):
        assert service.http().put(route, json=body).status_code == 428
        stale = service.http().put(route, json=body, headers={"If-Match": first["etag"]})
        assert (stale.status_code, stale.json()["code"]) == (412, "edit_conflict")
    assert service.http().delete(route).status_code == 428
    answer(service.http().delete(route, headers={"If-Match": longer["etag"]}))
    assert service.http().delete(route).status_code == 200, "it has none any more"


@pytest.mark.rule("read-lease")
@pytest.mark.parametrize("who", ["a reader", "a person who takes it back"])
def test_who_comes_between_the_look_and_the_lock_is_seen(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch, ids: list[str], who: str
) -> None:
    prune(service, checkpoint_ids=[ids[0]])
    clock.advance(72 * HOUR + 1)
    gate = hold_after(monkeypatch, holdfast_service.retention.purge, "_ids")
    with in_background(gate) as sides:
        purging = sides.submit(purge, service)
        gate.wait_until_reached()
        if who == "a reader":
            read(service, ids[0])
        else:
            undelete(service, ids[0])
        gate.open()
        assert purging.result() == PurgeReport()
    assert state(service, ids[0]) == ("trashed" if who == "a reader" else "committed")


@pytest.mark.rule("read-lease")
@pytest.mark.parametrize("who", ["a reader", "a person who takes it back"])
def test_who_comes_after_the_lock_is_told_that_it_is_gone(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch, ids: list[str], who: str
) -> None:
    prune(service, checkpoint_ids=[ids[0]])
    clock.advance(72 * HOUR + 1)
    gate = hold_before(monkeypatch, holdfast_service.retention.purge, "_tell")
    with in_background(gate) as sides:
        purging = sides.submit(purge, service)
        gate.wait_until_reached()
        coming = sides.submit(read if who == "a reader" else undelete, service, ids[0])
        until_blocked_or_done(service, coming)
        assert not coming.done()
        gate.open()
        assert purging.result() == PurgeReport(done=1)
        with refused("chunk_gone"):
            coming.result()


@pytest.mark.rule("record-outbox")
def test_no_chunk_goes_while_the_record_beside_the_data_cannot_be_removed(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch, ids: list[str]
) -> None:
    prune(service, checkpoint_ids=[ids[0]])
    clock.advance(72 * HOUR + 1)

    def unavailable(*_: Any) -> None:
        raise StoreUnavailable("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(holdfast_service.retention.purge, "remove_record", unavailable)
        assert purge(service) == PurgeReport(failed=1, error="no answer")
        assert state(service, ids[0]) == "deleting"
        before = stored_bytes(service)
        collect(service.context)
        assert stored_bytes(service) == before
        with refused("chunk_gone"):  # from here on nobody can take it back
            undelete(service, ids[0])
    # Killed after the record was removed, and before the catalog says so: both once more.
    with monkeypatch.context() as broken:
        broken.setattr(holdfast_service.retention.purge, "_tell", unavailable)
        assert purge(service).failed == 1
    assert purge(service) == PurgeReport(done=1)
    collect(service.context)
    assert stored_bytes(service) < before


@pytest.mark.rule("trash-first")
def test_a_step_that_was_saved_anew_is_not_taken_back_beside_it(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(service.http())
    ids = [job.save(step)["id"] for step in (1, 2, 3)]
    prune(service, checkpoint_ids=[ids[0]])
    gate = hold_after(monkeypatch, holdfast_service.training.begin, "_insert")
    beginning, coming = overlap(service, gate, lambda: job.begin(1), lambda: undelete(service, ids[0]))
    anew = beginning.result()
    with refused("checkpoint_conflict"):
        coming.result()
    anew.abort()
    assert undelete(service, ids[0])["state"] == "committed"
    with refused("checkpoint_conflict"):
        answer(service.http().post(f"/v1/checkpoints/{anew.id}/undelete", json={}))


@pytest.mark.rule("trash-first")
def test_a_person_deletes_by_a_filter_what_may_go_and_is_told_what_stays(service: RunningService) -> None:
    job = Job(service.http())
    ids = {step: job.save(step)["id"] for step in (1, 2, 3, 4, 5)}
    edit = {"labels": ["old"], "health": "diverged", "health_reason": "spike"}
    answer(service.http().patch(f"/v1/checkpoints/{ids[3]}", json=edit, headers={"If-Match": "*"}))
    pin(service, ids[2])
    dry = prune(service, filter={"before_step": 5}, dry_run=True)
    assert [one["step"] for one in dry["trashed"]] == [3, 1]
    assert dry["purge_at"] is not None
    assert {one["step"]: one["reasons"][0]["kind"] for one in dry["left"]} == {4: "newest_healthy", 2: "pinned"}
    assert set(states(service).values()) == {"committed"}
    assert [one["step"] for one in prune(service, filter={"labels": ["old", "x"]}, dry_run=True)["trashed"]] == [3]
    assert prune(service, filter={"older_than_seconds": 3600})["trashed"] == []
    # Only what was shown, of what still matches.
    done = prune(service, filter={"health": ["diverged"]}, checkpoint_ids=[ids[1], ids[3]], reason="spikes")
    assert [one["step"] for one in done["trashed"]] == [3]
    assert events(service, ids[3])[-1][1:] == ("checkpoint.trash", "spikes")
    assert dry["freed"]["bytes"] > done["freed"]["bytes"] > 0


@pytest.mark.rule("trash-first")
def test_what_is_named_and_must_stay_refuses_the_call_by_name(service: RunningService, ids: list[str]) -> None:
    with refused("checkpoint_protected") as protected:
        prune(service, checkpoint_ids=ids)
    assert "step 3 of attempt 1 (the restore point, one of the two newest healthy points)" in protected.value.detail
    held = answer(service.http().post(f"/v1/checkpoints/{ids[0]}/holds", json={"reason": "case 7"}))
    with refused("checkpoint_held"):
        prune(service, checkpoint_ids=[ids[0]])
    answer(service.http(token=service.token()).post(f"/v1/holds/{held['id']}/release", json={"reason": "closed"}))
    with refused("checkpoint_not_found"):
        prune(service, checkpoint_ids=[f"ck_{'0' * 32}"])
    with refused("invalid_request"):
        prune(service)
    assert len(prune(service, checkpoint_ids=[ids[0]])["trashed"]) == 1
    assert prune(service, checkpoint_ids=[ids[0]])["trashed"] == [], "the reply was lost"
    assert set(states(service).values()) == {"committed", "trashed"}


@pytest.mark.rule("trash-first")
def test_all_of_a_run_goes_only_when_nobody_is_at_it(service: RunningService) -> None:
    job = Job(service.http())
    first = job.save(1)["id"]
    job.save(2)
    with refused("checkpoint_protected"):
        prune(service, filter={}, all_of_run=True)
    job.end()
    pin(service, first)
    done = prune(service, filter={}, all_of_run=True)
    assert ([one["step"] for one in done["trashed"]], [one["step"] for one in done["left"]]) == ([2], [1])
