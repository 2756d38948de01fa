"""What would go now, and what nothing needs but waits, for people: the collector's own question, asked of every copy.

It reads the whole catalog, or one project of it, and changes nothing.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, case, func, literal, or_, select
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.states import CopyState
from holdfast_protocol.stores import CollectionPlan, StoreCollection, Waiting, WaitsFor
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.auth.principal import Principal
from holdfast_service.collect.garbage import (
    THERE,
    UNWRITTEN,
    Question,
    another_serves_everybody,
    relied_on_by_an_upload,
    why_not,
)
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Copy
from holdfast_service.holds.held import store_lets_go
from holdfast_service.runs.views import project_named

_GOES = "goes"


class _Group(NamedTuple):
    store_id: int
    what: str
    copies: int
    bytes: int
    ticket_ends_at: datetime | None
    lease_ends_at: datetime | None


def plan_collection(context: ServiceContext, caller: Principal, project: str | None) -> CollectionPlan:
    """The plan for one project, or for all that the caller sees. Raises `forbidden` and `project_not_found`."""
    problems = {
        # Whether it has newer records is not asked here: that may be a long listing.
        attached.store_id: why_not(context, attached) or attached.watch.newer_records.last_problem
        for attached in context.stores
    }
    with context.database.read() as session:
        project_id = caller.project_id if project is None else project_named(session, caller, project).id
        question = Question.now_of(session, context, context.store_ids)
        groups = _groups(session, question, project_id)
    return CollectionPlan(
        at=question.now,
        stores=[_of_store(question, attached, problems[attached.store_id], groups) for attached in context.stores],
    )


def _of_store(
    question: Question, attached: AttachedStore, problem: str | None, groups: list[_Group]
) -> StoreCollection:
    own = [group for group in groups if group.store_id == attached.store_id]
    goes = [group for group in own if group.what == _GOES]
    return StoreCollection(
        store=attached.role,
        problem=problem,
        copies=sum(group.copies for group in goes),
        bytes=sum(group.bytes for group in goes),
        waiting=[
            Waiting(
                waits_for=WaitsFor(group.what),
                copies=group.copies,
                bytes=group.bytes,
                until=_until(question, WaitsFor(group.what), group),
            )
            for group in sorted(own, key=lambda group: group.what)
            if group.what != _GOES
        ],
    )


def _until(question: Question, waits_for: WaitsFor, group: _Group) -> datetime | None:
    if waits_for is WaitsFor.TICKET and group.ticket_ends_at is not None:
        return group.ticket_ends_at + question.longest_upload
    if waits_for in {WaitsFor.LEASE, WaitsFor.STORE}:
        return group.lease_ends_at
    return None


def _groups(session: Session, question: Question, project_id: str | None) -> list[_Group]:
    what = _what(question)
    leased = aliased(Copy)
    lease_ends_at = select(func.max(leased.leased_until)).where(leased.chunk_id == Copy.chunk_id).scalar_subquery()
    marked = Copy.state == CopyState.DELETING
    unneeded = or_(Copy.state.in_(UNWRITTEN), ~question.chunk_is_needed(), another_serves_everybody())
    rows = (
        select(
            Copy.store_id,
            what.label("what"),
            Copy.stored_bytes,
            Copy.ticket_expires_at,
            # Only where it is asked for: most of what is there has no lease.
            case((what.in_((WaitsFor.LEASE, WaitsFor.STORE)), lease_ends_at)).label("lease_ends_at"),
        )
        .where(Copy.store_id.in_(question.store_ids), or_(marked, Copy.state.in_(THERE) & unneeded))
        .where(literal(True) if project_id is None else Copy.project_id == project_id)
        .subquery()
    )
    found = session.execute(
        select(
            rows.c.store_id,
            rows.c.what,
            func.count(),
            func.sum(rows.c.stored_bytes),
            func.max(rows.c.ticket_expires_at),
            func.max(rows.c.lease_ends_at),
        ).group_by(rows.c.store_id, rows.c.what)
    )
    return [_Group(row[0], row[1], row[2], int(row[3]), row[4], row[5]) for row in found]


def _what(question: Question) -> ColumnElement[Any]:
    """What a copy that nothing needs waits for: the hardest reason first."""
    return case(
        (Copy.state == CopyState.DELETING, literal(WaitsFor.STORE.value)),
        (~store_lets_go(), literal(WaitsFor.HOLD.value)),
        (relied_on_by_an_upload(), literal(WaitsFor.UPLOAD.value)),
        (question.worked_on(), literal(WaitsFor.LEASE.value)),
        (~question.waited_out(), literal(WaitsFor.TICKET.value)),
        else_=literal(_GOES),
    )
