"""Rows that are over and that nothing asks about any more go after a documented time (docs/operating.md has the table).

A batch is a transaction, and says in the audit log how many rows went. What a decision still rests on stays, however
old: see each `_old_…`. Attempts and audit events stay for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import ColumnElement, and_, delete, exists, or_, select, text
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.states import OperationState
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.custody_tables import Hold, Operation
from holdfast_service.catalog.held import in_force
from holdfast_service.catalog.tables import FORGOTTEN, Attempt, Checkpoint, Token
from holdfast_service.catalog.went_back import refuse_if_went_back
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.retention.forget_checkpoints import AT_ONCE, forget_checkpoints, is_forgettable
from holdfast_service.settings import ServiceSettings

_BATCHES = 20
_UNSYNCHRONIZED = {"synchronize_session": False}

Forget = Callable[[Session, ServiceSettings], int]


def forget_old(context: ServiceContext, actor: Actor) -> int:
    """How many rows went: a bounded number in each round. Raises WentBackError."""
    forgotten = 0
    kinds: dict[str, Forget] = {"operations": _operations, "tokens": _tokens, "checkpoints": _checkpoints}
    for name, forget in kinds.items():
        for _ in range(_BATCHES):
            batch = context.database.run(partial(_forget, context=context, name=name, forget=forget, actor=actor))
            forgotten += batch
            if batch < AT_ONCE or context.stopping.is_set():
                break
    return forgotten


def _forget(session: Session, context: ServiceContext, name: str, forget: Forget, actor: Actor) -> int:
    refuse_if_went_back(session)
    count = forget(session, context.settings)
    if count:
        record_event(session, actor, "catalog.forget", after={name: count})
    return count


def _operations(session: Session, settings: ServiceSettings) -> int:
    before = database_now(session) - timedelta(days=settings.keep_operations_days)
    return _delete(session, Operation, _old_operation(before))


def _old_operation(before: datetime) -> ColumnElement[bool]:
    """Over `operations`. The last one of its kind for a run stays: it tells when a drill last went well."""
    newer = aliased(Operation)
    is_newer = exists().where(
        newer.kind == Operation.kind,
        newer.project_id.is_not_distinct_from(Operation.project_id),
        newer.run_id.is_not_distinct_from(Operation.run_id),
        newer.state.in_((OperationState.DONE, OperationState.FAILED)),
        newer.ended_at > Operation.ended_at,
    )
    return and_(Operation.ended_at < before, or_(Operation.state == OperationState.CANCELLED, is_newer))


def _tokens(session: Session, settings: ServiceSettings) -> int:
    now = database_now(session)
    return _delete(session, Token, _old_token(now, now - timedelta(days=settings.keep_tokens_days)))


def _old_token(now: datetime, before: datetime) -> ColumnElement[bool]:
    """Over `tokens`: it is of no use to anybody, has made no other that is there, and holds nothing. Who may release a
    hold is told by who made which token (`holds/same_line.py`)."""
    made = aliased(Token)
    return and_(
        or_(Token.revoked_at < before, Token.expires_at < before),
        ~exists().where(made.created_by_token == Token.id),
        ~exists().where(Hold.placed_by_token == Token.id, in_force(now)),
    )


def _delete(session: Session, table: type[Operation] | type[Token], old: ColumnElement[bool]) -> int:
    ids: Sequence[str] = session.scalars(
        select(table.id).where(old).order_by(table.id).limit(AT_ONCE).with_for_update(skip_locked=True)
    ).all()
    session.execute(delete(table).where(table.id.in_(ids)), execution_options=_UNSYNCHRONIZED)
    return len(ids)


def _checkpoints(session: Session, settings: ServiceSettings) -> int:
    before = database_now(session) - timedelta(days=settings.keep_checkpoint_rows_days)
    ids = session.scalars(
        select(Checkpoint.id)
        .where(text(FORGOTTEN), Checkpoint.forgotten_at < before, is_forgettable(), ~_still_asked_about())
        .order_by(Checkpoint.forgotten_at)
        .limit(AT_ONCE)
    ).all()
    return forget_checkpoints(session, ids)


def _still_asked_about() -> ColumnElement[bool]:
    """Over `checkpoints`. The line of descent leads through what an attempt resumed from, or was offered; the first one
    that was committed says which components the run has; the furthest ones of an attempt say how far it came, and
    whether it ever committed."""
    attempt, first, further = aliased(Attempt), aliased(Checkpoint), aliased(Checkpoint)
    on_the_line = exists().where(
        attempt.run_id == Checkpoint.run_id,
        or_(attempt.resumed_from_id == Checkpoint.id, attempt.offered_id == Checkpoint.id),
    )
    earlier = exists().where(
        first.run_id == Checkpoint.run_id,
        first.committed_at.is_not(None),
        or_(first.step < Checkpoint.step, and_(first.step == Checkpoint.step, first.id < Checkpoint.id)),
    )
    came_further = exists().where(
        further.run_id == Checkpoint.run_id,
        further.attempt_id == Checkpoint.attempt_id,
        further.step > Checkpoint.step,
        or_(further.committed_at.is_not(None), Checkpoint.committed_at.is_(None)),
    )
    return or_(on_the_line, ~came_further, and_(Checkpoint.committed_at.is_not(None), ~earlier))
