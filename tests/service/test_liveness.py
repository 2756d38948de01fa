"""Why an attempt ended, as the catalog tells it: by the first word, by silence, and by what was refused afterwards."""

from __future__ import annotations

import re
from typing import Any

import pytest
from sqlalchemy import event, select

import holdfast_service.liveness.abandoned_uploads as reap
import holdfast_service.liveness.stalled_attempts as liveness
import holdfast_service.webhooks.controller as webhooks
from holdfast_service.audit.record import Actor
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.liveness.lost_attempts import mark_lost
from holdfast_service.liveness.stalled_attempts import LivenessReport, reconcile
from holdfast_service.settings import ServiceSettings
from holdfast_service.work.processes import attached_here, say_alive
from tests.service.conftest import Clock
from tests.support.interleave import in_background, refused, until_blocked_or_done
from tests.support.rank import Job
from tests.support.service import RunningService

LOST_AFTER_SECONDS = 50.0
STALL_SECONDS = 60.0


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    return settings.model_copy(update={"lost_after_seconds": LOST_AFTER_SECONDS, "stall_seconds": STALL_SECONDS})


def _trains(step: int, *, first: int = 0, age: float = 0.0, **more: Any) -> dict[str, Any]:
    """What the heartbeat of a job tells that has run the steps `first` to `step`, the last one `age` seconds ago."""
    progress: dict[str, Any] = {"step": step, "first_step": first, "steps_run": step - first + 1}
    return progress | {"progress_age_seconds": age, "doing": "training", "steps_per_second": 1.0} | more


def _events(service: RunningService) -> list[tuple[str, str, str | None]]:
    with service.context.database.read() as session:
        rows = session.scalars(
            select(AuditEvent).where(AuditEvent.action.startswith("attempt.")).order_by(AuditEvent.id)
        ).all()
    return [(event.actor, event.action, event.reason) for event in rows]


def test_the_first_word_counts_and_later_ones_tell_only_how_far_it_came(service: RunningService) -> None:
    job = Job(service.http(), world_size=2)
    job.heartbeat(**_trains(40))
    crash = {"detail": "ValueError: boom", "error_type": "ValueError", "error_rank": 1}
    job.end("failed", **_trains(42), **crash)
    # Torn down by its launcher, rank 0 has another word, and so has its heartbeat that was held up.
    job.end("preempted", **_trains(43), notice={"source": "SIGTERM"})
    job.end("finished", **_trains(41))
    job.heartbeat(**_trains(40))
    view = job.view()
    assert (view["outcome"], view["outcome_detail"]) == ("failed", "ValueError: boom")
    assert (view["error_type"], view["error_rank"], view["notice"]) == ("ValueError", 1, None)
    assert (view["first_step"], view["last_step"], view["steps_run"]) == (0, 43, 44)


@pytest.mark.races
def test_of_two_words_at_once_one_counts(service: RunningService) -> None:
    job = Job(service.http(), world_size=8)

    def dies(rank: int) -> None:
        job.end("failed", error_type=f"Error{rank}", error_rank=rank, detail=f"rank {rank}")

    with in_background() as threads:
        list(threads.map(dies, range(8)))
    view = job.view()
    assert (view["error_type"], view["outcome_detail"]) == (f"Error{view['error_rank']}", f"rank {view['error_rank']}")


def test_a_preemption_keeps_its_notice(service: RunningService) -> None:
    job = Job(service.http())
    notice = {"source": "aws", "reason": "spot instance-action", "deadline_seconds": 120.0}
    job.end("preempted", notice=notice)
    assert (job.view()["outcome"], job.view()["notice"]) == ("preempted", notice)


