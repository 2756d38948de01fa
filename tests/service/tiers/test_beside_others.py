"""Getting cold and thawing beside those who write and read, and killed between any two steps: rules
present-is-referenced, read-lease and row-before-copy and 29."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select, update

import holdfast_service.restore.read_checkpoint
import holdfast_service.tiers.cool
import holdfast_service.tiers.thaw
import holdfast_service.training.negotiate
from holdfast_service.collect.controller import reconcile as collect_tick
from holdfast_service.db.tables.core import Checkpoint, Copy, Project, ReadLease
from holdfast_service.tiers.controller import reconcile
from tests.support.death import Killed, kill
from tests.support.interleave import hold_after, overlap, refused
from tests.support.rank import Job, answer, digest_of
from tests.support.tiers import DAY, IN_A_BUCKET, Cold, weights


@pytest.fixture
def due(cold: Cold) -> Job:
    """Three steps that are older than the policy's week; the first one is due."""
    return cold.aged()


def nothing_is_lost(cold: Cold) -> None:
    """Each committed checkpoint can be read, or says that it is cold and can be thawed."""
    for step in (1, 2, 3):
        view, status = cold.view(step), cold.thaw_status(step)
        assert view["health"] == "ok"
        if view["tier"] == "hot" or status["cold_bytes"] == 0:
            assert cold.content(step, weights(step)) == weights(step)
    with cold.context.database.transaction() as session:
        session.execute(update(ReadLease).values(expires_at=ReadLease.created_at))  # the reads are over


def nothing_is_left_over(cold: Cold) -> None:
    """What lies in the stores is what the catalog says, and each chunk that got cold has one cold copy."""
    cold.advance(2 * DAY)
    cold.until_idle()
    cold.collect()
    for data in (weights(1), b"index " + weights(1)):
        assert [state for state, _ in cold.copies(data)] == ["cold"]
    with cold.context.database.read() as session:
        project_id = session.scalars(select(Project.id)).one()
        live = session.scalar(select(func.count()).select_from(Copy).where(Copy.state != "gone"))
    assert len(cold.stored(project_id)) == live == 6


@pytest.mark.rule("row-before-copy")
def test_workers_that_die_between_any_two_steps_of_cooling_lose_nothing_and_leave_nothing(cold: Cold, due: Job) -> None:
    """One after the other: each gets a little further than the one before."""
    for owner, name, after in (
        (holdfast_service.tiers.cool, "_copy", False),
        (holdfast_service.tiers.cool, "_copy", True),  # copied, and not settled
        (holdfast_service.tiers.cool, "settle_copy", True),
        (holdfast_service.tiers.cool, "retire", False),
        (holdfast_service.tiers.cool, "mark_cold", True),  # in the transaction that takes the hot copies
        (holdfast_service.tiers.cool, "retire", True),
    ):
        with pytest.MonkeyPatch.context() as patch:
            died = kill(patch, owner, name, after=after)
            patch.setattr(holdfast_service.tiers.cool, "give_up_copy", lambda *_: None)  # the dead give nothing back
            with pytest.raises(Killed):
                reconcile(cold.context)
            assert died(), name
        nothing_is_lost(cold)
        cold.advance(3600)  # its leases run out
    cold.until_idle()
    assert cold.tier(1) == "cold"
    nothing_is_left_over(cold)


