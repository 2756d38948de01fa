"""The crash-loop breaker, over HTTP on both databases: what is quarantined, what never is, and a person's release."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

import holdfast_service.training.attempts as opening
from holdfast_service.db.tables.operations import AuditEvent
from tests.service.conftest import Clock
from tests.support.interleave import hold_before, overlap, refused
from tests.support.rank import Job, answer
from tests.support.retention import apply, plan, put_policy
from tests.support.service import RunningService


def crash(service: RunningService, times: int, *, after: int, step: int | None = None) -> int:
    """Launches that fail; the number of the last one. Without a step while they load what they are offered."""
    for number in range(after, after + times):
        job = Job(service.http(), after=number)
        if step is not None:
            job.resumed_from(job.opened["restore_point"]["checkpoint_id"])
            job.heartbeat(step)
        job.end("failed")
    return after + times


def offered(job: Job) -> int:
    step: int = job.opened["restore_point"]["step"]
    return step


def view(service: RunningService, step: int) -> dict[str, Any]:
    found: dict[str, Any] = answer(service.http().get(f"/v1/projects/demo/runs/gpt/checkpoints/{step}"))
    return found


def test_what_three_attempts_crashed_from_is_quarantined_and_the_one_before_is_offered(service: RunningService) -> None:
    first = Job(service.http())
    for step in (100, 200):
        first.save(step)
    crash(service, 2, after=1, step=203)
    assert offered(Job(service.http(), launch_id="third", after=3)) == 200, "two crashes may be bad luck"
    Job(service.http(), launch_id="third", after=3).end("failed")
    etag = view(service, 200)["etag"]

    fourth = Job(service.http(), launch_id="fourth", after=4)
    assert offered(fourth) == 100
    assert [(over["step"], over["reason"]) for over in fourth.opened["skipped"]] == [(200, "quarantined")]
    assert "Attempts 2, 3, 4 crashed from step 200" in fourth.opened["note"]
    found = view(service, 200)
    assert found["health"] == "quarantined"
    assert "Attempts 2, 3, 4" in found["health_reason"]
    assert found["etag"] != etag
    events = answer(service.http().get("/v1/audit-events", params={"action": "checkpoint.quarantine"}))["items"]
    assert [(event["actor_kind"], event["actor"], event["checkpoint_id"]) for event in events] == [
        ("controller", "crash-loop", found["id"])
    ]
    again = Job(service.http(), launch_id="fourth", after=4)
    assert offered(again) == 100, "the same launch that lost its reply"


def test_a_diverged_commit_is_no_progress(service: RunningService) -> None:
    first = Job(service.http())
    for step in (100, 200):
        first.save(step)
    for number in range(1, 4):
        job = Job(service.http(), after=number)
        job.resumed_from(job.opened["restore_point"]["checkpoint_id"])
        assert job.save(200 + number, finite=False)["health"] == "diverged"
        job.end("failed", error_type="RuntimeError")
    assert offered(Job(service.http(), after=4)) == 100
    assert view(service, 200)["health"] == "quarantined"


def test_a_store_that_is_unavailable_quarantines_nothing(service: RunningService) -> None:
    Job(service.http()).save(100)
    Job(service.http(), after=1).save(200)
    for number in range(2, 6):
        Job(service.http(), after=number).end("failed", error_type="holdfast_client.errors.StoreUnavailable")
    assert offered(Job(service.http(), after=6)) == 200
    assert view(service, 200)["health"] == "ok"


@pytest.mark.rule("database-clock")
@pytest.mark.parametrize("jump", [0, -3600, 3600])
def test_a_released_checkpoint_is_not_quarantined_again_at_once(
    service: RunningService, clock: Clock, jump: float
) -> None:
    first = Job(service.http())
    for step in (100, 200):
        first.save(step)
    last = crash(service, 3, after=1)
    Job(service.http(), after=last).end("failed")
    found = view(service, 200)
    clock.advance(jump)
    edit = {"health": "ok"}
    answer(service.http().patch(f"/v1/checkpoints/{found['id']}", json=edit, headers={"If-Match": found["etag"]}))
    clock.advance(-jump)
    last = crash(service, 2, after=last + 1)
    assert offered(Job(service.http(), after=last, launch_id="x")) == 200
    Job(service.http(), after=last, launch_id="x").end("failed")
    assert offered(Job(service.http(), after=last + 1)) == 100, "three more crashes count"


def test_a_release_that_an_older_service_has_noted_counts_too(service: RunningService) -> None:
    first = Job(service.http())
    for step in (100, 200):
        first.save(step)
    last = crash(service, 3, after=1)
    Job(service.http(), after=last).end("failed")
    found = view(service, 200)
    edit = {"health": "ok"}
    answer(service.http().patch(f"/v1/checkpoints/{found['id']}", json=edit, headers={"If-Match": found["etag"]}))
    with service.context.database.transaction() as session:
        noted = session.scalars(select(AuditEvent).order_by(AuditEvent.id.desc())).first()
        assert noted is not None
        assert noted.after is not None
        columns = {name: getattr(noted, name) for name in AuditEvent.__table__.c.keys() if name != "id"}
        older = {name: value for name, value in noted.after.items() if name != "latest_attempt"}
        session.add(AuditEvent(**columns | {"after": older}))
    last = crash(service, 2, after=last + 1)
    assert offered(Job(service.http(), after=last, launch_id="x")) == 200


def test_a_job_that_crashes_at_every_start_does_not_eat_its_checkpoints(service: RunningService) -> None:
    first = Job(service.http())
    for step in (100, 200, 300, 400):
        first.save(step)
    last = crash(service, 9, after=1)
    job = Job(service.http(), after=last)
    assert offered(job) == 200
    assert "the job seems to be at fault" in job.opened["note"]
    assert [view(service, step)["health"] for step in (400, 300, 200, 100)] == ["quarantined"] * 2 + ["ok"] * 2


def test_the_last_healthy_checkpoint_is_offered_however_often_it_crashes(service: RunningService) -> None:
    Job(service.http()).save(100)
    job = Job(service.http(), after=crash(service, 4, after=1))
    assert offered(job) == 100
    assert "no other healthy checkpoint is left" in job.opened["note"]


@pytest.mark.races
def test_of_two_launches_at_once_one_quarantines_and_the_other_is_refused(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Job(service.http())
    for step in (100, 200, 300):
        first.save(step)
    last = crash(service, 3, after=1)
    gate = hold_before(monkeypatch, opening, "break_crash_loop")
    held, other = overlap(
        service, gate, lambda: Job(service.http(), after=last), lambda: Job(service.http(), after=last)
    )
    assert offered(held.result()) == 200
    with refused("attempt_conflict"):
        other.result()
    assert [view(service, step)["health"] for step in (300, 200)] == ["quarantined", "ok"]


def test_a_spell_of_diverged_saves_pushes_no_healthy_point_out_and_the_run_comes_back(service: RunningService) -> None:
    job = Job(service.http())
    for step in (100, 200, 300):
        job.save(step)
    for step in range(400, 900, 100):
        verdict = {"healthy": False, "reason": "model/head.weight held NaN or infinity"}
        assert job.save(step, verdict=verdict, metrics={"loss": {"value": 1.0}})["health"] == "diverged"
    put_policy(service, keep_last=1)
    apply(service, plan(service))
    kept = answer(service.http().get(f"{job.base}/checkpoints", params={"state": "committed", "health": "ok"}))["items"]
    assert [one["step"] for one in kept] == [300, 200]
    back = answer(
        service.http().post(
            f"{job.base}/attempts", json={"launch_id": "back", "after": 1, "world_size": 1, "rolls_back": 1}
        )
    )
    assert (back["attempt"], back["restore_point"]["step"]) == (2, 300)


def test_the_trainers_verdict_is_the_word_on_metrics_and_an_older_client_is_judged_by_them(
    service: RunningService,
) -> None:
    job = Job(service.http())
    metrics = {"grad_norm": {"nonfinite": "inf"}}
    assert job.save(1, metrics=metrics)["health_reason"] == "the metric grad_norm is inf"
    assert job.save(2, metrics=metrics, verdict={"healthy": True})["health"] == "ok"
    assert job.save(3, finite=False, verdict={"healthy": False, "reason": "spike"})["health_reason"] == "spike"
    assert job.save(4, finite=False)["health_reason"] == "NaN or infinity in the state of rank 0"


def test_an_edit_that_comes_first_is_kept(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Job(service.http())
    for step in (100, 200):
        first.save(step)
    last = crash(service, 3, after=1)
    gate = hold_before(monkeypatch, opening, "break_crash_loop")
    found = view(service, 200)
    edit = {"health": "diverged", "health_reason": "seen by a person"}
    url, match = f"/v1/checkpoints/{found['id']}", {"If-Match": found["etag"]}
    held, editing = overlap(
        service,
        gate,
        lambda: Job(service.http(), after=last),
        lambda: service.http().patch(url, json=edit, headers=match),
    )
    held.result()
    edited = editing.result()
    assert view(service, 200)["health"] == ("diverged" if edited.is_success else "quarantined")
    if not edited.is_success:
        assert edited.json()["code"] == "edit_conflict"


def test_a_job_that_goes_back_by_itself_is_no_crash_and_fences_itself(service: RunningService) -> None:
    job = Job(service.http())
    job.save(100)
    job.save(200)
    for number in range(1, 5):
        opened = answer(
            service.http().post(
                f"{job.base}/attempts",
                json={"launch_id": f"back-{number}", "after": number, "world_size": 1, "rolls_back": number},
            )
        )
        assert opened["attempt"] == number + 1
        assert opened["components"] == ["model"]
    attempts = answer(service.http().get(f"{job.base}/attempts"))["items"]
    assert [bool(each["rolled_back_at"]) for each in attempts] == [False] + [True] * 4
    with refused("stale_attempt"):
        job.save(300)
    assert view(service, 200)["health"] == "ok"
    reply = service.http().post(
        f"{job.base}/attempts", json={"launch_id": "y", "after": 5, "world_size": 1, "rolls_back": 4}
    )
    assert reply.json()["code"] == "invalid_request"
