"""The service itself: controllers, long operations, events, the audit log, webhooks."""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import datetime

from pydantic import ValidationError

from holdfast_client.errors import ControllerPaused, ServiceUnavailable, UnexpectedReply
from holdfast_client.resources.base import Resource, all_items, made_once, once
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.events import EventType, EventView
from holdfast_protocol.service import (
    ActorKind,
    AuditEventView,
    ControllerView,
    OperationView,
    PauseController,
    Readiness,
    ServerInfo,
    WorkerView,
)
from holdfast_protocol.states import OperationState
from holdfast_protocol.stores import StoreClock
from holdfast_protocol.webhooks import CreateWebhook, DeliveryView, WebhookCreated, WebhookView

_FIRST_PAUSE_SECONDS = 0.1

_LONGEST_PAUSE_SECONDS = 2.0


class Service(Resource):
    """The service's own state."""

    def info(self) -> ServerInfo:
        return self.transport.call("GET", path("service"), ServerInfo)

    def healthy(self) -> bool:
        """Whether the service's process is alive. One try."""
        return self.transport.reachable("/healthz")

    def ready(self) -> Readiness:
        """Whether database, migrations and stores answer. One try; "not ready" is an answer, not an error."""
        return self.transport.call("GET", "/readyz", Readiness, retry_seconds=0, also_good={503})

    def store_clocks(self) -> list[StoreClock]:
        return self._whole(path("store-clocks"), Page[StoreClock])


class Controllers(Resource):
    """Background work, and the processes that do it."""

    def list(self) -> list[ControllerView]:
        return self._whole(path("controllers"), Page[ControllerView])

    def get(self, name: str) -> ControllerView:
        return self.transport.call("GET", path("controllers", name), ControllerView)

    def pause(self, name: str, reason: str) -> ControllerView:
        """Running passes end, and none begins until `resume`, in any process."""
        body = PauseController(reason=reason)
        return self.transport.call("POST", path("controllers", name, "pause"), ControllerView, body=body)

    def resume(self, name: str) -> ControllerView:
        return self.transport.call("POST", path("controllers", name, "resume"), ControllerView)

    def run(self, name: str) -> ControllerView:
        """Asks for a pass now, in one process; `wait` waits for its end. Raises ControllerPaused."""
        return self.transport.call("POST", path("controllers", name, "run"), ControllerView)

    def wait(self, asked: ControllerView, *, timeout_seconds: float | None = None) -> ControllerView:
        """`asked` is the answer of `run`. Raises ControllerPaused if the controller is paused meanwhile, and
        ServiceUnavailable when the time is over."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        wanted = asked.run_requested_at
        while True:
            view = self.get(asked.name)
            if wanted is None or (view.run_answered_at is not None and view.run_answered_at >= wanted):
                return view
            if view.paused_at is not None:
                raise ControllerPaused(
                    f"{view.name} was paused by {view.paused_by}: {view.pause_reason}. The pass comes when it is "
                    "resumed."
                )
            if deadline is not None and time.monotonic() >= deadline:
                raise ServiceUnavailable(
                    f"No process has done the pass of {view.name} within {timeout_seconds:.0f} seconds. See whether "
                    "one runs, with `holdfast workers list`."
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def workers(self) -> Sequence[WorkerView]:
        """The processes that serve or work now, and those that fell silent within the last day."""
        return self._whole(path("workers"), Page[WorkerView])


class Operations(Resource):
    """Long work that a person started."""

    def list(
        self,
        *,
        project: str | None = None,
        run: str | None = None,
        checkpoint_id: str | None = None,
        kind: str | None = None,
        state: OperationState | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[OperationView]:
        """One page of long operations, newest first."""
        params = {
            "project": project,
            "run": run,
            "checkpoint_id": checkpoint_id,
            "kind": kind,
            "state": state,
            "cursor": cursor,
            "limit": limit,
        }
        return self.transport.call("GET", path("operations"), Page[OperationView], params=params)

    def all(
        self,
        *,
        project: str | None = None,
        run: str | None = None,
        checkpoint_id: str | None = None,
        kind: str | None = None,
        state: OperationState | None = None,
    ) -> Iterator[OperationView]:
        return all_items(
            lambda cursor: self.list(
                project=project, run=run, checkpoint_id=checkpoint_id, kind=kind, state=state, cursor=cursor
            )
        )

    def get(self, operation_id: str) -> OperationView:
        return self.transport.call("GET", path("operations", operation_id), OperationView)

    def cancel(self, operation_id: str) -> OperationView:
        """Its worker stops at the next step; finished steps stay done."""
        return self.transport.call("POST", path("operations", operation_id, "cancel"), OperationView)

    def wait(
        self,
        operation_id: str,
        *,
        timeout_seconds: float | None = None,
        on_view: Callable[[OperationView], None] | None = None,
    ) -> OperationView:
        """Waits until it has ended, however: check its `state`. `on_view` gets each view in between. Raises
        ServiceUnavailable when the time is over."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            view = self.get(operation_id)
            if on_view is not None:
                on_view(view)
            if view.state.ended:
                return view
            if deadline is not None and time.monotonic() >= deadline:
                raise ServiceUnavailable(
                    f"The operation {operation_id} has not ended within {timeout_seconds:.0f} seconds. It goes on; "
                    f"wait for it with `holdfast operations wait {operation_id}`."
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)


