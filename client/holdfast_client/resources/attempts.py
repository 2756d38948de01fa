"""Open an attempt, tell what it resumed from, keep it alive, end it. See holdfast_protocol.attempts."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_client.resources.base import Operations, all_items
from holdfast_client.transport import path
from holdfast_protocol.attempts import (
    AttemptOpened,
    AttemptView,
    EndAttempt,
    Heartbeat,
    HeartbeatReply,
    OpenAttempt,
    ResumedFrom,
)
from holdfast_protocol.base import Page


class AttemptOperations(Operations):
    def open_attempt(self, project: str, run: str, request: OpenAttempt) -> AttemptOpened:
        """Opens an attempt and fences every older one. Most callers want `launch.open_attempt`, which also reads
        the newest number. Raises AttemptConflict if `after` is not the newest."""
        return self.transport.call(
            "POST", path("projects", project, "runs", run, "attempts"), AttemptOpened, body=request
        )

    def attempts(
        self, project: str, run: str, *, cursor: str | None = None, limit: int | None = None
    ) -> Page[AttemptView]:
        """One page of a run's attempts, newest first."""
        return self.transport.call(
            "GET",
            path("projects", project, "runs", run, "attempts"),
            Page[AttemptView],
            params={"cursor": cursor, "limit": limit},
        )

    def all_attempts(self, project: str, run: str) -> Iterator[AttemptView]:
        """The attempts of all pages, newest first."""
        return all_items(lambda cursor: self.attempts(project, run, cursor=cursor))

    def attempt(self, project: str, run: str, number: int) -> AttemptView:
        return self.transport.call("GET", path("projects", project, "runs", run, "attempts", number), AttemptView)

    def resumed_from(self, project: str, run: str, number: int, request: ResumedFrom) -> AttemptView:
        """Tells what the ranks have really loaded; the lineage follows it."""
        route = path("projects", project, "runs", run, "attempts", number, "resumed-from")
        return self.transport.call("PUT", route, AttemptView, body=request)

    def heartbeat(self, project: str, run: str, number: int, request: Heartbeat) -> HeartbeatReply:
        """Says that the attempt is alive. Raises StaleAttempt if it was fenced."""
        route = path("projects", project, "runs", run, "attempts", number, "heartbeat")
        return self.transport.call("POST", route, HeartbeatReply, body=request)

    def end_attempt(self, project: str, run: str, number: int, request: EndAttempt) -> AttemptView:
        route = path("projects", project, "runs", run, "attempts", number, "end")
        return self.transport.call("POST", route, AttemptView, body=request)
