"""What a webhook's call says to Slack, PagerDuty and Alertmanager, held against what these document."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from holdfast_protocol.events import Event, EventData, EventType
from holdfast_protocol.webhooks import CreateWebhook, WebhookFormat
from holdfast_service.webhooks.formats import render, severity, summary, with_ends

AT = datetime(2026, 11, 21, 18, tzinfo=UTC)
ENDS = (EventType.ATTEMPT_REVIVED, EventType.RUN_GOES_ON, EventType.STORE_AVAILABLE, EventType.QUOTA_RELIEVED)
KEY = "0123456789abcdef0123456789abcdef"


def body(event: EventType, **data: object) -> Event:
    return Event(type=event, timestamp=AT, data=EventData(project="demo", **data))


def rendered(format_: WebhookFormat, said: Event):
    return json.loads(render(format_, said, AT, KEY if format_ is WebhookFormat.PAGERDUTY else None))


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (body(EventType.TEST, reason="asked for by ada"), "demo: webhook.test. asked for by ada"),
        (body(EventType.ATTEMPT_FINISHED, run="gpt", attempt=3), "demo/gpt (attempt 3): attempt.finished"),
        (body(EventType.CHECKPOINT_COMMITTED, run="gpt", step=500), "demo/gpt@500: checkpoint.committed"),
        (
            body(EventType.TEST, reason="a\nprod/llm@9: store.unavailable"),
            "demo: webhook.test. a prod/llm@9: store.unavailable",
        ),
    ],
)
def test_the_line_that_people_read(said, line):
    assert summary(said) == line


def test_a_store_has_one_alert_whatever_project_is_told():
    gone, back = body(EventType.STORE_UNAVAILABLE, store="second"), body(EventType.STORE_AVAILABLE, store="second")
    assert summary(back) == "the second store: store.available"
    assert rendered(WebhookFormat.PAGERDUTY, gone)["dedup_key"] == "store.unavailable second"
    assert rendered(WebhookFormat.PAGERDUTY, back)["dedup_key"] == "store.unavailable second"
    assert "project" not in rendered(WebhookFormat.ALERTMANAGER, gone)[0]["labels"]


@pytest.mark.parametrize("format_", [WebhookFormat.PAGERDUTY, WebhookFormat.ALERTMANAGER])
def test_a_quota_has_one_alert_that_is_told_again_when_it_is_reached_and_ends_once(format_):
    kinds = (EventType.QUOTA_NEAR, EventType.QUOTA_REACHED, EventType.QUOTA_RELIEVED)
    said = [rendered(format_, body(kind, quota="runs", reason="4 of 5 runs")) for kind in kinds]
    if format_ is WebhookFormat.PAGERDUTY:
        assert {each["dedup_key"] for each in said} == {"quota.near demo runs"}
        assert [each["event_action"] for each in said] == ["trigger", "trigger", "resolve"]
    else:
        assert said[0][0]["labels"] == said[1][0]["labels"] == said[2][0]["labels"]
    assert summary(body(kinds[0], quota="runs", reason="4 of 5 runs")) == (
        "demo (quota of runs): quota.near. 4 of 5 runs"
    )
    for wanted in ({"quota.near"}, {"quota.reached"}):
        assert with_ends(format_, wanted) == {*wanted, "quota.relieved"}
        assert with_ends(WebhookFormat.SLACK, wanted) == wanted


def test_slack_gets_a_text_that_mentions_nobody():
    said = body(EventType.ATTEMPT_FAILED, run="gpt", attempt=1, reason="<!channel> a & b")
    assert rendered(WebhookFormat.SLACK, said) == {
        "text": "demo/gpt (attempt 1): attempt.failed. &lt;!channel&gt; a &amp; b"
    }


@pytest.mark.parametrize("event", EventType)
def test_pagerduty_gets_an_event_of_its_api(event):
    said = rendered(
        WebhookFormat.PAGERDUTY, body(event, run="r" * 200, step=1, checkpoint_id="ck_1", reason="x" * 2000)
    )
    assert said.keys() == {"routing_key", "event_action", "dedup_key", "payload"}
    assert said["routing_key"] == KEY
    assert said["event_action"] == ("resolve" if event in ENDS else "trigger")
    assert 0 < len(said["dedup_key"]) <= 255
    payload = said["payload"]
    assert payload.keys() == {
        "summary", "source", "severity", "timestamp", "group", "component", "class", "custom_details",
    }  # fmt: skip
    assert len(payload["summary"]) <= 1024
    assert payload["severity"] in {"critical", "error", "warning", "info"}
    assert datetime.fromisoformat(payload["timestamp"]) == AT


@pytest.mark.parametrize("event", EventType)
def test_alertmanager_gets_a_list_of_one_alert(event):
    (alert,) = rendered(WebhookFormat.ALERTMANAGER, body(event, run="gpt", step=1))
    assert alert.keys() == {"labels", "annotations", "startsAt", "endsAt"}
    assert alert["labels"]["alertname"].startswith("Holdfast")
    assert alert["labels"]["alertname"].isalnum()
    assert all(isinstance(value, str) and value for value in alert["labels"].values())
    starts, ends = (datetime.fromisoformat(alert[name]) for name in ("startsAt", "endsAt"))
    assert starts <= ends
    assert (ends < AT) == (event in ENDS), "over, also by a clock that is a little behind"


def test_a_run_that_goes_on_ends_the_alert_of_its_stall():
    stalled = body(EventType.RUN_STALLED, run="gpt", attempt=3, step=7, reason="no step for an hour")
    goes_on = body(EventType.RUN_GOES_ON, run="gpt", attempt=3, step=9)
    key = lambda said: rendered(WebhookFormat.PAGERDUTY, said)["dedup_key"]  # noqa: E731
    labels = lambda said: rendered(WebhookFormat.ALERTMANAGER, said)[0]["labels"]  # noqa: E731
    assert key(stalled) == key(goes_on)
    assert labels(stalled) == labels(goes_on)
    assert labels(stalled) == {
        "alertname": "HoldfastRunStalled", "event": "run.stalled", "project": "demo", "run": "gpt", "attempt": "3",
        "severity": "critical",
    }  # fmt: skip


def test_two_events_of_one_kind_are_two_alerts():
    key = lambda said: rendered(WebhookFormat.PAGERDUTY, said)["dedup_key"]  # noqa: E731
    for field, event in (
        ("attempt", EventType.RUN_STALLED),
        ("checkpoint_id", EventType.CHECKPOINT_CORRUPT),
        ("operation", EventType.DRILL_FAILED),
    ):
        assert key(body(event, run="gpt", **{field: 1 if field == "attempt" else "a"})) != key(
            body(event, run="gpt", **{field: 2 if field == "attempt" else "b"})
        )
    one, other = (body(EventType.CHECKPOINT_CORRUPT, run="gpt", checkpoint_id=each) for each in ("ck_1", "ck_2"))
    for format_ in (WebhookFormat.PAGERDUTY, WebhookFormat.ALERTMANAGER):
        assert rendered(format_, one) != rendered(format_, other)
    assert severity(EventType.CHECKPOINT_CORRUPT) == "critical"
    assert severity(EventType.CHECKPOINT_COMMITTED) == "info"


@pytest.mark.parametrize(("format_", "key"), [("pagerduty", None), ("slack", KEY), ("standard", KEY)])
def test_only_pagerduty_has_a_routing_key(format_, key):
    with pytest.raises(ValidationError, match="routing_key"):
        CreateWebhook(url="https://a.example/", events=["run.stalled"], format=format_, routing_key=key)