def test_a_job_that_was_killed_and_launched_again_at_once_was_lost_and_one_that_calls_was_alive(
    service: RunningService, clock: Clock
) -> None:
    killed = Job(service.http(), "demo/killed")
    killed.heartbeat(**_trains(7))
    alive = Job(service.http(), "demo/alive")
    Job(service.http(), "demo/killed", after=1)
    Job(service.http(), "demo/alive", after=1)
    for job in (killed, alive):
        assert (job.view()["outcome"], job.view()["outcome_detail"]) == ("fenced", "attempt 2 has taken over")
    assert reconcile(service.context) == LivenessReport(), "nobody can know yet"
    with refused("stale_attempt"):
        alive.heartbeat(3)
    clock.advance(0.3 * LOST_AFTER_SECONDS + 1)
    assert reconcile(service.context) == LivenessReport(done=1, lost=1)
    assert reconcile(service.context) == LivenessReport()
    view = killed.view()
    assert view["outcome"] == "lost"
    assert view["outcome_detail"].startswith("not heard of since ")
    assert view["outcome_detail"].endswith(" UTC; attempt 2 has taken over")
    view = alive.view()
    assert (view["outcome"], view["outcome_detail"]) == ("fenced", "attempt 2 has taken over while it was still alive")
    assert [event[:2] for event in _events(service)] == [("liveness", "attempt.lost")]
    # It was only cut off, and calls after all.
    with refused("stale_attempt"):
        killed.end("finished")
    assert killed.view()["outcome"] == "fenced"
    assert killed.view()["refused_at"] is not None


def test_a_run_that_makes_no_progress_is_stalled_until_it_goes_on(service: RunningService, clock: Clock) -> None:
    job = Job(service.http())
    job.heartbeat(**_trains(5))
    clock.advance(STALL_SECONDS + 1)
    assert reconcile(service.context) == LivenessReport(), "without a heartbeat it is not known to live"
    job.heartbeat(**_trains(5, age=STALL_SECONDS - 30))
    assert reconcile(service.context) == LivenessReport()
    job.heartbeat(**_trains(5, age=2 * STALL_SECONDS, doing="saving"))
    job.heartbeat(**_trains(5, age=2 * STALL_SECONDS, steps_per_second=0.1))
    assert reconcile(service.context) == LivenessReport(), "its steps take 10 seconds"
    clock.advance(STALL_SECONDS)
    job.heartbeat(**_trains(5, age=2 * STALL_SECONDS, steps_per_second=1.0))
    assert reconcile(service.context) == LivenessReport(done=1, stalled=1)
    assert reconcile(service.context) == LivenessReport()
    assert job.view()["stalled_at"] == job.view()["progressed_at"]
    job.heartbeat(**_trains(6))
    assert reconcile(service.context) == LivenessReport(done=1, going_on=1)
    assert job.view()["stalled_at"] is None
    stalled, goes_on = _events(service)
    assert stalled[:2] == ("liveness", "attempt.stalled")
    assert (stalled[2] or "").startswith("alive, and nothing after step 5 since ")
    assert goes_on == ("liveness", "attempt.goes_on", "goes on at step 6")


@pytest.mark.rule("database-clock")
def test_the_services_own_downtime_neither_stalls_nor_loses_a_run(service: RunningService, clock: Clock) -> None:
    def serves() -> None:
        with service.context.database.transaction() as session:
            say_alive(session, "node-1", "serve", attached_here(service.context))

    serves()
    job, alive, dead = (Job(service.http(), f"demo/{name}") for name in ("gpt", "alive", "dead"))
    for each in (job, alive, dead):
        each.heartbeat(**_trains(5))
    last_sign = job.view()["heartbeat_at"]
    reap.reconcile(service.context)
    for name in ("alive", "dead"):
        Job(service.http(), f"demo/{name}", after=1)
    clock.advance(20)  # only workers' passes, and the first one does not know it yet
    assert (reap.reconcile(service.context), reconcile(service.context)) == (reap.ReapReport(), LivenessReport())
    clock.advance(60)
    assert (bool(reap.reconcile(service.context).error), reconcile(service.context)) == (True, LivenessReport())
    clock.advance(3520)
    serves()
    assert reconcile(service.context) == LivenessReport(), "though it comes before the reaper's pass"
    assert reap.reconcile(service.context).deadlines_moved_seconds
    assert (reconcile(service.context), reap.reconcile(service.context)) == (LivenessReport(), reap.ReapReport())
    assert job.view()["heartbeat_at"] == last_sign, "how far it came is counted from what it said"
    with refused("stale_attempt"):
        alive.heartbeat(6)
    clock.advance(LOST_AFTER_SECONDS + 1)
    serves()
    assert reap.reconcile(service.context).lost_attempts == 3
    assert reconcile(service.context) == LivenessReport(done=1, lost=1)
    assert [each.view()["outcome"] for each in (alive, dead)] == ["fenced", "lost"]