class Events(Resource):
    """What happens to runs, checkpoints and stores: see holdfast_protocol.events."""

    def list(
        self,
        *,
        project: str | None = None,
        run: str | None = None,
        types: Sequence[EventType] = (),
        since: datetime | None = None,
        until: datetime | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[EventView]:
        """One page, the newest first. No types: all of them. `since` is inclusive, `until` is not."""
        return self.transport.call(
            "GET",
            path("events"),
            Page[EventView],
            params={
                "project": project,
                "run": run,
                "type": _names(types),
                "since": None if since is None else since.isoformat(),
                "until": None if until is None else until.isoformat(),
                "cursor": cursor,
                "limit": limit,
            },
        )

    def all(
        self,
        *,
        project: str | None = None,
        run: str | None = None,
        types: Sequence[EventType] = (),
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Iterator[EventView]:
        """The events of all pages, read page by page as they are asked for."""
        return all_items(
            lambda cursor: self.list(project=project, run=run, types=types, since=since, until=until, cursor=cursor)
        )

    def position(self) -> str:
        """Where the stream is now. Given as `after` later, it leads to all that has happened since."""
        with closing(self.transport.follow(path("events", "stream"), params={}, after=None)) as messages:
            return next(message.id for message in messages if message.id is not None)

    def follow(
        self,
        *,
        project: str | None = None,
        run: str | None = None,
        types: Sequence[EventType] = (),
        after: str | None = None,
    ) -> Iterator[EventView]:
        """Each event as it happens, without an end: those after the event with this id, or from the first `next` on.
        Goes on after a lost connection, and misses none. Raises EventsForgotten, and ServiceUnavailable once the
        service was not there for the retry deadline."""
        params = {"project": project, "run": run, "type": _names(types)}
        for message in self.transport.follow(path("events", "stream"), params=params, after=after):
            if message.data:
                try:
                    yield EventView.model_validate_json(message.data, extra="ignore")
                except ValidationError:
                    raise UnexpectedReply(f"The event {message.id} is not an EventView") from None


def _names(types: Sequence[EventType]) -> builtins.list[str] | None:
    return [each.value for each in types] or None


class Audit(Resource):
    """Audit events."""

    def list(
        self,
        *,
        project: str | None = None,
        run: str | None = None,
        checkpoint: str | None = None,
        actor: str | None = None,
        actor_kind: ActorKind | None = None,
        action: str | Sequence[str] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[AuditEventView]:
        """One page of changes and their authors, the newest first. `action` is a prefix such as `hold.`, or several of
        which one must fit; `checkpoint` an id; `since` is inclusive, `until` is not."""
        return self.transport.call(
            "GET",
            path("audit-events"),
            Page[AuditEventView],
            params={
                "project": project,
                "run": run,
                "checkpoint": checkpoint,
                "actor": actor,
                "actor_kind": actor_kind,
                "action": [action] if isinstance(action, str) else list(action or ()) or None,
                "since": None if since is None else since.isoformat(),
                "until": None if until is None else until.isoformat(),
                "cursor": cursor,
                "limit": limit,
            },
        )

    def all(
        self,
        *,
        project: str | None = None,
        run: str | None = None,
        checkpoint: str | None = None,
        actor: str | None = None,
        actor_kind: ActorKind | None = None,
        action: str | Sequence[str] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Iterator[AuditEventView]:
        """The events of all pages, read page by page as they are asked for."""
        return all_items(
            lambda cursor: self.list(
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


class Webhooks(Resource):
    """See holdfast_protocol.webhooks."""

    def create(self, project: str, request: CreateWebhook) -> WebhookCreated:
        """Makes a webhook. If a reply with a secret is lost, that webhook is deleted."""
        call, route = self.transport.call, path("projects", project, "webhooks")
        return made_once(lambda: call("POST", route, WebhookCreated, body=request, headers=once()), undo=self.delete)

    def list(self, project: str) -> list[WebhookView]:
        return self._whole(path("projects", project, "webhooks"), Page[WebhookView])

    def get(self, webhook_id: str) -> WebhookView:
        return self.transport.call("GET", path("webhooks", webhook_id), WebhookView)

    def delete(self, webhook_id: str) -> WebhookView:
        return self.transport.call("DELETE", path("webhooks", webhook_id), WebhookView)

    def test(self, webhook_id: str) -> DeliveryView:
        """Has a call made soon; `deliveries` tells its result."""
        return self.transport.call("POST", path("webhooks", webhook_id, "test"), DeliveryView)

    def deliveries(self, webhook_id: str, *, cursor: str | None = None, limit: int | None = None) -> Page[DeliveryView]:
        """One page of a webhook's calls, the newest first."""
        route = path("webhooks", webhook_id, "deliveries")
        return self.transport.call("GET", route, Page[DeliveryView], params={"cursor": cursor, "limit": limit})

    def all_deliveries(self, webhook_id: str) -> Iterator[DeliveryView]:
        return all_items(lambda cursor: self.deliveries(webhook_id, cursor=cursor))

    def delivery(self, webhook_id: str, delivery_id: str) -> DeliveryView:
        return self.transport.call("GET", path("webhooks", webhook_id, "deliveries", delivery_id), DeliveryView)

    def redeliver(self, webhook_id: str, delivery_id: str) -> DeliveryView:
        """Has a call made again soon, with the same `webhook-id`; `delivery` tells its result."""
        route = path("webhooks", webhook_id, "deliveries", delivery_id, "redeliver")
        return self.transport.call("POST", route, DeliveryView, headers=once())
