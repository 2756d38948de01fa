"""Receivers that keep an alert until they hear of its end: each alert ends, also with the attempt that it is about."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

import holdfast_service.liveness.stalled_attempts as liveness
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.db.tables.webhooks import Webhook
from holdfast_service.liveness.lost_attempts import mark_lost
from holdfast_service.webhooks.controller import WebhooksReport, reconcile
from tests.service.conftest import Clock
from tests.support.interleave import refused
from tests.support.rank import Job, answer
from tests.support.scripted_http import Reply
from tests.support.service import RunningService
from tests.support.webhooks import Receiver, deliveries, make_hook


def test_a_stall_that_is_over_is_not_told_late_to_who_keeps_alerts(
    service: RunningService, receiver: Receiver, clock: Clock
) -> None:
    project_id = service.make_project("demo")
    body = {"url": receiver.url, "events": ["run.stalled", "run.goes_on"], "format": "alertmanager"}
    hook = answer(service.http().post("/v1/projects/demo/webhooks", json=body))

    def record(action: str) -> None:
        with service.context.database.transaction() as session:
            record_event(
                session,
                Actor.controller("liveness"),
                action,
                project_id=project_id,
                after={"attempt": 1, "step": 7},
            )

    receiver.says = Reply(503)
    record("attempt.stalled")
    assert reconcile(service.context).failed == 1
    receiver.says = Reply(200)
    record("attempt.goes_on")
    clock.advance(3600)
    assert reconcile(service.context) == WebhooksReport(done=1)
    assert [seen.json[0]["labels"]["event"] for seen in receiver.seen] == ["run.stalled"] * 2
    assert receiver.seen[0].json[0]["endsAt"] > receiver.seen[1].json[0]["endsAt"]
    assert [view["last_error"] for view in deliveries(service, hook)] == [None, "a later call says otherwise"]
    record("attempt.stalled")
    assert reconcile(service.context) == WebhooksReport(done=1)


def test_an_alert_that_arrives_days_late_is_open(service: RunningService, receiver: Receiver, clock: Clock) -> None:
    service.make_project("demo")
    body = {"url": receiver.url, "events": ["attempt.failed"], "format": "alertmanager"}
    hook = answer(service.http().post("/v1/projects/demo/webhooks", json=body))
    receiver.says = Reply(410)
    Job(service.http()).end("failed")
    assert reconcile(service.context).failed == 1
    clock.advance(2 * 86_400)
    receiver.says = Reply(200)
    (call,) = deliveries(service, hook)
    answer(service.http().post(f"/v1/webhooks/{hook['id']}/deliveries/{call['id']}/redeliver"))
    assert reconcile(service.context).done == 1
    first, second = (seen.json[0] for seen in receiver.seen)
    assert first["startsAt"] == second["startsAt"]
    assert datetime.fromisoformat(second["endsAt"]) - datetime.fromisoformat(first["endsAt"]) >= timedelta(days=2)


def test_a_webhook_that_was_made_before_an_end_was_told_hears_it(
    service: RunningService, receiver: Receiver, clock: Clock
) -> None:
    service.make_project("demo")
    hook = _incidents(service, receiver, "attempt.lost")
    with service.context.database.transaction() as session:
        session.execute(update(Webhook).where(Webhook.id == hook["id"]).values(events=["attempt.lost"]))
    (listed,) = answer(service.http().get("/v1/projects/demo/webhooks"))["items"]
    assert listed["events"] == ["attempt.lost", "attempt.revived"]
    job = Job(service.http())
    job.heartbeat(7)
    _is_lost(service, clock)
    assert reconcile(service.context).done == 1
    job.heartbeat(8)
    assert reconcile(service.context).done == 1
    assert [seen.json["event_action"] for seen in receiver.seen] == ["trigger", "resolve"]


def _incidents(service: RunningService, receiver: Receiver, *events: str) -> dict[str, Any]:
    """A webhook of PagerDuty."""
    body = {"url": receiver.url, "events": events, "format": "pagerduty", "routing_key": "0123456789abcdef"}
    return dict(answer(service.http().post("/v1/projects/demo/webhooks", json=body)))


def _stands_still(service: RunningService, job: Job, clock: Clock) -> None:
    job.heartbeat(7, steps_run=7, progress_age_seconds=10**6, doing="training")
    clock.advance(3600)
    job.heartbeat(7, steps_run=7, progress_age_seconds=3600, doing="training")
    assert liveness.reconcile(service.context).stalled == 1


def _is_lost(service: RunningService, clock: Clock) -> None:
    clock.advance(51)
    with service.context.database.transaction() as session:
        assert mark_lost(session, Actor.controller("reap"), service.context.settings) == 1


@pytest.mark.parametrize("end", ["finished", "failed", "preempted", "fenced", "rolled back", "lost"])
def test_the_incident_of_a_stall_ends_with_the_attempt(
    service: RunningService, receiver: Receiver, clock: Clock, end: str
) -> None:
    service.make_project("demo")
    hook = _incidents(service, receiver, "run.stalled")
    assert hook["events"] == ["run.goes_on", "run.stalled"]
    job = Job(service.http())
    _stands_still(service, job, clock)
    assert reconcile(service.context).done == 1
    match end:
        case "fenced":
            Job(service.http(), after=1)
        case "rolled back":
            body = {"launch_id": "back", "after": 1, "world_size": 1, "rolls_back": 1}
            answer(service.http().post(f"{job.base}/attempts", json=body))
        case "lost":
            _is_lost(service, clock)
        case outcome:
            for _ in range(2):  # the reply was lost
                job.end(outcome)
    assert reconcile(service.context).done == 1
    stalled, over = (seen.json for seen in receiver.seen)
    assert (stalled["event_action"], over["event_action"]) == ("trigger", "resolve")
    assert stalled["dedup_key"] == over["dedup_key"]
    outcome = "fenced" if end == "rolled back" else end
    assert over["payload"]["summary"].endswith(f"run.goes_on. its attempt has ended: {outcome}")
    assert job.view()["stalled_at"] is None
    liveness.reconcile(service.context)
    assert reconcile(service.context) == WebhooksReport(), "once"


def test_a_lost_attempt_that_calls_again_ends_its_incident_and_its_stall_is_told_anew(
    service: RunningService, receiver: Receiver, clock: Clock
) -> None:
    service.make_project("demo")
    _incidents(service, receiver, "run.stalled", "attempt.lost")
    job = Job(service.http())
    _stands_still(service, job, clock)
    _is_lost(service, clock)
    for _ in range(2):
        job.heartbeat(7, steps_run=7, progress_age_seconds=3651, doing="training")
    assert liveness.reconcile(service.context).stalled == 1
    while reconcile(service.context).done:
        pass
    told = [(seen.json["event_action"], seen.json["dedup_key"].split()[0]) for seen in receiver.seen]
    # What a later call takes back is not told late: of the first stall and of the loss only what holds now.
    assert told == [("resolve", "attempt.lost"), ("trigger", "run.stalled")]


@pytest.mark.parametrize("end", ["heartbeat", "end", "fenced"])
def test_an_attempt_that_was_not_lost_after_all_ends_its_incident(
    service: RunningService, receiver: Receiver, clock: Clock, end: str
) -> None:
    service.make_project("demo")
    hook = _incidents(service, receiver, "attempt.lost")
    assert hook["events"] == ["attempt.lost", "attempt.revived"]
    job = Job(service.http())
    job.heartbeat(7)
    _is_lost(service, clock)
    assert reconcile(service.context).done == 1
    if end == "fenced":
        Job(service.http(), after=1)
        with refused("stale_attempt"):
            job.heartbeat(8)
    else:
        job.heartbeat(8) if end == "heartbeat" else job.end("finished")
    assert reconcile(service.context).done == 1
    lost, over = (seen.json for seen in receiver.seen)
    assert (lost["event_action"], over["event_action"]) == ("trigger", "resolve")
    assert lost["dedup_key"] == over["dedup_key"]


def test_a_receiver_that_keeps_no_alerts_is_told_what_was_asked_for(
    service: RunningService, receiver: Receiver
) -> None:
    service.make_project("demo")
    assert make_hook(service, receiver.url, "run.stalled", "store.unavailable")["events"] == [
        "run.stalled",
        "store.unavailable",
    ]
    keeps = _incidents(service, receiver, "run.stalled", "store.unavailable", "checkpoint.corrupt")
    assert keeps["events"] == [
        "checkpoint.corrupt", "run.goes_on", "run.stalled", "store.available", "store.unavailable",
    ]  # fmt: skip
