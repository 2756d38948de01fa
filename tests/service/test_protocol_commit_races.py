"""Rules lock-order and commit-before-reply: what may happen at the same moment, on both databases."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import event, func, select, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

import holdfast_service.training.attempts
import holdfast_service.training.begin
import holdfast_service.training.commit
import holdfast_service.training.negotiate
import holdfast_service.training.seal
from holdfast_service.collect.references import drop_past_references
from holdfast_service.db.tables.core import Checkpoint, Shard, ShardChunk
from tests.support.interleave import hold_after, hold_before, in_background, just_before, overlap, refused
from tests.support.rank import Job, answer, offer_of
from tests.support.service import RunningService


@pytest.mark.rule("lock-order")
def test_a_new_attempt_is_never_told_an_older_step_than_one_that_then_commits(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Job(service.http())
    first.save(800)
    save = first.begin(1000)
    save.upload(0, [b"w", b"i"])
    gate = hold_after(monkeypatch, holdfast_service.training.commit, "complete_if_whole")
    # 1000 is committed in a transaction that has not ended.
    sealing, opening = overlap(service, gate, lambda: save.seal(0, [b"w", b"i"]), lambda: Job(service.http(), after=1))
    assert sealing.result()["state"] == "committed"
    assert opening.result().opened["restore_point"]["step"] == 1000


@pytest.mark.rule("lock-order")
def test_nothing_of_a_fenced_attempt_commits_once_the_restore_point_is_chosen(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Job(service.http())
    first.save(800)
    save = first.begin(1000)
    save.upload(0, [b"w", b"i"])
    gate = hold_after(monkeypatch, holdfast_service.training.attempts, "choose_restore_point")
    opening, sealing = overlap(service, gate, lambda: Job(service.http(), after=1), lambda: save.seal(0, [b"w", b"i"]))
    assert opening.result().opened["restore_point"]["step"] == 800
    with refused("stale_attempt"):
        sealing.result()
    view = save.now()
    assert (view["abort_reason"], view["abort_cause"]) == ("fenced by attempt 2", "fenced")


@pytest.mark.rule("lock-order")
def test_a_begin_that_overlaps_the_fence_leaves_nothing_uploading(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Job(service.http())
    gate = hold_after(monkeypatch, holdfast_service.training.begin, "insert_absent")
    beginning, opening = overlap(service, gate, lambda: first.begin(100), lambda: Job(service.http(), after=1))
    save = beginning.result()
    opening.result()
    assert save.now()["state"] == "aborted"


@pytest.mark.rule("lock-order")
def test_a_run_that_is_taken_back_again_and_a_negotiation_do_not_wait_for_each_other(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply was lost, and the job was launched again: now a negotiation holds the run, on its way to the quota."""
    service.make_project("demo", quota_bytes=1000)
    job = Job(service.http())
    save = job.begin(1)
    gate = hold_before(monkeypatch, holdfast_service.training.negotiate, "lock_quotas")
    negotiating, coming = overlap(
        service,
        gate,
        lambda: save.negotiate(0, [b"weights"]),
        lambda: answer(service.http().post(f"{job.base}/undelete")),
    )
    assert [each["status"] for each in negotiating.result()["chunks"]] == ["upload"]
    assert (coming.result()["checkpoints"], coming.result()["purged"]) == (0, 0)