@pytest.mark.rule("database-clock")
def test_a_clock_that_was_ahead_for_a_while_hides_no_lost_run(service: RunningService, clock: Clock) -> None:
    """It went forward by ten minutes and back: what was noted meanwhile is still to come."""
    excused, fenced, gone, alive = (
        Job(service.http(), f"demo/{name}") for name in ("excused", "fenced", "gone", "alive")
    )
    for each in (excused, fenced, gone, alive):
        each.heartbeat(**_trains(5))
    reap.reconcile(service.context)
    clock.advance(600)
    assert reap.reconcile(service.context).deadlines_moved_seconds, "it takes the jump for a downtime of its own"
    Job(service.http(), "demo/fenced", after=1)
    alive.heartbeat(**_trains(6))
    clock.advance(-600)
    Job(service.http(), "demo/excused", after=1)
    alive.heartbeat(**_trains(7))
    clock.advance(LOST_AFTER_SECONDS + 1)
    alive.heartbeat(**_trains(8))
    reap.reconcile(service.context)
    reconcile(service.context)
    outcomes = {job.run_name: job.view()["outcome"] for job in (excused, fenced, gone, alive)}
    assert outcomes == {"excused": "lost", "fenced": "lost", "gone": "lost", "alive": None}
    clock.advance(LOST_AFTER_SECONDS + 1)
    reap.reconcile(service.context)
    assert alive.view()["outcome"] == "lost", "its heartbeat of the time ahead hides nothing"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # its planner goes by the indexes alone
def test_a_round_with_nothing_to_do_looks_at_no_row_that_is_over(service: RunningService) -> None:
    engine = service.context.database.engine
    asked: list[tuple[str, Any]] = []
    event.listen(engine, "before_cursor_execute", lambda *told: asked.append(told[2:4]))
    for controller in (liveness, reap, webhooks):
        controller.reconcile(service.context)
    with engine.connect() as connection:
        steps = [
            step[3]
            for statement, values in tuple(asked)
            if statement.startswith(("SELECT", "UPDATE"))
            for step in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)
        ]
    looks = [step for step in steps if re.match("(SCAN|SEARCH) (attempts|checkpoints|webhook_deliveries) ?", step)]
    assert len(looks) >= 6
    assert [step for step in looks if step.startswith("SCAN") and " USING INDEX ix_" not in step] == []


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)  # SQLite has one writer
def test_a_rank_that_calls_while_the_reaper_takes_its_attempt_for_lost_is_heard(
    service: RunningService, clock: Clock
) -> None:
    job = Job(service.http(), world_size=2)
    save = job.begin(100)
    save.upload(0, [b"w", b"i"])
    reap.reconcile(service.context)
    clock.advance(LOST_AFTER_SECONDS - 9)
    reap.reconcile(service.context)
    clock.advance(LOST_AFTER_SECONDS - 9)
    with in_background() as threads:
        with service.context.database.transaction() as session:
            assert mark_lost(session, Actor.controller("reap"), service.context.settings) == 1
            sealing = threads.submit(lambda: save.seal(0, [b"w", b"i"]))
            until_blocked_or_done(service, sealing)
        assert sealing.result()["state"] == "uploading"
    assert job.view()["outcome"] is None
    assert reap.reconcile(service.context).aborted == ()


def test_a_rate_that_no_training_has_is_kept_as_none_at_all(service: RunningService) -> None:
    """Postgres refuses to divide by it, for whoever asks for the figures of all projects."""
    job = Job(service.http())
    job.heartbeat(5, steps_run=5, steps_per_second=5e-324)
    assert job.view()["steps_per_second"] == 0.0
