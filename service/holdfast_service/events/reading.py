"""The events that a caller may know of: by pages, and on from a position in the stream. A project's token sees its
project's and no others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from sqlalchemy import Row, Select, and_, select

from holdfast_protocol.base import Page
from holdfast_protocol.events import EventData, EventType, EventView
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import StoreRole
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.engine import Database
from holdfast_service.db.pages import cut_page, decode_cursor
from holdfast_service.db.tables.core import Project, Run
from holdfast_service.db.tables.events import EventRow
from holdfast_service.errors import ProblemError
from holdfast_service.events.numbering import known_numbers, number_new
from holdfast_service.runs.views import project_named, run_named

_CURSOR = "events"
_POSITION = re.compile(r"^(?P<epoch>[0-9]{1,9})-(?P<number>[0-9]{1,18})\Z")


@dataclass(frozen=True)
class EventFilter:
    """None, or no types: whatever. What concerns all projects is for each of them, and for no run."""

    project_id: str | None = None
    run_id: str | None = None
    types: frozenset[str] = frozenset()

    def takes(self, event: NumberedEvent) -> bool:
        return (
            (self.project_id is None or event.project_id in (None, self.project_id))
            and self.run_id in (None, event.run_id)
            and (not self.types or event.view.type in self.types)
        )


@dataclass(frozen=True)
class NumberedEvent:
    number: int
    project_id: str | None
    run_id: str | None
    view: EventView

    @cached_property
    def message(self) -> str:
        """Server-sent; made once for all who follow."""
        return f"id: {self.view.id}\nevent: {self.view.type}\ndata: {self.view.model_dump_json()}\n\n"


def find_filter(
    context: ServiceContext, caller: Principal, project: str | None, run: str | None, types: Sequence[EventType]
) -> EventFilter:
    """Raises what the names raise, and `invalid_request` for a run without its project."""
    wanted = frozenset(each.value for each in types)
    if project is None:
        if run is not None:
            raise ProblemError(ProblemCode.INVALID_REQUEST, "A run is named with its project. Give `project` as well.")
        return EventFilter(caller.project_id, None, wanted)
    with context.database.read() as session:
        if run is None:
            return EventFilter(project_named(session, caller, project, deleted=True).id, None, wanted)
        of_project, of_run = run_named(session, caller, project, run, deleted=True)
        return EventFilter(of_project.id, of_run.id, wanted)


def list_events(
    context: ServiceContext,
    wanted: EventFilter,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    cursor: str | None,
    limit: int,
) -> Page[EventView]:
    """The newest first. `since` is inclusive, `until` is not."""
    last = number_new(context.database)
    with context.database.read() as session:
        (before,) = (last + 1,) if cursor is None else decode_cursor(_CURSOR, cursor, int)
        conditions = [EventRow.number < before]
        # The order stays that of the stream: what was told late happened before its neighbours.
        if since is not None:
            conditions.append(EventRow.happened_at >= since)
        if until is not None:
            conditions.append(EventRow.happened_at < until)
        events = [
            _event(context.epoch, row)
            for query in _queries(wanted)
            for row in session.execute(query.where(*conditions).order_by(EventRow.number.desc()).limit(limit + 1))
        ]
        events.sort(key=lambda event: event.number, reverse=True)
        shown, next_cursor = cut_page(_CURSOR, events, limit, lambda event: (event.number,))
        return Page(items=[event.view for event in shown], next_cursor=next_cursor)


@dataclass(frozen=True)
class Read:
    """`number`: the position after them; events before it that are not wanted are left out."""

    events: Sequence[NumberedEvent]
    number: int


def read_after(database: Database, epoch: int, number: int, wanted: EventFilter, *, limit: int) -> Read:
    """In their order. Raises `events_forgotten` if one of those that come next has gone, or if the catalog went back
    to before `number`."""
    with database.read(in_transaction=False) as session:
        _, last = known_numbers(session)
        next_ones = and_(EventRow.number > number, EventRow.number <= last)
        events = [
            _event(epoch, row)
            for query in _queries(wanted)
            for row in session.execute(query.where(next_ones).order_by(EventRow.number).limit(limit))
        ]
        forgotten, _ = known_numbers(session)  # asked last: what goes in between is noticed
    if not forgotten <= number <= last:
        raise _unknown(position(epoch, number))
    events = sorted(events, key=lambda event: event.number)[:limit]
    return Read(events, events[-1].number if len(events) == limit else last)


def position(epoch: int, number: int) -> str:
    """An event's id. The epoch is raised when the catalog has lost events: their numbers are given again."""
    return f"{epoch}-{number}"


def find_position(context: ServiceContext, event_id: str | None) -> int:
    """The number after which a stream begins: that of the id, or the greatest one. Raises `events_forgotten` if events
    after it are not known any more, and `invalid_request` for what is no id."""
    last = number_new(context.database)
    if event_id is None:
        return last
    match = _POSITION.match(event_id)
    if match is None:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST, f"{event_id[:50]!r} is no event's id. Give one that the service has sent."
        )
    number = int(match["number"])
    with context.database.read(in_transaction=False) as session:
        forgotten, last = known_numbers(session)
    if int(match["epoch"]) != context.epoch or not forgotten <= number <= last:
        raise _unknown(event_id)
    return number


def _unknown(event_id: str) -> ProblemError:
    return ProblemError(
        ProblemCode.EVENTS_FORGOTTEN,
        f"What happened after the event {event_id} is not known any more: it is older than HOLDFAST_KEEP_EVENTS_DAYS, "
        "or the catalog was restored. Read the state anew (`GET /v1/events` has what is known), and follow without an "
        "id.",
    )


def _queries(wanted: EventFilter) -> list[Select[EventRow, str, str]]:
    """Those of the project, and those that concern all: each is read along an index of its own."""
    if wanted.run_id is not None:
        return [_numbered(wanted).where(EventRow.run_id == wanted.run_id)]
    if wanted.project_id is None:
        return [_numbered(wanted)]
    of_project = EventRow.project_id
    return [_numbered(wanted).where(of_project == wanted.project_id), _numbered(wanted).where(of_project.is_(None))]


def _numbered(wanted: EventFilter) -> Select[EventRow, str, str]:
    """With today's names; what an event speaks of may be gone, and it is told all the same."""
    query = (
        select(EventRow, Project.name, Run.name)
        .outerjoin(Project, Project.id == EventRow.project_id)
        .outerjoin(Run, Run.id == EventRow.run_id)
        .where(EventRow.number.is_not(None))
    )
    return query.where(EventRow.type.in_(wanted.types)) if wanted.types else query


def _event(epoch: int, row: Row[EventRow, str, str]) -> NumberedEvent:
    happened, project, run = row
    assert happened.number is not None  # asked for
    data = EventData(
        project=project or happened.project_id,
        run=run,
        attempt=happened.attempt,
        step=happened.step,
        checkpoint_id=happened.checkpoint_id,
        operation=happened.operation,
        store=None if happened.store is None else StoreRole(happened.store),
        quota=happened.quota,
        reason=happened.reason,
    )
    view = EventView(id=position(epoch, happened.number), type=happened.type, timestamp=happened.happened_at, data=data)
    return NumberedEvent(happened.number, happened.project_id, happened.run_id, view)
