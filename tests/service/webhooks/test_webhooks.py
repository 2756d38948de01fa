"""Calls of webhooks against a real receiver: what a transaction has left arrives, signed, and nothing else is told."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update
from typer.testing import CliRunner

import holdfast_service.liveness.stalled_attempts as liveness
import holdfast_service.webhooks.controller as webhooks
from holdfast_client.cli.main import app
from holdfast_client.cli.output import ExitCode
from holdfast_protocol.states import Scope
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.db.tables.webhooks import Webhook, WebhookDelivery
from holdfast_service.webhooks.controller import WebhooksReport, reconcile
from holdfast_service.webhooks.deliver import MOST_TRIES, Answer, call
from holdfast_service.webhooks.target import RefusedTargetError, Target, find_target
from tests.service.conftest import Clock
from tests.support.interleave import in_background
from tests.support.rank import Job, answer
from tests.support.retention import prune, purge
from tests.support.scripted_http import DROP, Reply, Seen
from tests.support.service import RunningService
from tests.support.tls import self_signed
from tests.support.webhooks import Receiver, deliveries, make_hook


def check_signature(seen: Seen, secret: str) -> None:
    """As a receiver would, with nothing of ours."""
    headers = {name.lower(): value for name, value in seen.headers.items()}
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + seen.body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"


def test_what_happens_to_a_run_is_told_once_and_signed(
    service: RunningService, receiver: Receiver, clock: Clock
) -> None:
    service.make_project("demo")
    hook = make_hook(service, f"{receiver.url}/hook?key=s3cret", "attempt.failed", "attempt.lost", "run.stalled")
    assert hook["url"] == f"{receiver.url}/hook?…"
    assert hook["secret"].startswith("whsec_")
    job = Job(service.http())
    job.heartbeat(7, steps_run=7, progress_age_seconds=10**6, doing="training")
    clock.advance(3600)
    job.heartbeat(7, steps_run=7, progress_age_seconds=3600, doing="training")
    liveness.reconcile(service.context)
    for _ in range(2):  # the reply was lost, and it is told again
        job.end("failed", error_type="ValueError", error_rank=1, detail="ValueError: GET https://x.example/a?sig=1")
    Job(service.http(), after=1).end("finished")  # nobody wants to hear of it
    assert reconcile(service.context) == WebhooksReport(done=2)
    assert reconcile(service.context) == WebhooksReport()
    stalled, failed = receiver.seen
    for seen in (stalled, failed):
        check_signature(seen, hook["secret"])
        assert (seen.method, seen.path, seen.query) == ("POST", "/hook", {"key": "s3cret"})
    assert (stalled.json["type"], stalled.json["data"]["step"]) == ("run.stalled", 7)
    assert failed.json["type"] == "attempt.failed"
    assert failed.json["data"] == {
        "project": "demo",
        "run": "gpt",
        "attempt": 1,
        "step": 7,
        "checkpoint_id": None,
        "operation": None,
        "store": None,
        "quota": None,
        "reason": "ValueError: GET https://x.example/a?***",
    }
    assert {view["delivered_at"] is not None for view in deliveries(service, hook)} == {True}
    with service.context.database.read() as session:
        events = session.scalars(select(AuditEvent).where(AuditEvent.action.startswith("webhook."))).all()
    assert [event.action for event in events] == ["webhook.create"]
    kept = json.dumps([event.after for event in events])
    assert "s3cret" not in kept
    assert hook["secret"] not in kept


def test_the_life_of_a_checkpoint_is_told(service: RunningService, receiver: Receiver, clock: Clock) -> None:
    service.make_project("demo")
    life = ["committed", "aborted", "trashed", "purged"]
    make_hook(service, receiver.url, *(f"checkpoint.{each}" for each in life), "restore.finished")
    job = Job(service.http())
    first, second, third = (job.save(step)["id"] for step in (1, 2, 3))
    save = job.begin(4)
    save.abort("the loss is NaN")
    again = Job(service.http(), after=1)
    for _ in range(2):  # the reply was lost
        again.resumed_from(third)
    prune(service, checkpoint_ids=[first])
    clock.advance(30 * 86400)
    purge(service)
    reconcile(service.context)
    told = [
        (seen.json["type"], seen.json["data"]["checkpoint_id"], seen.json["data"]["step"]) for seen in receiver.seen
    ]
    assert sorted(told) == sorted(
        [
            ("checkpoint.committed", first, 1),
            ("checkpoint.committed", second, 2),
            ("checkpoint.committed", third, 3),
            ("checkpoint.aborted", save.id, 4),
            ("restore.finished", third, 3),
            ("checkpoint.trashed", first, 1),
            ("checkpoint.purged", first, 1),
        ]
    )


def test_who_needs_to_hear_is_told_before_what_comes_by_the_thousand(
    service: RunningService, receiver: Receiver
) -> None:
    service.make_project("demo")
    make_hook(service, receiver.url, "checkpoint.committed", "attempt.failed")
    job = Job(service.http())
    job.save(1)
    job.end("failed")
    assert reconcile(service.context) == WebhooksReport(done=2)
    assert [seen.json["type"] for seen in receiver.seen] == ["attempt.failed", "checkpoint.committed"]


def test_a_call_that_a_later_version_has_left_holds_no_other_up(service: RunningService, receiver: Receiver) -> None:
    service.make_project("demo")
    hook = make_hook(service, receiver.url, "attempt.failed")
    Job(service.http()).end("failed")
    with service.context.database.transaction() as session:
        session.execute(update(Webhook).where(Webhook.id == hook["id"]).values(format="of tomorrow"))
    make_hook(service, receiver.url, "attempt.failed")
    Job(service.http(), after=1).end("failed")
    assert (reconcile(service.context).done, len(receiver.seen)) == (1, 1)


def test_a_deleted_webhook_leaves_nothing_in_the_catalog_that_its_receiver_would_take(
    service: RunningService, receiver: Receiver
) -> None:
    service.make_project("demo")
    hook = make_hook(service, f"{receiver.url}/hook?token=s3cret", "attempt.failed")
    for _ in range(2):
        deleted = answer(service.http().delete(f"/v1/webhooks/{hook['id']}"))
        assert deleted["url"] == hook["url"] == f"{receiver.url}/hook?…"
    with service.context.database.read() as session:
        row = session.get_one(Webhook, hook["id"])
        assert (row.url, row.secret) == (hook["url"], b"")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_call_that_meets_a_bug_fails_and_holds_no_other_of_its_project_up(
    service: RunningService, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(target: Target, *more: Any) -> Answer:
        if target.path == "/0":
            raise RuntimeError("can't start new thread")
        return call(target, *more)

    service.make_project("demo")
    first, _ = (make_hook(service, f"{receiver.url}/{at}", "attempt.failed") for at in range(2))
    Job(service.http()).end("failed")
    monkeypatch.setattr(webhooks, "call", breaks)
    report = reconcile(service.context)
    assert (report.done, report.failed) == (1, 1)
    (told,) = deliveries(service, first)
    assert (told["tries"], told["given_up_at"]) == (1, None)
    assert "a bug of the service (RuntimeError)" in told["last_error"]
    assert "webhook_not_called" in caplog.text


def test_a_host_that_no_resolver_takes_is_refused_and_holds_no_other_call_up(
    service: RunningService, receiver: Receiver
) -> None:
    service.make_project("demo")
    unspeakable = f"https://{'a' * 64}.example/"
    refused = service.http().post("/v1/projects/demo/webhooks", json={"url": unspeakable, "events": ["attempt.failed"]})
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
    old, _ = (make_hook(service, f"{receiver.url}/{at}", "attempt.failed") for at in range(2))
    with service.context.database.transaction() as session:  # made before such a host was refused
        session.execute(update(Webhook).where(Webhook.id == old["id"]).values(url=unspeakable))
    Job(service.http()).end("failed")
    report = reconcile(service.context)
    assert (report.done, report.failed) == (1, 1)
    assert "no name that can be looked up" in deliveries(service, old)[0]["last_error"]


def test_what_pagerduty_and_slack_keep_secret_is_shown_nowhere(
    service: RunningService, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service.make_project("demo")
    monkeypatch.setenv("HOLDFAST_URL", service.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", service.token(Scope.ADMIN, project="demo"))
    key = tmp_path / "key"
    key.write_text("0123456789abcdef\n")
    create = ["webhooks", "create", "demo", "--url", f"{receiver.url}/services/T0/s3cret", "--events", "run.stalled"]
    shown = []
    for more in (["slack"], ["pagerduty", "--routing-key-file", str(key)], ["alertmanager"]):
        ran = CliRunner().invoke(app, [*create, "--format", *more])
        assert ran.exit_code == 0, ran.output
        shown.append(ran.output)
    assert CliRunner().invoke(app, [*create, "--format", "pagerduty"]).exit_code == 2
    listed = service.http().get("/v1/projects/demo/webhooks")
    shown += [listed.text, service.http().get("/v1/audit-events").text]
    for one in answer(listed)["items"]:
        answer(service.http().post(f"/v1/webhooks/{one['id']}/test"))
    assert reconcile(service.context) == WebhooksReport(done=3)
    assert [text for text in shown if "s3cret" in text or "0123456789abcdef" in text] == []
    for one in answer(listed)["items"]:
        answer(service.http().delete(f"/v1/webhooks/{one['id']}"))
    with service.context.database.read() as session:
        assert [url for url in session.scalars(select(Webhook.url)) if "s3cret" in url] == []
    bodies = [seen.json for seen in receiver.seen]
    assert [body["text"].partition(".")[0] for body in bodies if "text" in body] == ["demo: webhook"]
    assert [body["routing_key"] for body in bodies if "routing_key" in body] == ["0123456789abcdef"]
    assert [body[0]["labels"]["project"] for body in bodies if isinstance(body, list)] == ["demo"]
    assert all("webhook-signature" not in map(str.lower, seen.headers) for seen in receiver.seen)


def test_a_call_is_made_again_with_the_same_id_until_it_arrives_or_is_given_up(
    service: RunningService, receiver: Receiver, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.make_project("demo")
    hook = make_hook(service, receiver.url, "attempt.failed")
    receiver.says = Reply(503, b"later")
    Job(service.http()).end("failed")
    assert reconcile(service.context) == WebhooksReport(failed=1, error="the receiver has answered 503")
    assert reconcile(service.context) == WebhooksReport(), "not before its time"
    clock.advance(7)
    receiver.says = DROP
    reconcile(service.context)
    clock.advance(30)
    receiver.says = Reply(302, headers={"Location": "http://169.254.169.254/latest"})
    assert reconcile(service.context).error == "the receiver has answered 302", "no redirect is followed"
    clock.advance(120)
    receiver.says = Reply(200)
    assert reconcile(service.context) == WebhooksReport(done=1)
    assert len({seen.headers["webhook-id"] for seen in receiver.seen}) == 1
    assert len({seen.headers["webhook-timestamp"] for seen in receiver.seen}) == 4
    (view,) = deliveries(service, hook)
    assert (view["tries"], view["last_status"], view["last_error"]) == (4, 200, None)
    # One that never arrives.
    receiver.says = Reply(500)
    Job(service.http(), after=1).end("failed")
    given_up = 0
    for _ in range(MOST_TRIES):
        given_up += reconcile(service.context).given_up
        clock.advance(6 * 3600)
    assert given_up == 1
    assert reconcile(service.context) == WebhooksReport()
    view, _ = deliveries(service, hook)
    assert (view["tries"], view["delivered_at"], view["next_try_at"]) == (MOST_TRIES, None, None)
    assert answer(service.http().get("/v1/projects/demo/webhooks"))["items"][0]["given_up"] == 1
    # 410 means that nobody is there any more.
    receiver.says = Reply(410)
    Job(service.http(), after=2).end("failed")
    assert reconcile(service.context).given_up == 1
    assert answer(service.http().delete(f"/v1/webhooks/{hook['id']}"))["id"] == hook["id"]
    with service.context.database.read() as session:
        assert session.scalars(select(Webhook.secret)).all() == [b""]
    assert len(deliveries(service, hook)) == 3
    clock.advance(31 * 86400)
    monkeypatch.setattr("holdfast_service.webhooks.controller._AT_ONCE", 2)
    reconcile(service.context)
    with service.context.database.read() as session:
        assert session.scalars(select(WebhookDelivery.id)).all() == session.scalars(select(Webhook.id)).all() == []


def test_a_call_is_sent_again_when_a_person_asks_for_it(
    service: RunningService, receiver: Receiver, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.make_project("demo")
    hook = make_hook(service, receiver.url, "attempt.failed")
    receiver.says = Reply(410)
    Job(service.http()).end("failed")
    assert reconcile(service.context).given_up == 1
    (given_up,) = deliveries(service, hook)
    http, route = service.http(), f"/v1/webhooks/{hook['id']}/deliveries/{given_up['id']}"
    once = {"Idempotency-Key": "once"}
    reply = http.post(f"{route}/redeliver", headers=once)
    assert reply.status_code == 202
    due = answer(reply)
    assert (due["id"], due["tries"], due["given_up_at"], due["last_status"]) == (given_up["id"], 0, None, None)
    assert due["next_try_at"] is not None
    receiver.says = Reply(200)
    assert reconcile(service.context) == WebhooksReport(done=1)
    first, second = receiver.seen
    assert (first.headers["webhook-id"], first.body) == (second.headers["webhook-id"], second.body)
    check_signature(second, hook["secret"])
    # The reply was lost and the call is sent twice: nothing more is made. With another key it is another wish.
    assert answer(http.post(f"{route}/redeliver", headers=once))["delivered_at"] is not None
    assert reconcile(service.context) == WebhooksReport()
    answer(http.post(f"{route}/redeliver", headers={"Idempotency-Key": "twice"}))
    assert reconcile(service.context) == WebhooksReport(done=1)
    said = [each for each in answer(http.get("/v1/audit-events"))["items"] if each["action"] == "webhook.redeliver"]
    assert [each["after"]["delivery"] for each in said] == [given_up["id"]] * 2
    assert said[-1]["before"]["status"] == 410
    # The command line waits for the answer.
    monkeypatch.setenv("HOLDFAST_URL", service.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", service.token(Scope.ADMIN, project="demo"))
    receiver.says = Reply(500)
    over = threading.Event()

    def makes_what_is_due() -> None:
        while not over.wait(0.05):
            reconcile(service.context)

    with in_background() as threads:
        making = threads.submit(makes_what_is_due)
        told = CliRunner().invoke(app, ["webhooks", "redeliver", hook["id"], given_up["id"]])
        over.set()
    making.result()
    assert told.exit_code == ExitCode.FAILED
    assert "has not arrived: the receiver answers 500" in told.stdout
    for unknown in ("msg_1", given_up["id"] + "0", "msg_x_y"):
        base = f"/v1/webhooks/{hook['id']}/deliveries/{unknown}"
        assert http.get(base).json()["code"] == "delivery_not_found", unknown
        assert http.post(f"{base}/redeliver").json()["code"] == "delivery_not_found", unknown
    answer(http.delete(f"/v1/webhooks/{hook['id']}"))
    assert http.post(f"{route}/redeliver").json()["code"] == "invalid_request"


def test_a_call_that_is_being_made_is_not_sent_twice(
    service: RunningService, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.make_project("demo")
    hook = make_hook(service, receiver.url, "attempt.failed")
    Job(service.http()).end("failed")
    (made,) = deliveries(service, hook)

    def asked_for_meanwhile(*given: Any) -> Answer:
        asked = answer(service.http().post(f"/v1/webhooks/{hook['id']}/deliveries/{made['id']}/redeliver"))
        assert asked["tries"] == 1
        return call(*given)

    monkeypatch.setattr(webhooks, "call", asked_for_meanwhile)
    assert reconcile(service.context) == WebhooksReport(done=1)
    assert reconcile(service.context) == WebhooksReport()
    assert len(receiver.seen) == 1


def test_the_last_try_of_a_call_that_is_asked_for_meanwhile_is_not_its_last(
    service: RunningService, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.make_project("demo")
    hook = make_hook(service, receiver.url, "attempt.failed")
    Job(service.http()).end("failed")
    (made,) = deliveries(service, hook)
    with service.context.database.transaction() as session:
        session.execute(update(WebhookDelivery).values(tries=MOST_TRIES - 1))
    receiver.says = Reply(503)

    def asked_for_meanwhile(*given: Any) -> Answer:
        asked = answer(service.http().post(f"/v1/webhooks/{hook['id']}/deliveries/{made['id']}/redeliver"))
        assert (asked["tries"], asked["last_error"]) == (1, None)
        return call(*given)

    monkeypatch.setattr(webhooks, "call", asked_for_meanwhile)
    reconcile(service.context)
    (again,) = deliveries(service, hook)
    assert (again["tries"], again["given_up_at"], again["last_status"]) == (1, None, 503)


def test_of_many_processes_one_makes_a_call_and_who_dies_at_it_is_stood_in_for(
    service: RunningService, receiver: Receiver, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.make_project("demo")
    hook = make_hook(service, receiver.url, "attempt.failed")
    for number in range(5):
        Job(service.http(), after=number).end("failed")
    with in_background() as threads:
        done = sum(report.done for report in threads.map(lambda _: reconcile(service.context), range(4)))
    assert (done, len(receiver.seen)) == (5, 5)
    # Killed after the call, before it was noted: it comes again, with the same id, once the lease is over.
    Job(service.http(), after=5).end("failed")
    with monkeypatch.context() as dying:
        dying.setattr(webhooks, "_settle", _dies)
        with pytest.raises(KeyboardInterrupt):
            reconcile(service.context)
    assert reconcile(service.context) == WebhooksReport()
    clock.advance(121)
    assert reconcile(service.context) == WebhooksReport(done=1)
    assert receiver.seen[-1].headers["webhook-id"] == receiver.seen[-2].headers["webhook-id"]
    assert receiver.seen[-1].body == receiver.seen[-2].body
    assert len(deliveries(service, hook)) == 6


def test_a_project_whose_receivers_do_not_answer_holds_no_other_up(
    service: RunningService, receiver: Receiver, clock: Clock
) -> None:
    for project in ("demo", "other"):
        service.make_project(project)
    for at in range(3):
        make_hook(service, f"{receiver.url}/{at}", "attempt.failed")
    for number in range(2):
        Job(service.http(), after=number).end("failed")
    clock.advance(1)
    other = make_hook(service, f"{receiver.url}/other", "attempt.failed", project="other")["id"]
    Job(service.http(), "other/gpt").end("failed")
    with in_background() as threads:
        claims = list(threads.map(lambda _: webhooks._claim(service.context), range(4)))
    held = sorted((claim for claim in claims if claim is not None), key=lambda claim: claim.hook.id == other)
    assert [claim.hook.id == other for claim in held] == [False, True], "one of each project"
    assert webhooks._settle(service.context, held[0], Answer(None, "cannot be reached")) == 0
    order = []
    while (claim := webhooks._claim(service.context)) is not None:
        order.append(claim.hook.id)
        webhooks._settle(service.context, claim, Answer(204))
    assert len(order) == 5
    assert order.index(held[0].hook.id) == 4, "who owes an answer comes after the others"
    webhooks._settle(service.context, held[1], Answer(204))


@pytest.mark.rule("database-clock")
def test_calls_that_were_left_and_claimed_while_the_clock_was_ahead_are_made_once_it_is_right(
    service: RunningService, receiver: Receiver, clock: Clock
) -> None:
    service.make_project("demo")
    make_hook(service, receiver.url, "attempt.failed")
    clock.advance(40 * 86400)
    for number in range(2):
        Job(service.http(), after=number).end("failed")
    assert webhooks._claim(service.context) is not None, "its process dies"
    clock.advance(-40 * 86400)
    Job(service.http(), after=2).end("failed")
    assert reconcile(service.context).done == 3
    assert len(receiver.seen) == 3


def _dies(*_: object) -> int:
    raise KeyboardInterrupt


def test_what_did_not_happen_is_not_told(service: RunningService, receiver: Receiver) -> None:
    project_id = service.make_project("demo")
    make_hook(service, receiver.url, "checkpoint.quarantined", "checkpoint.diverged")
    with pytest.raises(TypeError), service.context.database.transaction() as session:
        _quarantines(session, project_id, then=None)
    assert reconcile(service.context) == WebhooksReport()
    with service.context.database.transaction() as session:
        _quarantines(session, project_id)
    view = Job(service.http()).save(5, finite=False)
    assert view["health"] == "diverged"
    assert reconcile(service.context) == WebhooksReport(done=2)
    assert [seen.json["type"] for seen in receiver.seen] == ["checkpoint.quarantined", "checkpoint.diverged"]
    assert receiver.seen[1].json["data"] | {"reason": ""} == {
        "project": "demo", "run": "gpt", "attempt": 1, "step": 5, "checkpoint_id": view["id"],
        "operation": None, "store": None, "quota": None, "reason": "",
    }  # fmt: skip


def _quarantines(session: Any, project_id: str, then: Any = bool) -> None:
    record_event(
        session,
        Actor.controller("crash-loop"),
        "checkpoint.quarantine",
        project_id=project_id,
        checkpoint_id="ck_1",
        before={"health": "ok"},
        after={"health": "quarantined"},
    )
    then()


def test_only_a_projects_administrators_see_and_change_its_webhooks(
    service: RunningService, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("demo", "other"):
        service.make_project(name)
    hook = make_hook(service, receiver.url, "attempt.failed")
    base = f"/v1/webhooks/{hook['id']}"
    for token in (
        service.token(Scope.ADMIN, project="other"),
        service.token(Scope.READ, Scope.TRAIN, Scope.OPERATE, project="demo"),
    ):
        stranger = service.http(token=token)
        body = {"url": receiver.url, "events": ["attempt.failed"]}
        assert stranger.post("/v1/projects/demo/webhooks", json=body).status_code == 403
        for method, route in (
            ("GET", "/v1/projects/demo/webhooks"),
            ("GET", f"{base}/deliveries"),
            ("GET", f"{base}/deliveries/msg_1"),
            ("POST", f"{base}/deliveries/msg_1/redeliver"),
            ("POST", f"{base}/test"),
            ("DELETE", base),
        ):
            # Another project's administrator is not even told that it is there.
            refused_with = {403, 404} if route.startswith(base) else {403}
            assert stranger.request(method, route).status_code in refused_with, (method, route)
    http = service.http()
    assert http.delete("/v1/webhooks/wh_unknown").json()["code"] == "webhook_not_found"
    for url in ("http://127.0.0.1:1/", "https://u:p@a.example/", "ftp://a.example/x"):
        refused = http.post("/v1/projects/demo/webhooks", json={"url": url, "events": ["attempt.lost"]})
        assert refused.json()["code"] == "invalid_request", url
    assert http.post("/v1/projects/demo/webhooks", json={"url": receiver.url, "events": ["x"]}).status_code == 422
    # The command line, up to a call that is made and one that is not: the webhook is deleted first.
    monkeypatch.setenv("HOLDFAST_URL", service.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", service.token(Scope.ADMIN, project="demo"))
    run = CliRunner().invoke
    events = ["--events", "run.stalled, attempt.lost"]
    added = json.loads(run(app, ["webhooks", "create", "demo", "--url", receiver.url, *events, "--json"]).stdout)
    assert added["events"] == ["attempt.lost", "run.stalled"]
    answer(http.post(f"/v1/webhooks/{added['id']}/test"))
    reconcile(service.context)
    assert receiver.seen[-1].json["type"] == "webhook.test"
    assert "delivered" in run(app, ["webhooks", "deliveries", added["id"]], env={"COLUMNS": "200"}).stdout
    assert added["id"] in run(app, ["webhooks", "list", "demo"], env={"COLUMNS": "200"}).stdout
    answer(http.post(f"/v1/webhooks/{added['id']}/test"))
    assert json.loads(run(app, ["webhooks", "delete", added["id"], "--yes", "--json"]).stdout)["deleted_at"]
    assert reconcile(service.context) == WebhooksReport()
    with service.context.database.read() as session:
        last = session.scalars(select(WebhookDelivery).order_by(WebhookDelivery.id.desc())).first()
    assert last is not None
    assert last.last_error == "the webhook was deleted"


@pytest.fixture
def https_receiver(tmp_path: Path) -> Iterator[tuple[Receiver, Path]]:
    """Its certificate is for the name `receiver.example`, and it knows which name it was asked for."""
    certificate = self_signed(tmp_path / "receiver.pem", "receiver.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    running = Receiver(context)
    yield running, certificate
    running.close()


def test_the_call_goes_to_the_address_that_was_looked_at_under_the_name_that_was_given(
    https_receiver: tuple[Receiver, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, certificate = https_receiver
    port = int(receiver.url.rpartition(":")[2])
    lookups: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        """A name server of an attacker: another answer each time."""
        lookups.append(host)
        return ["127.0.0.1"] if len(lookups) == 1 else ["127.0.0.9"]

    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    url = f"https://receiver.example:{port}/hook"
    target = find_target(url, frozenset({"receiver.example"}), resolve)
    trusting = ssl.create_default_context(cafile=str(certificate))
    assert call(target, b"{}", {}, trusting).status == 204
    assert (lookups, receiver.seen[0].headers["host"]) == (["receiver.example"], f"receiver.example:{port}")
    assert "not trusted" in (call(target, b"{}", {}, ssl.create_default_context()).error or "")
    with pytest.raises(RefusedTargetError):
        find_target(url, frozenset(), resolve)


@pytest.mark.parametrize("head", [b"", b"\r\n"], ids=["in its head", "in its body"])
def test_a_receiver_that_drips_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    certificate = self_signed(tmp_path / "receiver.pem", "receiver.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    over = threading.Event()

    def drips(listening: socket.socket) -> None:
        accepted, _ = listening.accept()
        with contextlib.suppress(OSError), context.wrap_socket(accepted, server_side=True) as connected:
            connected.recv(65536)
            connected.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + head)
            while not over.wait(0.05):  # for ever, as far as the caller can tell
                connected.sendall(b"x")

    monkeypatch.setattr("holdfast_service.webhooks.deliver.WHOLE_SECONDS", 1.0)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with socket.create_server(("127.0.0.1", 0)) as listening, in_background() as threads:
        target = Target(True, "receiver.example", listening.getsockname()[1], "/", ("127.0.0.1",))
        threads.submit(drips, listening)
        try:
            threads.submit(call, target, b"{}", {}, trusting).result(timeout=20)
        finally:
            over.set()
