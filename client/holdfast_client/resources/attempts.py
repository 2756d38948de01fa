"""Open an attempt, report the checkpoint that it resumed from, keep it alive, end it. See
holdfast_protocol.attempts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from pydantic import JsonValue

from holdfast_client.errors import AttemptConflict, NotFound, StaleAttempt
from holdfast_client.resources.base import Resource, all_items
from holdfast_client.transport import path
from holdfast_protocol.attempts import (
    AttemptOpened,
    AttemptView,
    ConfigView,
    EndAttempt,
    Heartbeat,
    HeartbeatReply,
    OpenAttempt,
    ResumedFrom,
)
from holdfast_protocol.base import Page, RunName

log = logging.getLogger("holdfast.client")

_TRIES = 5


class Attempts(Resource):
    """Launches of a job. See holdfast_protocol.attempts."""

    def open(self, project: str, run: str, request: OpenAttempt) -> AttemptOpened:
        """Opens an attempt and fences every older one. Most callers want `open_next`, which also reads
        the newest number. Raises AttemptConflict if `after` is not the newest."""
        return self.transport.call(
            "POST", path("projects", project, "runs", run, "attempts"), AttemptOpened, body=request
        )

    def list(self, project: str, run: str, *, cursor: str | None = None, limit: int | None = None) -> Page[AttemptView]:
        """One page of a run's attempts, newest first."""
        return self.transport.call(
            "GET",
            path("projects", project, "runs", run, "attempts"),
            Page[AttemptView],
            params={"cursor": cursor, "limit": limit},
        )

    def all(self, project: str, run: str) -> Iterator[AttemptView]:
        """The attempts of all pages, newest first."""
        return all_items(lambda cursor: self.list(project, run, cursor=cursor))

    def get(self, project: str, run: str, number: int) -> AttemptView:
        return self.transport.call("GET", path("projects", project, "runs", run, "attempts", number), AttemptView)

    def config(self, project: str, run: str, number: int, *, against: int | None = None) -> ConfigView:
        """What the job was told to train, and what is another than in the attempt `against`, or else in the newest one
        before that gave a configuration."""
        route = path("projects", project, "runs", run, "attempts", number, "config")
        return self.transport.call("GET", route, ConfigView, params={"against": against})

    def resumed_from(self, project: str, run: str, number: int, request: ResumedFrom) -> AttemptView:
        """Reports the checkpoint that the ranks have really loaded; the lineage follows it."""
        route = path("projects", project, "runs", run, "attempts", number, "resumed-from")
        return self.transport.call("PUT", route, AttemptView, body=request)

    def heartbeat(self, project: str, run: str, number: int, request: Heartbeat) -> HeartbeatReply:
        """Reports that the attempt is alive. Raises StaleAttempt if it was fenced."""
        route = path("projects", project, "runs", run, "attempts", number, "heartbeat")
        return self.transport.call("POST", route, HeartbeatReply, body=request)

    def end(self, project: str, run: str, number: int, request: EndAttempt) -> AttemptView:
        route = path("projects", project, "runs", run, "attempts", number, "end")
        return self.transport.call("POST", route, AttemptView, body=request)

    def open_next(
        self,
        run_name: RunName,
        launch_id: str,
        *,
        world_size: int,
        host: str = "",
        environment: dict[str, str] | None = None,
        create: bool | None = None,
        config: Mapping[str, JsonValue] | None = None,
        after: int | None = None,
    ) -> AttemptOpened:
        """Opens an attempt after the newest one (rule attempt-compare-and-swap). Rank 0 calls it. With `after` no other
        attempt than this one may be the newest; else it raises AttemptConflict, and fences nothing.

        A later launch wins over an earlier one, but a late retry of an earlier launch must not fence its successor. If
        this launch's opening may have been carried out, and another attempt is newer now, that one is the successor,
        and this launch stops. Raises StaleAttempt if a later launch has taken over in between, RunNotFound or
        ProjectNotFound if they may not be made (see OpenAttempt.create)."""
        known = self._newest(run_name) if after is None else after
        for tries_left in reversed(range(_TRIES)):
            request = OpenAttempt(
                launch_id=launch_id,
                after=known,
                world_size=world_size,
                host=host,
                environment=environment or {},
                create=create,
                config=None if config is None else dict(config),
            )
            try:
                return self.open(run_name.project, run_name.run, request)
            except AttemptConflict as conflict:
                if conflict.earlier_try_ambiguous:
                    raise StaleAttempt(
                        f"Launch {launch_id} of {run_name} lost the reply to its opening, and a later attempt is open "
                        "now",
                        request_id=conflict.request_id,
                        context=conflict.context,
                    ) from conflict
                if after is not None or not tries_left:
                    raise
                known = self._newest(run_name)
                log.info("another attempt of %s was opened in between; opening after %d", run_name, known)
        raise AssertionError("the last try returns or raises")

    def _newest(self, run_name: RunName) -> int:
        """0 if there is none yet. Even a token that may only train can list attempts."""
        try:
            newest_first = self.list(run_name.project, run_name.run, limit=1).items
        except NotFound:
            return 0
        return newest_first[0].number if newest_first else 0
