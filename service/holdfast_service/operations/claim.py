"""Which operation is next. Claimed under its row's lock, with a lease that `progress` renews and a token that settles.

A running one whose lease has run out belonged to a process that was killed, so it is claimed again, but not for ever:
one that takes its process with it (out of memory, a crash in a library) would take them all, one after the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from datetime import timedelta

from sqlalchemy import ColumnElement, and_, exists, func, or_, select
from sqlalchemy.orm import Session

from holdfast_protocol.states import OperationState
from holdfast_service.catalog.audit import Actor
from holdfast_service.catalog.custody_tables import Controller, Operation
from holdfast_service.catalog.operation_run import OperationRun
from holdfast_service.catalog.rounds import Backlog
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.operations.settle import CANCELLED, end

NAME = "operations"
MOST_TRIES = 3


def claim_next(context: ServiceContext, kinds: Collection[str], worker_id: str) -> OperationRun | None:
    """The oldest that is due, of the kinds that this version knows; None if none is, or the controller is paused."""
    while True:
        with context.database.transaction() as session:
            now = database_now(session)
            paused = exists().where(Controller.name == NAME, Controller.paused_at.is_not(None))
            found = session.scalar(
                select(Operation)
                .where(_is_due(now), Operation.kind.in_(kinds), ~paused)
                .order_by(Operation.created_at, Operation.id)
                .limit(1)
                .with_for_update(of=Operation, skip_locked=True)
            )
            if found is None:
                return None
            if found.cancel_requested_at is not None:
                end(session, found, OperationState.CANCELLED, error=CANCELLED)
            elif found.tries >= MOST_TRIES:
                end(session, found, OperationState.FAILED, error=_given_up(found))
            else:
                return _claim(session, context, found, worker_id)


def backlog(session: Session, context: ServiceContext) -> Backlog:
    """Of the controller: what waits, and what somebody is at."""
    del context
    now = database_now(session)
    due = _is_due(now)
    waiting, oldest, running = session.execute(
        select(
            func.count().filter(due),
            func.min(Operation.created_at).filter(due),
            func.count().filter(Operation.state == OperationState.RUNNING, ~due),
        ).where(Operation.state.in_((OperationState.QUEUED, OperationState.RUNNING)))
    ).one()
    return Backlog(waiting, running, oldest)


def _is_due(now: object) -> ColumnElement[bool]:
    return or_(
        and_(
            Operation.state == OperationState.QUEUED,
            or_(Operation.leased_until.is_(None), Operation.leased_until <= now),
        ),
        and_(Operation.state == OperationState.RUNNING, Operation.leased_until <= now),
    )


def _claim(session: Session, context: ServiceContext, found: Operation, worker_id: str) -> OperationRun:
    now = database_now(session)
    found.state = OperationState.RUNNING
    found.started_at = found.started_at or now
    found.leased_until = now + timedelta(seconds=context.settings.lease_seconds)
    found.lease_token = secrets.token_hex(16)
    found.worker_id = worker_id
    found.tries += 1
    return OperationRun(
        context=context,
        id=found.id,
        kind=found.kind,
        project_id=found.project_id,
        run_id=found.run_id,
        checkpoint_id=found.checkpoint_id,
        arguments=found.arguments,
        actor=Actor("person", found.created_by, found.created_by_token),
        lease_token=found.lease_token,
        tries=found.tries,
    )


def _given_up(found: Operation) -> str:
    return (
        f"Given up after {found.tries} tries: each time its process ended or fell silent, the last time "
        f"{found.worker_id}. Look at that process's log, then start it again."
    )
