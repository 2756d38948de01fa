"""The routes of events: the list, and the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from holdfast_protocol.base import Page
from holdfast_protocol.events import LAST_EVENT_ID_HEADER, LONGEST_STREAM_SECONDS, EventType, EventView
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import Scope as TokenScope
from holdfast_service.auth.principal import RequireScope
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE
from holdfast_service.errors import ProblemError
from holdfast_service.events.feed import EventFeed
from holdfast_service.events.reading import EventFilter, find_filter, find_position, list_events, position
from holdfast_service.web.admission import Permit, on_a_thread
from holdfast_service.web.connections import CONNECTION, STREAMS
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Cursor, Limit, Moment, Reader

router = APIRouter(route_class=GuardedRoute, tags=["events"])

_QUIET_SECONDS = 15.0
"""So often something is sent, or a proxy would take the connection for dead; and so often the token is looked at."""
_TAKEN_WITHIN_SECONDS = 60.0
"""Who reads nothing for so long has gone."""
_RETRY_MILLISECONDS = 2000
_EVENT_STREAM = "text/event-stream"
_READS = RequireScope(TokenScope.READ)

Project = Annotated[str | None, Query(description="Only of this project.")]
Run = Annotated[str | None, Query(description="Only of this run of the project.")]
Types = Annotated[
    list[EventType], Query(alias="type", max_length=len(EventType), description="Only such events; several times.")
]


@router.get("/v1/events", name="list", summary="List what happens to runs, checkpoints and stores, the newest first")
def list_all(
    *,
    context: Context,
    caller: Reader,
    project: Project = None,
    run: Run = None,
    types: Types = [],  # noqa: B006  (FastAPI copies it)
    since: Annotated[Moment | None, Query(description="From this moment on.")] = None,
    until: Annotated[Moment | None, Query(description="Before this moment.")] = None,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[EventView]:
    wanted = find_filter(context, caller, project, run, types)
    return list_events(context, wanted, since=since, until=until, cursor=cursor, limit=limit)


@router.get(
    "/v1/events/stream",
    name="stream",
    summary="Follow events as they happen, as server-sent events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Messages with an EventView as data, its type and its id. One without data tells how far "
            "the stream has come.",
            "content": {_EVENT_STREAM: {"schema": {"type": "string"}}},
        }
    },
)
async def stream(
    *,
    request: Request,
    context: Context,
    caller: Reader,
    project: Project = None,
    run: Run = None,
    types: Types = [],  # noqa: B006
    after: Annotated[
        str | None, Query(max_length=50, description="Events after the one with this id; without it from now on.")
    ] = None,
    last_event_id: Annotated[
        str | None,
        Header(alias=LAST_EVENT_ID_HEADER, max_length=50, description="The same, of a client that reconnects."),
    ] = None,
    seconds: Annotated[
        int,
        Query(ge=0, le=LONGEST_STREAM_SECONDS, description="The stream's end; with 0 after what is there already."),
    ] = LONGEST_STREAM_SECONDS,
) -> StreamingResponse:
    wanted = await on_a_thread(find_filter, context, caller, project, run, types)
    number = await on_a_thread(find_position, context, last_event_id or after)
    return _EventStream(request, context.epoch, wanted, number, seconds)


class _EventStream(StreamingResponse):
    """Counted apart while it is sent. Ends when the token or the session is not good any more, when nobody reads it,
    and when the service ends."""

    def __init__(self, request: Request, epoch: int, wanted: EventFilter, number: int, seconds: int) -> None:
        headers = {"X-Accel-Buffering": "no"}  # nginx would keep messages back
        super().__init__(self._messages(), media_type=_EVENT_STREAM, headers=headers)
        self._request = request
        self._feed: EventFeed = request.app.state.event_feed
        self._epoch = epoch
        self._wanted = wanted
        self._number = number
        self._seconds = seconds
        self._connection = request.scope.get(CONNECTION)
        self._ends: asyncio.Event = asyncio.Event() if self._connection is None else self._connection.ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `rate_limited` before anything is sent."""
        permit: Permit = self._request.state.permit
        scope[STREAMS] = True

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(_TAKEN_WITHIN_SECONDS):
                    await send(message)
            except TimeoutError:
                if self._connection is not None:
                    self._connection.transport.abort()  # what waits to be sent would keep it open

        with permit.stream():
            await super().__call__(scope, receive, send_in_time)

    async def _messages(self) -> AsyncIterator[str]:
        yield f"retry: {_RETRY_MILLISECONDS}\n{self._position()}"
        loop = asyncio.get_running_loop()
        ends, good_until = loop.time() + self._seconds, loop.time() + _QUIET_SECONDS
        while True:
            began_at = self._number
            messages = await self._next(max(min(ends, good_until) - loop.time(), 0))
            if messages is None:
                return
            yield messages or self._position()
            if self._number == began_at and loop.time() >= ends:
                return
            if loop.time() >= good_until:
                good_until = loop.time() + _QUIET_SECONDS
                if not await on_a_thread(self._is_good):
                    return  # a client that reconnects is told why

    def _position(self) -> str:
        """A message without data, which no browser shows: where to go on from, also for one who wants few events."""
        return f"id: {position(self._epoch, self._number)}\n\n"

    def _is_good(self) -> bool:
        """The token, or the session. While the database cannot say, it is good; every other refusal ends the stream."""
        try:
            _READS.caller_of(self._request)
        except ProblemError as problem:
            return problem.code in (ProblemCode.DATABASE_UNAVAILABLE, ProblemCode.BUSY)
        return True

    async def _next(self, timeout_seconds: float) -> str | None:
        """Messages; "" if none of the events is wanted, or there are none in that time. None if the stream is to
        end."""
        waiting = asyncio.ensure_future(self._feed.after(self._number, self._wanted, timeout_seconds))
        ending = asyncio.ensure_future(self._ends.wait())
        try:
            await asyncio.wait([waiting, ending], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return None
            read = waiting.result()
        except ProblemError:
            return None  # a client that reconnects is told why
        finally:
            waiting.cancel()
            ending.cancel()
        self._number = read.number
        return "".join(event.message for event in read.events)
