"""Azure: scheduled events. Preempt (30 seconds ahead at least), Terminate, Reboot and Redeploy end the process.

Freeze does not: the machine pauses for seconds and its memory stays. All machines of an availability set or a placement
group read the same document, so an event counts if its `Resources` name this one. Nothing is acknowledged, because a
StartRequest lets the event begin for every machine it names, and this job must not decide that for them.
learn.microsoft.com: "Azure Metadata Service: Scheduled Events for Linux VMs", "Azure Instance Metadata Service".
"""

from __future__ import annotations

import json
from email.utils import parsedate_to_datetime
from typing import Any

from holdfast.preemption.clouds.event import CloudEvent, seconds_left
from holdfast.preemption.clouds.metadata_server import MetadataError, MetadataReply, MetadataServer

_HEADERS = {"Metadata": "true"}
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_ENDS_THE_PROCESS = ("Preempt", "Terminate", "Reboot", "Redeploy")
_FIRST_ANSWER_SECONDS = 150.0
"""The first request switches the events on, and its answer may take two minutes."""


class Azure:
    name = "azure"
    pause_seconds = 1.0

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._machine: str | None = None
        self._switched_on = False

    def look(self) -> list[CloudEvent]:
        if self._machine is None:
            self._machine = self._server.ask(_NAME, _HEADERS).require_ok("the request for the machine's name").text
        timeout_seconds = 10.0 if self._switched_on else _FIRST_ANSWER_SECONDS
        reply = self._server.ask(_EVENTS, _HEADERS, timeout_seconds=timeout_seconds).require_ok("scheduled events")
        self._switched_on = True
        return [self._event(found, reply) for found in _events_of(reply) if self._ends_this_process(found)]

    def _ends_this_process(self, event: dict[str, Any]) -> bool:
        names = [str(name).casefold() for name in event.get("Resources") or []]
        return event.get("EventType") in _ENDS_THE_PROCESS and str(self._machine).casefold() in names

    def _event(self, event: dict[str, Any], reply: MetadataReply) -> CloudEvent:
        not_before = str(event.get("NotBefore") or "")
        kind, source = event["EventType"], event.get("EventSource", "Platform")
        # Blank once it has begun.
        reason = f"{kind} by {source} " + (f"not before {not_before}" if not_before else "has begun")
        left = seconds_left(_seconds_since_1970(not_before), reply.now) if not_before else None
        return CloudEvent(str(event.get("EventId")), reason, left)


def _events_of(reply: MetadataReply) -> list[dict[str, Any]]:
    try:
        events = json.loads(reply.body)["Events"]
    except (ValueError, KeyError, TypeError):
        events = None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise MetadataError("its scheduled events have no list of events")
    return events


def _seconds_since_1970(text: str) -> float:
    try:
        return parsedate_to_datetime(text).timestamp()
    except ValueError:
        raise MetadataError(f"the time of an event is not readable: {text[:40]!r}") from None
