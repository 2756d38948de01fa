"""What nobody works on any more is given up, and nobody is given up because the service was unavailable."""

from __future__ import annotations

import pytest
from sqlalchemy import update

import holdfast_service.runs.views
import holdfast_service.training.seal
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.liveness import abandoned_uploads
from holdfast_service.liveness.abandoned_uploads import ReapReport, reconcile
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreUnavailable
from holdfast_service.training.fencing import DRAIN_SECONDS
from holdfast_service.work.processes import ProcessKind, attached_here, say_alive
from tests.service.conftest import Clock
from tests.support.interleave import refused
from tests.support.rank import Job, answer
from tests.support.service import RunningService

IDLE_SECONDS = 40
LOST_AFTER_SECONDS = 200.0
# One pass comes at most so long after another without looking like downtime.
ROUND_SECONDS = 50


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    return settings.model_copy(update={"upload_idle_seconds": IDLE_SECONDS, "lost_after_seconds": LOST_AFTER_SECONDS})


def test_a_rank_that_never_seals_is_named_when_the_deadline_has_passed(service: RunningService, clock: Clock) -> None:
    save = Job(service.http(), world_size=3).begin(100)
    save.write(1, [b"w", b"i"])
    assert reconcile(service.context) == ReapReport()
    clock.advance(IDLE_SECONDS + 1)
    assert reconcile(service.context).aborted == (save.id,)
    view = save.now()
    assert (view["state"], view["abort_rank"], view["abort_cause"]) == ("aborted", 0, "silent")
    assert view["abort_reason"] == "ranks 0, 2 did not seal, and no rank has called for 40 seconds"
    with refused("checkpoint_aborted") as caught:
        save.negotiate(0, [b"late"])
    assert "ranks 0, 2 did not seal" in caught.value.detail
    assert caught.value.context["cause"] == "silent"
    assert reconcile(service.context) == ReapReport()


def test_a_rank_beyond_those_that_calls_look_at_is_named_as_well(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdfast_service.runs.views, "_RANKS_LOOKED_AT", 2)
    save = Job(service.http(), world_size=4).begin(100)
    for rank in (0, 1, 3):
        save.write(rank, [b"w", b"i"])
    view = save.now()
    assert (view["sealed_ranks"], view["missing_ranks"]) == (3, [])
    reconcile(service.context)
    clock.advance(IDLE_SECONDS + 1)
    assert reconcile(service.context).aborted == (save.id,)
    view = save.now()
    assert view["abort_rank"] == 2
    assert view["abort_reason"] == "rank 2 did not seal, and no rank has called for 40 seconds"


def test_each_call_of_a_rank_moves_the_deadline(service: RunningService, clock: Clock) -> None:
    save = Job(service.http(), world_size=2).begin(100)
    reconcile(service.context)
    for call in (
        lambda: save.negotiate(0, [b"w"]),
        lambda: save.negotiate(0, finished=[b"w"]),
        lambda: save.negotiate(1, []),
        lambda: save.write(0, [b"w", b"i"]),
        lambda: save.job.begin(100),
    ):
        clock.advance(IDLE_SECONDS - 1)
        call()
        assert reconcile(service.context) == ReapReport()
    assert save.write(1, [b"w", b"i"])["state"] == "committed"