@pytest.mark.rule("row-before-copy")
def test_workers_that_die_between_any_two_steps_of_a_thaw_lose_nothing_and_others_go_on(cold: Cold) -> None:
    cold.cooled()
    cold.thaw(1, days=2)
    asking, copying = (holdfast_service.tiers.thaw, "_ask"), (holdfast_service.tiers.thaw, "copy_now")
    step = copying if cold.fake is None else asking
    between = [(holdfast_service.tiers.thaw, "thaw_chunk", True)] if cold.fake is not None else []
    for owner, name, after in (
        (*step, False),
        (*step, True),  # done, and not written down
        *between,
        (holdfast_service.tiers.thaw, "_settle", False),
        (holdfast_service.tiers.thaw, "_settle", True),
    ):
        with pytest.MonkeyPatch.context() as patch:
            died = kill(patch, owner, name, after=after)
            with pytest.raises(Killed):
                reconcile(cold.context)
            assert died(), name
        nothing_is_lost(cold)
        cold.advance(1800)
    for _ in range(20):
        cold.round()
        if cold.tier(1) == "hot":
            break
        cold.advance(1800)
    assert cold.content(1, weights(1)) == weights(1)
    cold.advance(5 * DAY)
    with pytest.MonkeyPatch.context() as patch:
        kill(patch, holdfast_service.tiers.thaw, "_end_if_over", after=True)
        with pytest.raises(Killed):
            reconcile(cold.context)
    nothing_is_left_over(cold)
    assert cold.tier(1) == "cold"