@pytest.mark.rule("commit-before-reply")
def test_of_two_last_seals_at_the_same_moment_one_commits(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(service.http(), world_size=2)
    save = job.begin(100)
    for rank in (0, 1):
        save.upload(rank, [b"w%d" % rank, b"i"])
    gate = hold_after(monkeypatch, holdfast_service.training.commit, "complete_if_whole")
    # Rank 0 has counted one seal and has not committed its own.
    one, other = overlap(service, gate, lambda: save.seal(0, [b"w0", b"i"]), lambda: save.seal(1, [b"w1", b"i"]))
    assert one.result()["state"] == "uploading"
    assert other.result()["state"] == "committed"
    assert save.now()["state"] == "committed"


@pytest.mark.rule("commit-before-reply")
def test_many_ranks_that_seal_at_once_commit_exactly_once(service: RunningService) -> None:
    ranks = 12
    job = Job(service.http(), world_size=ranks)
    save = job.begin(100)
    start = threading.Barrier(ranks)

    def rank_writes(rank: int) -> str:
        chunks = [b"weights %d" % rank, b"shared", b"index %d" % rank]
        save.upload(rank, chunks)
        start.wait(120)
        return str(save.seal(rank, chunks)["state"])

    with in_background() as threads:
        states = list(threads.map(rank_writes, range(ranks)))
    assert states.count("committed") >= 1
    view = save.now()
    assert (view["state"], view["sealed_ranks"], view["etag"]) == ("committed", ranks, '"2"')


@pytest.mark.rule("commit-before-reply")
def test_the_reply_goes_out_after_the_database_has_committed(service: RunningService) -> None:
    job = Job(service.http())
    save = job.begin(100)
    save.upload(0, [b"w", b"i"])

    def lose_the_database(_session: Session) -> None:
        if completed:
            raise OperationalError("COMMIT", {}, Exception("the server closed the connection"))

    with just_before(service, "UPDATE checkpoints SET .*committed_at", lambda: None) as completed:
        event.listen(Session, "before_commit", lose_the_database)
        try:
            with refused("database_unavailable"):
                save.seal(0, [b"w", b"i"])
        finally:
            event.remove(Session, "before_commit", lose_the_database)
    assert save.now()["state"] == "uploading"
    assert save.seal(0, [b"w", b"i"])["state"] == "committed"


@pytest.mark.rule("seal-only-negotiated")
def test_a_late_negotiation_adds_nothing_to_a_shard_that_is_being_sealed(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(service.http(), world_size=2)
    save = job.begin(100)
    save.upload(0, [b"w", b"i"])
    gate = hold_before(monkeypatch, holdfast_service.training.commit, "complete_if_whole")
    sealing, late = overlap(service, gate, lambda: save.seal(0, [b"w", b"i"]), lambda: save.negotiate(0, [b"more"]))
    sealing.result()
    with refused("shard_sealed"):
        late.result()


def test_a_seal_that_is_sent_again_while_its_first_try_commits_is_told_so(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Job(service.http()).begin(1000)
    save.upload(0, [b"w", b"i"])
    # The second try has found the shard open; what was negotiated goes when the first one seals.
    gate = hold_after(monkeypatch, holdfast_service.training.seal, "refuse_unless_uploading")
    again, first = overlap(service, gate, lambda: save.seal(0, [b"w", b"i"]), lambda: save.seal(0, [b"w", b"i"]))
    assert first.result()["state"] == "committed"
    assert again.result()["state"] == "committed"


@pytest.mark.rule("commit-before-reply")
def test_a_count_that_runs_ahead_commits_nothing_before_every_shard_is_sealed(service: RunningService) -> None:
    save = Job(service.http(), world_size=3).begin(100)
    save.write(0, [b"w0", b"i"])
    with service.context.database.transaction() as session:
        session.execute(update(Checkpoint).values(sealed_ranks=2))
    view = save.write(1, [b"w1", b"i"])
    assert (view["state"], view["sealed_ranks"], view["missing_ranks"]) == ("uploading", 2, [2])
    assert save.write(2, [b"w2", b"i"])["state"] == "committed"


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)  # SQLite has one writer
@pytest.mark.parametrize("how", ["begin", "negotiate"])
def test_what_was_given_up_and_forgotten_meanwhile_gets_no_references(
    service: RunningService, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    job = Job(service.http(), world_size=2)
    save = job.begin(100)
    called = {"begin": holdfast_service.training.begin, "negotiate": holdfast_service.training.negotiate}[how]
    gate = hold_before(monkeypatch, called, "reserve")

    def offers() -> str:
        if how == "negotiate":
            return str(save.negotiate(1, [b"abc"]))
        return str(job.begin(100, offers=[offer_of(1, [b"abc"])]).id)

    with in_background(gate) as threads:
        offering = threads.submit(offers)
        gate.wait_until_reached()
        save.fail(0)
        drop_past_references(service.context)
        gate.open()
        if how == "begin":
            assert offering.result() != save.id, "the step is begun anew"
        else:
            with refused("checkpoint_aborted"):
                offering.result()
    with service.context.database.read() as session:
        kept = select(func.count()).select_from(ShardChunk).join(Shard).where(Shard.checkpoint_id == save.id)
        assert session.scalar(kept) == 0


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)  # SQLite has one writer
def test_a_rank_that_fails_while_another_seals_ends_one_of_them_and_no_lock_waits_in_a_circle(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Job(service.http(), world_size=2).begin(100)
    save.upload(0, [b"w", b"i"])
    gate = hold_before(monkeypatch, holdfast_service.training.commit, "complete_if_whole")
    before = _deadlocks(service)
    sealing, failing = overlap(service, gate, lambda: save.seal(0, [b"w", b"i"]), lambda: save.fail(1))
    assert failing.result()["state"] == "aborted"
    with refused("checkpoint_aborted"):
        sealing.result()
    assert (_deadlocks(service), save.now()["sealed_ranks"]) == (before, 0)


def _deadlocks(service: RunningService) -> int:
    with service.context.database.read() as session:
        session.execute(text("SELECT pg_stat_force_next_flush()"))
        return int(
            session.scalar(text("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")) or 0
        )