def test_a_rank_that_waits_for_a_store_that_does_not_answer_is_not_silent(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> None:
        raise StoreUnavailable("no answer")

    chunks, watch = [b"w", b"i"], service.context.store_watch
    save = Job(service.http()).begin(100)
    save.send(chunks, save.negotiate(0, chunks)["chunks"])
    reconcile(service.context)
    with monkeypatch.context() as broken:
        broken.setattr(service.context.store, "ping", silent)
        broken.setattr(holdfast_service.training.seal, "ask_for_all", silent)
        watch.reconcile()
        for _ in range(3):
            clock.advance(IDLE_SECONDS - 1)
            with refused("store_unavailable"):
                save.seal(0, chunks)
            assert reconcile(service.context) == ReapReport()
    assert watch.reconcile() is None
    assert save.seal(0, chunks)["state"] == "committed"


@pytest.mark.rule("database-clock")
def test_the_services_own_downtime_is_left_out(service: RunningService, clock: Clock) -> None:
    save = Job(service.http()).begin(100)
    reconcile(service.context)
    clock.advance(3600)  # away, or the wall clock was put forward
    assert reconcile(service.context) == ReapReport(deadlines_moved_seconds=pytest.approx(3600, abs=60))
    assert save.now()["state"] == "uploading"
    assert reconcile(service.context) == ReapReport()
    clock.advance(IDLE_SECONDS + 1)
    assert reconcile(service.context).aborted == (save.id,)


@pytest.mark.rule("database-clock")
def test_while_only_workers_run_nobody_can_call_and_nothing_is_reaped(service: RunningService, clock: Clock) -> None:
    def heard_of(process: str, kind: ProcessKind) -> None:
        with service.context.database.transaction() as session:
            say_alive(session, process, kind, attached_here(service.context))

    save = Job(service.http()).begin(100)
    heard_of("node-1", "serve")
    reconcile(service.context)
    for _ in range(72):  # the worker's passes go on, each soon after the other, while the service is unavailable
        clock.advance(50)
        heard_of("node-2", "worker")
        assert "No process serves" in (reconcile(service.context).error or "")
    heard_of("node-3", "serve")
    assert reconcile(service.context) == ReapReport(deadlines_moved_seconds=pytest.approx(3600, abs=60))
    assert save.now()["state"] == "uploading"
    clock.advance(IDLE_SECONDS + 1)
    heard_of("node-3", "serve")
    assert reconcile(service.context).aborted == (save.id,)


@pytest.mark.rule("database-clock")
def test_a_clock_that_goes_back_reaps_nothing(service: RunningService, clock: Clock) -> None:
    save = Job(service.http()).begin(100)
    reconcile(service.context)
    clock.advance(-3600)
    assert reconcile(service.context) == ReapReport()
    save.negotiate(0, [b"w"])
    assert reconcile(service.context) == ReapReport()


def test_an_attempt_without_heartbeats_is_lost_and_comes_back_when_it_calls(
    service: RunningService, clock: Clock
) -> None:
    job = Job(service.http())
    save = job.begin(100)
    reconcile(service.context)
    lost = 0
    for _ in range(int(LOST_AFTER_SECONDS / ROUND_SECONDS) + 1):
        clock.advance(ROUND_SECONDS)
        lost += reconcile(service.context).lost_attempts
    assert lost == 1
    assert answer(job.http.get(f"{job.base}/attempts/1"))["outcome"] == "lost"
    view = save.now()
    assert (view["state"], view["abort_cause"]) == ("aborted", "silent"), "it may only be cut off"
    job.heartbeat(107)
    view = answer(job.http.get(f"{job.base}/attempts/1"))
    assert (view["outcome"], view["ended_at"], view["last_step"]) == (None, None, 107)
    assert job.save(100)["state"] == "committed"


def test_a_rank_that_crashed_has_told_so_before_its_save_in_flight_is_over(
    service: RunningService, clock: Clock
) -> None:
    job = Job(service.http())
    saves = [job.begin(100), job.begin(101)]
    reconcile(service.context)
    job.end("failed")
    assert reconcile(service.context) == ReapReport()
    assert saves[0].write(0, [b"w", b"i"])["state"] == "committed"
    assert job.save(102)["state"] == "committed", "it was queued, and begins only now"
    clock.advance(DRAIN_SECONDS // 2)
    saves[1].negotiate(0, [b"w"])
    reconcile(service.context)
    clock.advance(DRAIN_SECONDS // 2 + 1)
    saves[1].negotiate(0, [b"w"])
    with refused("stale_attempt") as caught:
        job.begin(103)
    assert caught.value.context == {"attempt": 1, "outcome": "failed"}, "and names no newer attempt: it is not fenced"
    assert reconcile(service.context) == ReapReport(), "the agent of its node goes on with it"
    clock.advance(IDLE_SECONDS + 1)
    assert reconcile(service.context).aborted == (saves[1].id,)


@pytest.mark.parametrize("outcome", ["failed", "preempted", "finished"])
def test_what_a_job_has_left_uploading_goes_on_with_its_agent_and_is_given_up_soon_if_nobody_goes_on_with_it(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    monkeypatch.setattr(abandoned_uploads, "DRAIN_SECONDS", 5)
    job = Job(service.http())
    save = job.begin(100)
    reconcile(service.context)
    job.end(outcome)
    assert reconcile(service.context) == ReapReport()
    clock.advance(6)
    save.negotiate(0, [b"w"])
    assert reconcile(service.context) == ReapReport()
    clock.advance(8)
    assert reconcile(service.context).aborted == (save.id,)
    view = save.now()
    assert view["abort_reason"] == f"attempt 1 has ended ({outcome}) without completing it"
    assert view["abort_cause"] == "attempt_ended"


def test_a_checkpoint_whose_last_seal_was_not_counted_is_given_up_as_any_other(
    service: RunningService, clock: Clock
) -> None:
    save = Job(service.http(), world_size=2).begin(100)
    other = Job(service.http(), "demo/other").begin(1)
    save.write(0, [b"w", b"i"])
    with service.context.database.transaction() as session:
        session.execute(update(Checkpoint).values(sealed_ranks=0))  # as an older version of the service left it
    assert save.write(1, [b"w1", b"i"])["state"] == "uploading"
    aborted: set[str] = set()
    for _ in range(20):
        clock.advance(60)
        aborted.update(reconcile(service.context).aborted)
    assert aborted == {save.id, other.id}
    assert save.job.begin(100).id != save.id
