"""Azure's instance metadata service: scheduled events, and the machine's own name."""

from __future__ import annotations

import uuid
from email.utils import formatdate
from time import time
from typing import Any

from tests.support.scripted_http import Reply, Seen, as_json

VERSIONS = ["2020-07-01", "2019-08-01", "2019-04-01", "2019-01-01", "2017-11-01", "2017-08-01"]
NAME = "trainer_0"


class FakeAzure:
    def __init__(self) -> None:
        self.refused: list[str] = []
        self.acknowledged: list[Any] = []
        self._events: list[dict[str, Any]] = []
        self._incarnation = 1

    def schedule(
        self, kind: str, seconds: float, *, resources: tuple[str, ...] = (NAME,), source: str = "Platform"
    ) -> None:
        self._change(
            {
                "EventId": str(uuid.uuid4()).upper(),
                "EventStatus": "Scheduled",
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": list(resources),
                "NotBefore": formatdate(time() + seconds, usegmt=True),
                "Description": "",
                "EventSource": source,
                "DurationInSeconds": -1,
            }
        )

    def begin(self) -> None:
        self._change({**self._events[-1], "EventStatus": "Started", "NotBefore": ""})

    def end(self) -> None:
        """Nobody waits here."""

    def answer(self, seen: Seen) -> Reply:
        reply = self._refusal(seen)
        if reply is not None:
            self.refused.append(f"{reply.status} {seen.method} {seen.path}")
            return reply
        if seen.method == "POST":
            self.acknowledged.append(seen.json)
            return Reply(200, protocol=None)
        if seen.path == "/metadata/instance/compute/name":
            return Reply(200, NAME.encode(), protocol=None)
        return as_json({"DocumentIncarnation": self._incarnation, "Events": self._events})

    def _refusal(self, seen: Seen) -> Reply | None:
        events = seen.path == "/metadata/scheduledevents"
        if not events and seen.path != "/metadata/instance/compute/name":
            return Reply(404, protocol=None)
        if seen.headers.get("metadata", "").lower() != "true" or "x-forwarded-for" in seen.headers:
            return as_json({"error": "Bad request. Required metadata header not specified"}, 400)
        if events and seen.query.get("api-version") not in VERSIONS:
            return as_json({"error": "Bad request. api-version is invalid", "newest-versions": VERSIONS[:3]}, 400)
        if not events and seen.query.get("format") != "text":
            return as_json({"error": "Bad request. A leaf is asked for as format=text"}, 400)
        if seen.method not in (("GET", "POST") if events else ("GET",)):
            return Reply(405, protocol=None)
        return None

    def _change(self, event: dict[str, Any]) -> None:
        self._incarnation += 1
        self._events = [event]