@pytest.mark.rule("present-is-referenced")
def test_a_negotiation_that_comes_while_a_hot_copy_is_taken_away_is_told_to_send_it(
    cold: Cold, due: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = due.begin(4)
    save.negotiate(0)
    gate = hold_after(monkeypatch, holdfast_service.tiers.cool, "mark_cold")
    # The hot copy is taken away in a transaction that has not ended.
    cooling, writing = overlap(
        cold.service, gate, lambda: reconcile(cold.context), lambda: save.negotiate(0, [weights(1)])
    )
    (told,) = writing.result()["chunks"]
    cooling.result()
    assert told["status"] == "upload"
    assert save.write(0, [weights(1), b"index"])["state"] == "committed"
    cold.collect()
    assert cold.content(4, weights(1)) == weights(1)


@pytest.mark.rule("present-is-referenced")
def test_a_copy_that_a_negotiation_was_told_of_as_present_stays_hot(
    cold: Cold, due: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = due.begin(4)
    save.negotiate(0)
    gate = hold_after(monkeypatch, holdfast_service.training.negotiate, "_copies")
    # It is decided, present, and not committed.
    writing, cooling = overlap(
        cold.service, gate, lambda: save.negotiate(0, [weights(1)]), lambda: reconcile(cold.context)
    )
    (told,) = writing.result()["chunks"]
    cooling.result()
    assert told["status"] == "present"
    cold.until_idle()
    cold.collect()
    save.upload(0, [b"index"])
    assert save.seal(0, [weights(1), b"index"])["state"] == "committed"  # what it was told holds: not asked again
    assert cold.content(4, weights(1)) == weights(1)


@pytest.mark.rule("present-is-referenced")
def test_what_a_sealed_shard_of_an_open_checkpoint_needs_stays_hot(cold: Cold, due: Job) -> None:
    other = Job(cold.http, "demo/other", world_size=2)
    save = other.begin(1)
    save.write(0, [weights(1), b"index"])  # rank 1 has not sealed
    cold.until_idle()
    assert ("verified", "primary") in cold.copies(weights(1))
    assert save.write(1, [b"w1", b"index"])["state"] == "committed"
    assert cold.tier(1, "demo/other") == "hot"


@pytest.mark.rule("present-is-referenced")
def test_a_thawed_copy_is_for_readers_and_not_present(cold: Cold, due: Job) -> None:
    cold.until_idle()
    cold.collect()
    cold.thawed(1)
    (told,) = due.begin(4).negotiate(0, [weights(1)])["chunks"]
    # In a folder a chunk is copied back and is as good as any; in a bucket its time is short.
    assert told["status"] == ("present" if cold.fake is None else "upload")


@pytest.mark.rule("read-lease")
def test_a_reader_that_comes_first_keeps_its_chunks_hot(cold: Cold, due: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = hold_after(monkeypatch, holdfast_service.restore.read_checkpoint, "choose_copies")
    # The reader's lease is taken in a transaction that has not ended.
    reading, cooling = overlap(cold.service, gate, lambda: cold.tickets(1, weights(1)), lambda: reconcile(cold.context))
    (ticket,) = reading.result()
    cooling.result()
    cold.collect()
    assert cold.tier(1) == "hot"
    (again,) = cold.tickets(1, weights(1))
    assert cold.read(again) == weights(1)
    assert ticket["kind"] == again["kind"] == "http"


@pytest.mark.rule("read-lease")
def test_an_issued_url_can_be_read_to_its_end_though_its_lease_was_given_back(cold: Cold, due: Job) -> None:
    reply = answer(cold.http.post(f"/v1/checkpoints/{cold.view(1)['id']}/reads", json={"digests": _digests(1)}))
    cold.http.delete(f"/v1/read-leases/{reply['lease_id']}").raise_for_status()
    cold.until_idle()
    assert cold.tier(1) == "cold"
    collect_tick(cold.context)  # now, and nothing has run out
    for ticket, data in zip(reply["chunks"], (weights(1), b"index " + weights(1)), strict=True):
        assert cold.read(ticket) == data
    cold.collect()
    assert [state for state, _ in cold.copies(weights(1))] == ["cold"]


@pytest.mark.rule("read-lease")
@IN_A_BUCKET
def test_a_thaw_that_is_over_is_over_also_where_no_worker_is_left_to_say_so(cold: Cold) -> None:
    job = cold.cooled(4)
    with cold.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.step > 2).values(health="diverged", health_reason="NaN"))
    cold.thawed(2, days=1)
    assert answer(cold.http.get(f"{job.base}/restore-point"))["restore_point"]["step"] == 2
    cold.advance(4 * DAY)  # nobody works
    decision = answer(cold.http.get(f"{job.base}/restore-point"))
    assert decision["restore_point"] is None
    assert {each["reason"] for each in decision["skipped"]} == {"diverged", "cold"}
    with refused("checkpoint_cold"):
        cold.tickets(2, weights(2))


@pytest.mark.rule("row-before-copy")
def test_two_workers_share_what_is_due_and_make_one_copy_of_each_chunk(cold: Cold, due: Job) -> None:
    with ThreadPoolExecutor(2) as threads:
        for report in threads.map(reconcile, [cold.context] * 2):
            assert report.failed == 0
    cold.advance(3600)
    cold.until_idle()
    assert cold.tier(1) == "cold"
    nothing_is_left_over(cold)


@pytest.mark.rule("row-before-copy")
@IN_A_BUCKET
def test_what_the_store_says_of_its_copy_is_looked_at_before_anything_goes(
    cold: Cold, due: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that copies into another class, or other bytes, has not copied."""
    assert cold.fake is not None
    objects = cold.fake.objects
    real = objects.copy
    monkeypatch.setattr(objects, "copy", lambda *keys, hashed: real(*keys[:2], "STANDARD", hashed=hashed))
    report = reconcile(cold.context)
    assert report.failed == 2
    assert "that is not what was copied" in str(report.error)
    assert report.retired_copies == 0
    assert cold.content(1, weights(1)) == weights(1)
    monkeypatch.setattr(objects, "copy", real)
    cold.advance(DAY)
    cold.until_idle()
    assert cold.tier(1) == "cold"
    assert cold.thawed(1)["state"] == "thawed"
    assert cold.content(1, weights(1)) == weights(1)


@IN_A_BUCKET
def test_a_thaw_asks_the_store_once_and_looks_now_and_then(cold: Cold) -> None:
    cold.cooled()
    assert cold.fake is not None
    cold.thaw(1, days=1)
    cold.fake.requests.clear()
    for _ in range(20):
        cold.round()
        cold.advance(60)
    asked = [operation for operation, _ in cold.fake.requests]
    assert asked.count("POST") == 2  # one for each chunk
    assert asked.count("HEAD") <= 8


def _digests(step: int) -> list[str]:
    return [digest_of(weights(step)), digest_of(b"index " + weights(step))]
