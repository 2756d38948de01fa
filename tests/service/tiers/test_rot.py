"""What lies cold rots too, or is moved behind the service's back: it is found before anybody relies on it (protocol
rules reuse-only-hashed, present-is-referenced and row-before-copy)."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, update

from holdfast_protocol.states import CopyState, StoreRole
from holdfast_service.audit.record import Actor
from holdfast_service.collect.orphans import make_suspect, sweep_store
from holdfast_service.copies.predicates import object_key
from holdfast_service.copies.read_back import Finding, claim_bad, look_again
from holdfast_service.db.tables.core import Checkpoint, Copy
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.scrub import controller as rescrub
from holdfast_service.scrub import repair
from holdfast_service.scrub import verify as prove
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import ObjectKey, Store, StoreUnavailable
from holdfast_service.tiers.controller import reconcile
from tests.support.rank import Job, Refused, answer, digest_of
from tests.support.rot import attached, copies_of, copy_to_second, flip, key_of, remove, stored
from tests.support.tiers import DAY, HOUR, IN_A_BUCKET, IN_A_FOLDER, Cold, weights

OTHER = "demo/other"


@pytest.fixture
def settings(settings: ServiceSettings, tmp_path: Path, request: pytest.FixtureRequest) -> ServiceSettings:
    if "second_store" in request.node.name:
        return settings.model_copy(update={"second_store": f"posix://{tmp_path / 'second'}"})
    return settings.model_copy(update={"scrub_days": 30.0})


def only_copy(cold: Cold) -> Copy:
    role = StoreRole.COLD if cold.fake is None else StoreRole.PRIMARY
    (copy,) = (each for each in copies_of(cold.service, weights(1), role) if each.state == CopyState.COLD)
    return copy


def rot(cold: Cold) -> None:
    copy = only_copy(cold)
    flip(attached(cold.service, StoreRole.COLD).store, object_key(copy.project_id, digest_of(weights(1)), copy))


def sent_again(cold: Cold) -> None:
    """Another run sends the same bytes, which get cold there too."""
    job = Job(cold.http, run=OTHER)
    job.save(1, content=weights(1))
    for step in (2, 3):
        job.save(step)
    cold.policy(run=OTHER)
    cold.advance(8 * DAY)


def set_state(cold: Cold, copy_id: int, state: CopyState) -> None:
    with cold.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.id == copy_id).values(state=state, leased_until=None))


@IN_A_FOLDER
@pytest.mark.rule("present-is-referenced")
def test_a_hot_copy_does_not_go_in_favour_of_a_cold_one_that_has_rotted(cold: Cold) -> None:
    cold.cooled()
    cold.collect()
    rot(cold)
    sent_again(cold)
    cold.until_idle()
    cold.collect()
    # The bad one was found by the look at it; another one was made of the hot copy, and only then that one went.
    assert cold.copies(weights(1)) == [("bad", "cold"), ("cold", "cold")]
    new = only_copy(cold)
    store = attached(cold.service, StoreRole.COLD).store
    assert stored(store, object_key(new.project_id, digest_of(weights(1)), new)) == weights(1)
    assert (cold.view(1, OTHER)["tier"], cold.view(1, OTHER)["health"]) == ("cold", "ok")
    # The new one is read where it lies, and then the bad one goes.
    assert repair.reconcile(cold.context).repaired_copies == 1
    cold.advance(DAY)  # the collector looks at every copy once in a while
    cold.collect()
    assert cold.copies(weights(1)) == [("cold", "cold")]


@IN_A_FOLDER
@pytest.mark.rule("present-is-referenced")
def test_a_place_that_cannot_be_asked_keeps_the_hot_copy(cold: Cold, monkeypatch: pytest.MonkeyPatch) -> None:
    cold.cooled()
    cold.collect()
    sent_again(cold)

    def unavailable(*_: object) -> None:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(attached(cold.service, StoreRole.COLD).store, "open_read", unavailable)
    report = reconcile(cold.context)
    assert (report.failed > 0, report.error) == (True, "no answer")
    assert ("verified", "primary") in cold.copies(weights(1))
    assert only_copy(cold).leased_until is None
    monkeypatch.undo()


@IN_A_FOLDER
@pytest.mark.rule("reuse-only-hashed")
def test_what_lies_in_the_cold_store_is_scrubbed_and_a_thaw_of_what_has_rotted_says_so(cold: Cold) -> None:
    cold.cooled()
    cold.collect()
    checkpoint = cold.view(1)["id"]
    cold.advance(31 * DAY)
    assert rescrub.reconcile(cold.context).bad == 0
    assert (only_copy(cold).state, only_copy(cold).proof) == ("cold", "read"), "what was read is still cold"
    rot(cold)
    cold.thaw(1)
    assert reconcile(cold.context).failed
    assert cold.copies(weights(1))[0] == ("suspect", "cold")
    assert prove.reconcile(cold.context).corrupt_checkpoints == (checkpoint,)


@IN_A_FOLDER
@pytest.mark.rule("reuse-only-hashed")
def test_a_round_of_scrubbing_finds_rot_in_the_cold_store(cold: Cold) -> None:
    cold.cooled()
    cold.collect()
    rot(cold)
    cold.advance(31 * DAY)
    report = rescrub.reconcile(cold.context)
    assert (report.bad, report.corrupt_checkpoints) == (1, (cold.view(1)["id"],))


def sent_anew(cold: Cold) -> Job:
    """What lies cold is hot too, for another run that has sent the same bytes."""
    cold.cooled()
    cold.collect()
    job = Job(cold.http, run=OTHER)
    job.save(1, content=weights(1))
    return job


@IN_A_FOLDER
@pytest.mark.rule("marks-are-rechecked")
def test_a_checkpoint_that_got_cold_by_a_bad_hot_copy_is_hot_once_that_is_repaired(cold: Cold) -> None:
    job = sent_anew(cold)
    flip(cold.context.store, key_of(cold.service, weights(1)))
    cold.advance(31 * DAY)
    report = rescrub.reconcile(cold.context)
    assert (report.bad, report.corrupt_checkpoints) == (1, ())
    assert cold.tier(1, OTHER) == "cold"
    assert answer(cold.http.get(f"{job.base}/restore-point"))["restore_point"] is None
    assert repair.reconcile(cold.context).repaired_copies == 1
    assert cold.tier(1, OTHER) == "hot"
    assert answer(cold.http.get(f"{job.base}/restore-point"))["restore_point"]["step"] == 1
    with cold.context.database.read() as session:
        told = select(AuditEvent.action).where(AuditEvent.checkpoint_id == cold.view(1, OTHER)["id"])
        assert session.scalars(told.order_by(AuditEvent.id)).all() == ["checkpoint.cool", "checkpoint.readable"]
    assert cold.tier(1) == "cold", "what its policy has moved stays where it belongs"


@IN_A_FOLDER
@pytest.mark.rule("marks-are-rechecked")
def test_it_is_hot_as_well_when_the_bad_copy_has_the_right_bytes_again(cold: Cold) -> None:
    sent_anew(cold)
    key = key_of(cold.service, weights(1))
    flip(cold.context.store, key)
    cold.advance(31 * DAY)
    assert rescrub.reconcile(cold.context).bad == 1
    assert cold.tier(1, OTHER) == "cold"
    flip(cold.context.store, key)
    (bad,) = (copy for copy in copies_of(cold.service, weights(1)) if copy.state == CopyState.BAD)
    claimed = cold.context.database.run(lambda session: claim_bad(session, cold.context, bad.id))
    assert claimed is not None
    assert look_again(cold.context, claimed, repair.REPAIR) is Finding.GOOD
    assert cold.tier(1, OTHER) == "hot"


@IN_A_FOLDER
@pytest.mark.rule("report-is-suspicion")
def test_a_process_that_lacks_the_second_store_calls_nothing_cold_that_can_be_read_there(cold: Cold) -> None:
    sent_anew(cold)
    assert copy_to_second(cold.service)
    flip(cold.context.store, key_of(cold.service, weights(1)))
    (hot,) = (copy for copy in copies_of(cold.service, weights(1)) if copy.state == CopyState.VERIFIED)
    lacking = open_service(cold.context.settings.model_copy(update={"second_store": None}))
    try:
        assert make_suspect(lacking, [hot.id]) == {hot.id}
        cold.advance(1)
        assert prove.reconcile(lacking).bad == 1
    finally:
        close_service(lacking)
    assert cold.tier(1, OTHER) == "hot"


@IN_A_BUCKET
@pytest.mark.rule("present-is-referenced")
def test_a_hot_copy_does_not_go_in_favour_of_one_that_the_bucket_has_lost_or_moved(cold: Cold) -> None:
    assert cold.fake is not None
    cold.cooled()
    cold.collect()
    names = [name for name in cold.fake.objects.names("") if digest_of(weights(1)) in name]
    assert len(names) == 1
    cold.fake.objects.delete(names[0])
    sent_again(cold)
    cold.until_idle()
    cold.collect()
    assert cold.copies(weights(1)) == [("bad", "archive"), ("cold", "archive")]
    assert len([name for name in cold.fake.objects.names("") if digest_of(weights(1)) in name]) == 1


@IN_A_BUCKET
@pytest.mark.rule("marks-are-rechecked")
def test_a_mark_goes_by_what_the_bucket_says_of_an_archived_copy_which_stands_for_no_hot_one(cold: Cold) -> None:
    cold.cooled()
    cold.collect()
    save = Job(cold.http, run=OTHER).begin(1)
    save.write(0, [weights(1), b"index"])

    def found_bad(data: bytes, damage: Callable[[Store, ObjectKey], None]) -> ObjectKey:
        key = key_of(cold.service, data)
        damage(cold.context.store, key)
        (hot,) = (copy for copy in copies_of(cold.service, data) if copy.state == CopyState.VERIFIED)
        assert make_suspect(cold.context, [hot.id]) == {hot.id}
        cold.advance(1)
        assert prove.reconcile(cold.context).bad == 1
        return key

    found_bad(weights(1), remove)
    assert (cold.tier(1, OTHER), cold.view(1, OTHER)["health"]) == ("cold", "ok")
    index = found_bad(b"index", flip)
    assert repair.reconcile(cold.context).repaired_checkpoints == ()
    assert cold.view(1, OTHER)["health"] == "corrupt"
    flip(cold.context.store, index)  # it has the right bytes again
    cold.advance(HOUR)
    report = repair.reconcile(cold.context)
    assert (report.repaired_checkpoints, report.failed) == ((save.id,), 0)
    assert (cold.tier(1, OTHER), cold.view(1, OTHER)["health"]) == ("cold", "ok")
    assert cold.copies(weights(1)) == [("cold", "archive"), ("bad", "primary")]
    Job(cold.http, run="demo/third").save(1, content=weights(1))
    cold.advance(HOUR)
    assert repair.reconcile(cold.context).repaired_copies == 1
    assert cold.tier(1, OTHER) == "hot"


@IN_A_BUCKET
@pytest.mark.rule("row-before-copy")
def test_with_a_second_store_a_copy_repaired_into_an_archive_is_cold_and_counts_by_the_stores_own_checksum(
    cold: Cold,
) -> None:
    assert cold.fake is not None
    job = Job(cold.http)
    for step in (1, 2, 3):
        job.save(step)
    copy_to_second(cold.service)
    cold.policy()
    cold.advance(8 * DAY)
    cold.round()
    cold.collect()
    lost = only_copy(cold)
    cold.context.store.delete(object_key(lost.project_id, digest_of(weights(1)), lost))
    assert make_suspect(cold.context, [lost.id]) == {lost.id}
    cold.advance(1)
    assert prove.reconcile(cold.context).bad == 1
    report = repair.reconcile(cold.context)
    assert (report.repaired_copies, report.failed) == (1, 0)
    assert cold.copies(weights(1)) == [("verified", "second"), ("bad", "archive"), ("cold", "archive")]
    assert repair.reconcile(cold.context).idle
    cold.advance(DAY)
    cold.collect()
    assert cold.copies(weights(1)) == [("verified", "second"), ("cold", "archive")]
    assert cold.content(1, weights(1)) == weights(1)
    negotiated = Job(cold.http, run=OTHER).begin(1).negotiate(0, [weights(1)])["chunks"]
    assert [each["status"] for each in negotiated] == ["upload"], "what is cold is never present"


@IN_A_BUCKET
@pytest.mark.rule("row-before-copy")
def test_with_a_second_store_a_bad_copy_goes_although_what_has_repaired_it_was_archived_since(cold: Cold) -> None:
    job = Job(cold.http)
    for step in (1, 2, 3):
        job.save(step)
    copy_to_second(cold.service)
    flip(cold.context.store, key_of(cold.service, weights(1)))
    (hot,) = copies_of(cold.service, weights(1))
    assert make_suspect(cold.context, [hot.id]) == {hot.id}
    cold.advance(1)
    assert prove.reconcile(cold.context).bad == 1
    assert repair.reconcile(cold.context).repaired_copies == 1
    cold.policy()
    cold.advance(8 * DAY)
    cold.round()
    cold.collect()
    assert cold.copies(weights(1)) == [("verified", "second"), ("cold", "archive")]


@IN_A_BUCKET
@pytest.mark.rule("read-lease")
def test_what_was_moved_to_another_archive_is_thawed_from_there(cold: Cold) -> None:
    assert cold.fake is not None
    cold.cooled()
    cold.collect()
    everything = cold.fake.objects._stored
    for name, found in everything.items():
        if found.storage_class == "GLACIER":
            everything[name] = replace(found, storage_class="DEEP_ARCHIVE")
    cold.thaw(1, days=2)
    cold.round()
    assert cold.copies(weights(1)) == [("cold", "deep_archive")]
    assert cold.tier(1) == "thawing"
    cold.thawed(1, days=2)
    assert cold.content(1, weights(1)) == weights(1)


@IN_A_BUCKET
@pytest.mark.rule("read-lease")
def test_a_suspect_copy_in_an_archive_is_not_readable_and_holds_up_nobody(cold: Cold) -> None:
    cold.cooled()
    cold.collect()
    set_state(cold, only_copy(cold).id, CopyState.SUSPECT)
    with pytest.raises(Refused, match="checkpoint_cold"):
        cold.tickets(1, weights(1))
    report = prove.reconcile(cold.context)
    assert (report.failed, report.done) == (0, 0)
    assert cold.copies(weights(1)) == [("cold", "archive")]
    # What is thawed is read, and is still for readers only.
    cold.thawed(1, days=2)
    set_state(cold, only_copy(cold).id, CopyState.SUSPECT)
    assert cold.content(1, weights(1)) == weights(1)
    assert prove.reconcile(cold.context).good == 1
    assert cold.copies(weights(1)) == [("cold", "archive")]
    assert cold.tier(1) == "hot"
    cold.advance(10 * DAY)
    cold.until_idle()
    assert cold.tier(1) == "cold"


def archive(cold: Cold, step: int) -> None:
    """As a lifecycle rule of the bucket does."""
    assert cold.fake is not None
    everything = cold.fake.objects._stored
    (name,) = (name for name in everything if digest_of(weights(step)) in name)
    everything[name] = replace(everything[name], storage_class="GLACIER")


@IN_A_BUCKET
@pytest.mark.rule("report-is-suspicion")
def test_a_reader_that_meets_what_was_archived_hears_that_it_is_cold(cold: Cold) -> None:
    job = Job(cold.http)
    for step in (1, 2):
        job.save(step)
    archive(cold, 2)
    body = {"digest": digest_of(weights(2)), "problem": "missing"}
    with pytest.raises(Refused, match=r"checkpoint_cold.*holdfast checkpoints thaw"):
        answer(cold.http.post(f"/v1/checkpoints/{cold.view(2)['id']}/chunk-reports", json=body))
    assert cold.copies(weights(2)) == [("cold", "archive")]
    assert (cold.tier(2), cold.view(2)["health"]) == ("cold", "ok")
    decision = answer(cold.http.get("/v1/projects/demo/runs/gpt/restore-point"))
    assert (decision["restore_point"]["step"], decision["skipped"][0]["reason"]) == (1, "cold")


@IN_A_BUCKET
@pytest.mark.rule("report-is-suspicion")
def test_what_a_lifecycle_rule_has_archived_is_written_down_as_cold_and_the_others_are_read(cold: Cold) -> None:
    Job(cold.http).save(1)
    archive(cold, 1)
    cold.advance(31 * DAY)
    report = rescrub.reconcile(cold.context)
    assert (report.failed, report.good) == (0, 1)
    assert cold.copies(weights(1)) == [("cold", "archive")]
    assert (cold.tier(1), cold.view(1)["health"]) == ("cold", "ok")
    cold.thawed(1, days=2)
    assert cold.content(1, weights(1)) == weights(1)


@IN_A_BUCKET
@pytest.mark.rule("late-put-window")
def test_a_database_from_before_a_move_is_led_to_where_the_chunks_are_now(
    cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold.cooled()
    cold.collect()
    later = cold.context.store.clock() + timedelta(days=30)
    monkeypatch.setattr(cold.context.store, "clock", lambda: later)
    with cold.context.database.transaction() as session:
        # As a backup from before the move has it: one hot copy of each chunk, under a key that is gone since.
        for copy in session.scalars(select(Copy).where(Copy.storage_class == "archive")):
            copy.generation, copy.state, copy.storage_class = secrets.token_hex(16), CopyState.VERIFIED, None
        session.execute(update(Checkpoint).values(tier="hot", tier_wanted=None, cold_class=None))
    for kept in (2, 0):
        swept = sweep_store(
            cold.context, cold.context.stores[0], dry_run=False, force=True, actor=Actor.controller("sweep")
        )
        assert (swept.deleted, swept.kept) == (0, kept)
    prove.reconcile(cold.context)
    assert cold.copies(weights(1)) == [("bad", "primary"), ("cold", "archive")]
    assert (cold.view(1)["health"], cold.tier(1)) == ("ok", "cold")
    cold.thawed(1)
    assert cold.content(1, weights(1)) == weights(1)
