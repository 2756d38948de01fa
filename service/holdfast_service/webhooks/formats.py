"""What a call says, in the form that its receiver takes. Pure.

One call is one event. Where a receiver keeps alerts open, an event that ends a trouble closes the alert of the event
that began it: both have the same name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from holdfast_protocol.events import Event, EventType
from holdfast_protocol.text import printable
from holdfast_protocol.webhooks import WebhookFormat

_ENDS = {
    EventType.ATTEMPT_REVIVED: EventType.ATTEMPT_LOST,
    EventType.RUN_GOES_ON: EventType.RUN_STALLED,
    EventType.STORE_AVAILABLE: EventType.STORE_UNAVAILABLE,
    EventType.QUOTA_RELIEVED: EventType.QUOTA_NEAR,
}
_WORSE = {EventType.QUOTA_REACHED: EventType.QUOTA_NEAR}
"""The same alert, told again; so one event ends both."""
_CRITICAL = {
    EventType.CHECKPOINT_CORRUPT,
    EventType.ATTEMPT_LOST,
    EventType.RUN_STALLED,
    EventType.STORE_UNAVAILABLE,
}
_ERROR = {
    EventType.ATTEMPT_FAILED,
    EventType.CHECKPOINT_QUARANTINED,
    EventType.CHECKPOINT_DIVERGED,
    EventType.DRILL_FAILED,
}
_WARNING = {EventType.CHECKPOINT_ABORTED, EventType.ATTEMPT_PREEMPTED, EventType.QUOTA_NEAR}
# Alertmanager closes an alert that nobody repeats. Ours is told once, so it says itself how long it stays open.
_OPEN_FOR = timedelta(hours=24)
# What ends in Alertmanager's future would not end the alert that is open there.
_CLOCKS_DIFFER = timedelta(minutes=5)


KEEPS_ALERTS = {WebhookFormat.PAGERDUTY, WebhookFormat.ALERTMANAGER}
"""Receivers in which a call changes a state."""
_GROUPS = [{end, begin, *(worse for worse, same in _WORSE.items() if same == begin)} for end, begin in _ENDS.items()]
TURNS = {event: group for group in _GROUPS for event in group}
"""Of an event, those of which a later one takes back what it has said."""
ROUTINE = {
    EventType.CHECKPOINT_COMMITTED,
    EventType.CHECKPOINT_ABORTED,
    EventType.CHECKPOINT_TRASHED,
    EventType.CHECKPOINT_PURGED,
}
"""They come by the thousand, and wait for those that somebody needs to hear."""


def with_ends(format_: str, events: Iterable[str]) -> set[str]:
    """`events`, and for a receiver that keeps alerts what ends the alerts that they open. Asked for each event and not
    only when a webhook is made: an end that a later version tells is for the alerts of older webhooks too."""
    wanted = set(events)
    begun = wanted | {same for worse, same in _WORSE.items() if worse in wanted}
    ends = {end for end, begin in _ENDS.items() if begin in begun} if format_ in KEEPS_ALERTS else set()
    return wanted | ends


def _begun_by(event: EventType) -> EventType:
    """The event by which the alert of `event` is known."""
    return _ENDS.get(event) or _WORSE.get(event, event)


def render(format_: WebhookFormat, body: Event, at: datetime, routing_key: str | None = None) -> bytes:
    """The bytes of a call's body. `at`: when this try is made. `routing_key`: PagerDuty's, which has no other place for
    it."""
    match format_:
        case WebhookFormat.STANDARD:
            content: Any = body.model_dump(mode="json")
        case WebhookFormat.SLACK:
            content = {"text": _for_slack(summary(body))}
        case WebhookFormat.PAGERDUTY:
            content = _for_pagerduty(body, routing_key)
        case WebhookFormat.ALERTMANAGER:
            content = [_for_alertmanager(body, at)]
    return json.dumps(content, separators=(",", ":")).encode()


def summary(body: Event) -> str:
    """One line: `demo/gpt@500 (attempt 3): checkpoint.corrupt. A chunk has other bytes in the store.`"""
    data = body.data
    subject = f"the {data.store} store" if data.store else "/".join(name for name in (data.project, data.run) if name)
    if data.step is not None:
        subject += f"@{data.step}"
    if data.quota is not None:
        subject += f" (quota of {data.quota})"
    if data.attempt is not None:
        subject += f" (attempt {data.attempt})"
    # A job writes its own reason: its second line could pass for another run's alert.
    return f"{subject}: {body.type.value}" + (f". {printable(data.reason, one_line=True)}" if data.reason else "")


def severity(event: EventType) -> str:
    """In PagerDuty's words."""
    event = _begun_by(event)
    return (
        "critical" if event in _CRITICAL else "error" if event in _ERROR else "warning" if event in _WARNING else "info"
    )


def _for_slack(text: str) -> str:
    """Slack reads these three as its own markup: a run's name must not mention a channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _name(body: Event) -> dict[str, str]:
    """What the alert of an event is known by. Equal for the event that ends it."""
    data = body.data
    event = _begun_by(body.type)
    name = {
        "event": event.value,
        "project": None if data.store else data.project,  # one alert of a store, whatever project's webhook tells it
        "run": data.run,
        "attempt": None if data.attempt is None else str(data.attempt),
        "checkpoint": data.checkpoint_id,
        "operation": data.operation,
        "store": data.store,
        "quota": data.quota,
    }
    return {key: value for key, value in name.items() if value}


def _for_pagerduty(body: Event, routing_key: str | None) -> dict[str, Any]:
    """An event of PagerDuty's Events API v2. Its limits: 1,024 characters of summary, 255 of the key."""
    name = _name(body)
    component = {"component": name["run"]} if "run" in name else {}
    return {
        "routing_key": routing_key,
        "event_action": "resolve" if body.type in _ENDS else "trigger",
        "dedup_key": " ".join(name.values())[:255],
        "payload": component
        | {
            "summary": summary(body)[:1024],
            "source": "holdfast",
            "severity": severity(body.type),
            "timestamp": body.timestamp.isoformat(),
            "group": name.get("project", "holdfast"),
            "class": name["event"],
            "custom_details": body.data.model_dump(mode="json"),
        },
    }


def _for_alertmanager(body: Event, at: datetime) -> dict[str, Any]:
    """An alert as `POST /api/v2/alerts` takes it. It stays open from the try that arrives, which may be days after the
    event: Alertmanager tells nobody of an alert that is over when it comes."""
    name = _name(body)
    over = body.type in _ENDS
    alert_name = "Holdfast" + "".join(word.title() for word in name["event"].replace("_", ".").split("."))
    return {
        "labels": name | {"alertname": alert_name, "severity": severity(body.type)},
        "annotations": {"summary": summary(body)},
        "startsAt": (body.timestamp - _CLOCKS_DIFFER if over else body.timestamp).isoformat(),
        "endsAt": (body.timestamp - _CLOCKS_DIFFER if over else max(body.timestamp, at) + _OPEN_FOR).isoformat(),
    }
