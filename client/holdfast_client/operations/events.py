"""Audit events. See holdfast_protocol.events."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from holdfast_client.operations.base import Operations
from holdfast_client.operations.pages import all_items
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.events import ActorKind, EventView


class EventOperations(Operations):
    def events(
        self,
        *,
        project: str | None = None,
        run: str | None = None,
        checkpoint: str | None = None,
        actor: str | None = None,
        actor_kind: ActorKind | None = None,
        action: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[EventView]:
        """One page of who changed what, the newest first. `action` is a prefix such as `hold.`; `checkpoint` an id;
        `since` is inclusive, `until` is not."""
        return self.transport.call(
            "GET",
            path("events"),
            Page[EventView],
            params={
                "project": project,
                "run": run,
                "checkpoint": checkpoint,
                "actor": actor,
                "actor_kind": actor_kind,
                "action": action,
                "since": None if since is None else since.isoformat(),
                "until": None if until is None else until.isoformat(),
                "cursor": cursor,
                "limit": limit,
            },
        )

    def all_events(
        self,
        *,
        project: str | None = None,
        run: str | None = None,
        checkpoint: str | None = None,
        actor: str | None = None,
        actor_kind: ActorKind | None = None,
        action: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Iterator[EventView]:
        """The events of all pages, read page by page as they are asked for."""
        return all_items(
            lambda cursor: self.events(
                project=project,
                run=run,
                checkpoint=checkpoint,
                actor=actor,
                actor_kind=actor_kind,
                action=action,
                since=since,
                until=until,
                cursor=cursor,
            )
        )
