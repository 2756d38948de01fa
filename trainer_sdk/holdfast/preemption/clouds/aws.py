"""Amazon EC2: the notice of a spot instance's interruption, two minutes ahead, and the rebalance recommendation.

IMDSv2: a session token by PUT, then GETs that carry it. 404 is "nothing announced". AWS recommends a poll every five
seconds. docs.aws.amazon.com: "Spot Instance interruption notices", "EC2 instance rebalance recommendations",
"Use the Instance Metadata Service".
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from http import HTTPStatus
from typing import Any

from holdfast.preemption.clouds.event import CloudEvent, seconds_left
from holdfast.preemption.clouds.metadata_server import MetadataError, MetadataReply, MetadataServer

_TOKEN_SECONDS = 21600  # the longest that there is
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class Aws:
    name = "aws"
    pause_seconds = 5.0

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._token: str | None = None
        self._renew_at = 0.0

    def look(self) -> list[CloudEvent]:
        events = []
        if (action := self._get(_ACTION)) is not None:
            found = _json_of(action)
            what, at = str(found.get("action")), str(found.get("time"))
            # A hibernation begins at once, whatever its time says.
            deadline = None if what == "hibernate" else seconds_left(_seconds_since_1970(at), action.now)
            events.append(CloudEvent(f"instance-action {at}", f"spot instance: {what} at {at}", deadline))
        if (rebalance := self._get(_REBALANCE)) is not None:
            at = str(_json_of(rebalance).get("noticeTime"))
            events.append(CloudEvent(f"rebalance {at}", f"rebalance recommended at {at}", None, is_hint=True))
        return events

    def _get(self, path: str) -> MetadataReply | None:
        reply = self._server.ask(path, {"X-aws-ec2-metadata-token": self._fresh_token()})
        if reply.status == HTTPStatus.UNAUTHORIZED:
            self._token = None
            reply = self._server.ask(path, {"X-aws-ec2-metadata-token": self._fresh_token()})
        return None if reply.status == HTTPStatus.NOT_FOUND else reply.require_ok(path)

    def _fresh_token(self) -> str:
        if self._token is None or time.monotonic() >= self._renew_at:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
            reply = self._server.ask("/latest/api/token", headers, method="PUT")
            if reply.status == HTTPStatus.FORBIDDEN:
                raise MetadataError("the instance's metadata service is switched off (403)")
            self._token = reply.require_ok("the request for a token").text
            self._renew_at = time.monotonic() + _TOKEN_SECONDS / 2
        return self._token


def _json_of(reply: MetadataReply) -> dict[str, Any]:
    try:
        value = json.loads(reply.body)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise MetadataError("its announcement is not a JSON object")
    return value


def _seconds_since_1970(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise MetadataError(f"the time of the interruption is not readable: {text[:40]!r}") from None
