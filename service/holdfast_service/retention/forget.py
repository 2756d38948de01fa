"""Rows that are over and that nothing asks about any more go after a documented time: the table is in
docs/operating/day-to-day.md.

A batch is a transaction, and says in the audit log how many rows went. What a decision still rests on stays, however
old: see each `_old_…`. Attempts and audit events stay for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar

from sqlalchemy import ColumnElement, and_, delete, exists, func, or_, select, text, update
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.states import CheckpointState, OperationState
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.bootstrap import BOOTSTRAP_NAME
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.engine import refuse_if_went_back
from holdfast_service.db.repeats import KEPT_FOR
from holdfast_service.db.tables.core import FORGOTTEN, Attempt, Checkpoint, Project, ReadLease, Run, Shard, Token
from holdfast_service.db.tables.curves import Curve
from holdfast_service.db.tables.identities import UsedIdentityToken
from holdfast_service.db.tables.operations import (
    CheckpointCopy,
    ForgottenTotal,
    Hold,
    IdempotencyKey,
    Operation,
    Policy,
    RetentionMark,
)
from holdfast_service.db.tables.records import RecordSubject, WrittenRecord
from holdfast_service.db.tables.sign_ins import SignIn
from holdfast_service.db.tables.webhooks import Webhook
from holdfast_service.holds.held import in_force
from holdfast_service.records.content import gone_name
from holdfast_service.records.documents import RecordKind
from holdfast_service.records.outbox import subject_changed
from holdfast_service.retention.trash import lock_run
from holdfast_service.settings import ServiceSettings

AT_ONCE = 100
OVER = (CheckpointState.ABORTED, CheckpointState.DELETED)
_UNSYNCHRONIZED = {"synchronize_session": False}


def is_forgettable() -> ColumnElement[bool]:
    """Over `checkpoints`: the collector has dropped its references, and no store has a record of it. A record without
    a row would be taken for a commit that the database has lost."""
    recorded = exists().where(WrittenRecord.kind == RecordKind.CHECKPOINT, WrittenRecord.subject_id == Checkpoint.id)
    return and_(Checkpoint.state.in_(OVER), Checkpoint.forgotten_at.is_not(None), ~recorded)


def forget_checkpoints(session: Session, checkpoint_ids: Sequence[str]) -> int:
    """Takes the rows of checkpoints from the catalog that are over, whose chunks and records are gone: those of them
    that are forgettable; how many. What the metrics count over all time is kept in one row per project, or a counter
    would go back."""
    rows = session.execute(
        select(Checkpoint.id, Run.project_id)
        .join(Run, Run.id == Checkpoint.run_id)
        .where(Checkpoint.id.in_(checkpoint_ids), is_forgettable())
        .order_by(Checkpoint.id)
        .with_for_update(of=Checkpoint, skip_locked=True)
    ).all()
    ids = [row.id for row in rows]
    for project_id in sorted({row.project_id for row in rows}):
        _count(session, project_id, [row.id for row in rows if row.project_id == project_id])
    session.execute(
        update(Operation).where(Operation.checkpoint_id.in_(ids)).values(checkpoint_id=None),
        execution_options=_UNSYNCHRONIZED,
    )
    for table in (Shard, ReadLease, Hold, CheckpointCopy):
        session.execute(delete(table).where(table.checkpoint_id.in_(ids)), execution_options=_UNSYNCHRONIZED)
    session.execute(delete(Checkpoint).where(Checkpoint.id.in_(ids)), execution_options=_UNSYNCHRONIZED)
    return len(ids)


def _count(session: Session, project_id: str, ids: Sequence[str]) -> None:
    committed = Checkpoint.committed_at.is_not(None)
    sums = session.execute(
        select(
            func.count(Checkpoint.committed_at).label("committed"),
            func.count(Checkpoint.aborted_at).label("aborted"),
            func.sum(Checkpoint.chunk_bytes).filter(committed).label("chunk_bytes"),
            func.sum(Checkpoint.uploaded_bytes).filter(committed).label("uploaded_bytes"),
            func.sum(Checkpoint.deduplicated_bytes).filter(committed).label("deduplicated_bytes"),
        ).where(Checkpoint.id.in_(ids))
    ).one()
    insert_absent(session, ForgottenTotal, [{"project_id": project_id}])
    more = {name: getattr(ForgottenTotal, name) + int(value or 0) for name, value in sums._mapping.items()}
    session.execute(
        update(ForgottenTotal).where(ForgottenTotal.project_id == project_id).values(more),
        execution_options=_UNSYNCHRONIZED,
    )


_Deleted = TypeVar("_Deleted", Run, Project)


def forget_deleted(context: ServiceContext, actor: Actor) -> int:
    """What is left of deleted runs and projects goes, once their time in the trash is over (rule deleted-run-trash):
    how many runs and projects were purged in this pass. Raises WentBackError.

        nothing of the run is committed, in the trash or going any more   -> purged: from here on it cannot come back
        each checkpoint whose chunks and records are gone                  -> its rows go
        the record beside the data says that it is purged                  -> the name is free

    Each step is a transaction of its own and finds its own work: a crash between two of them, and two processes at
    once, change nothing. The run's row and its attempts stay: copies that other runs share name the attempt that
    uploaded them. What they said of the job is taken out.
    """
    purged = 0
    with context.database.read() as session:
        runs = session.scalars(select(Run.id).where(_run_is_due(session)).order_by(Run.id)).all()
    for run_id in runs:
        purged += context.database.run(partial(_purge_run, run_id=run_id, actor=actor))
    with context.database.read() as session:
        projects = session.scalars(select(Project.id).where(_project_is_due(session)).order_by(Project.id)).all()
    for project_id in projects:
        purged += context.database.run(partial(_purge_project, project_id=project_id, actor=actor))
    while not context.stopping.is_set() and context.database.run(_forget_some):
        pass
    with context.database.transaction() as session:
        _free_names(session, RecordKind.RUN, Run)
        _free_names(session, RecordKind.PROJECT, Project)
    return purged


def _run_is_due(session: Session) -> ColumnElement[bool]:
    """Over `runs`. Asked again under the lock: it may have been taken back, or purged, since."""
    return and_(
        Run.purged_at.is_(None),
        Run.purge_at <= database_now(session),
        ~exists().where(Checkpoint.run_id == Run.id, Checkpoint.state.not_in(OVER)),
        ~exists().where(Operation.run_id == Run.id, Operation.ended_at.is_(None)),
    )


def _project_is_due(session: Session) -> ColumnElement[bool]:
    """Over `projects`, likewise."""
    return and_(
        Project.purged_at.is_(None),
        Project.purge_at <= database_now(session),
        ~exists().where(Run.project_id == Project.id, Run.purged_at.is_(None)),
        ~exists().where(Operation.project_id == Project.id, Operation.ended_at.is_(None)),
    )


def _purge_run(session: Session, run_id: str, actor: Actor) -> bool:
    refuse_if_went_back(session)
    run = lock_run(session, run_id)
    if session.scalar(select(Run.id).where(Run.id == run_id, _run_is_due(session))) is None:
        return False
    run.purged_at, run.tags, run.note = database_now(session), [], ""
    session.execute(
        update(Attempt)
        .where(Attempt.run_id == run_id)
        .values(host="", environment={}, config=None, outcome_detail=None, error_type=None, notice=None),
        execution_options=_UNSYNCHRONIZED,
    )
    for table in (RetentionMark, Policy, Curve):
        session.execute(delete(table).where(table.run_id == run_id), execution_options=_UNSYNCHRONIZED)
    record_event(
        session,
        actor,
        "run.purge",
        project_id=run.project_id,
        run_id=run_id,
        reason=run.delete_reason,
        after={"name": run.name, "deleted_by": run.deleted_by},
    )
    subject_changed(session, RecordKind.PROJECT, run.project_id, run.project_id)
    subject_changed(session, RecordKind.RUN, run_id, run.project_id)
    return True


def _purge_project(session: Session, project_id: str, actor: Actor) -> bool:
    refuse_if_went_back(session)
    project = session.execute(
        select(Project).where(Project.id == project_id).with_for_update(),
        execution_options={"populate_existing": True},
    ).scalar_one()
    if session.scalar(select(Project.id).where(Project.id == project_id, _project_is_due(session))) is None:
        return False
    now = database_now(session)
    project.purged_at = now
    for table, column, values in (
        (Token, Token.revoked_at, {"revoked_at": now}),
        (Webhook, Webhook.deleted_at, {"deleted_at": now, "secret": b"", "url": ""}),
    ):
        session.execute(
            update(table).where(table.project_id == project_id, column.is_(None)).values(values),
            execution_options=_UNSYNCHRONIZED,
        )
    session.execute(delete(Policy).where(Policy.project_id == project_id), execution_options=_UNSYNCHRONIZED)
    record_event(
        session,
        actor,
        "project.purge",
        project_id=project_id,
        reason=project.delete_reason,
        after={"name": project.name, "deleted_by": project.deleted_by},
    )
    subject_changed(session, RecordKind.PROJECT, project_id, project_id)
    return True


def _forget_some(session: Session) -> bool:
    """Whether there may be more of them."""
    refuse_if_went_back(session)
    ids = session.scalars(
        select(Checkpoint.id)
        .join(Run, Run.id == Checkpoint.run_id)
        .where(Run.purged_at.is_not(None), is_forgettable())
        .order_by(Checkpoint.id)
        .limit(AT_ONCE)
    ).all()
    return forget_checkpoints(session, ids) == AT_ONCE


def _free_names(session: Session, kind: RecordKind, table: type[_Deleted]) -> None:
    """Once the newest record in each store says that it is purged, in one that is not attached now as well: a catalog
    that is rebuilt from an older one would have two of one name, and could keep only one of them."""
    older = exists().where(
        WrittenRecord.kind == RecordSubject.kind,
        WrittenRecord.subject_id == RecordSubject.subject_id,
        WrittenRecord.version < RecordSubject.version,
        WrittenRecord.removed_at.is_(None),
    )
    recorded = exists().where(
        RecordSubject.kind == kind,
        RecordSubject.subject_id == table.id,
        RecordSubject.recorded_version >= RecordSubject.version,
        ~older,
    )
    purged = select(table).where(table.purged_at.is_not(None), ~table.name.contains("~"), recorded)
    for found in session.scalars(purged.order_by(table.id).with_for_update(skip_locked=True)):
        found.name = gone_name(found)


_BATCHES = 20

Forget = Callable[[Session, ServiceSettings], int]


def forget_old(context: ServiceContext, actor: Actor) -> int:
    """How many rows went: a bounded number in each pass. Raises WentBackError."""
    forgotten = 0
    kinds: dict[str, Forget] = {
        "operations": _operations,
        "sign_ins": _sign_ins,
        "tokens": _tokens,
        "used_identity_tokens": _used_identity_tokens,
        "checkpoints": _checkpoints,
        "idempotency_keys": _idempotency_keys,
    }
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


def _idempotency_keys(session: Session, settings: ServiceSettings) -> int:
    del settings
    keys = session.scalars(
        select(IdempotencyKey.key)
        .where(IdempotencyKey.created_at < database_now(session) - KEPT_FOR)
        .order_by(IdempotencyKey.created_at)
        .limit(AT_ONCE)
    ).all()
    session.execute(
        delete(IdempotencyKey).where(
            IdempotencyKey.key.in_(keys), IdempotencyKey.created_at < database_now(session) - KEPT_FOR
        ),
        execution_options=_UNSYNCHRONIZED,
    )
    return len(keys)


def _operations(session: Session, settings: ServiceSettings) -> int:
    now = database_now(session)
    return _delete(session, Operation, _old_operation(now, now - timedelta(days=settings.keep_operations_days)))


def _old_operation(now: datetime, before: datetime) -> ColumnElement[bool]:
    """Over `operations`. The last one of its kind for a run and a store stays: it tells when a drill last went well,
    and a drill of the first store tells nothing of the second. One that is dated later than now was dated by a clock
    that was ahead, and stands for none."""
    newer = aliased(Operation)
    is_newer = exists().where(
        newer.kind == Operation.kind,
        newer.project_id.is_not_distinct_from(Operation.project_id),
        newer.run_id.is_not_distinct_from(Operation.run_id),
        newer.arguments["store"].as_string().is_not_distinct_from(Operation.arguments["store"].as_string()),
        newer.state.in_((OperationState.DONE, OperationState.FAILED)),
        newer.ended_at > Operation.ended_at,
        newer.ended_at <= now,
    )
    return and_(Operation.ended_at < before, or_(Operation.state == OperationState.CANCELLED, is_newer))


def _tokens(session: Session, settings: ServiceSettings) -> int:
    now = database_now(session)
    return _delete(session, Token, _old_token(now, now - timedelta(days=settings.keep_tokens_days)))


def _old_token(now: datetime, before: datetime) -> ColumnElement[bool]:
    """Over `tokens`: it is of no use any more, has made no other that is there, and holds nothing. The catalog tells by
    which token made which who may release a hold (`holds/holds.py`)."""
    made = aliased(Token)
    return and_(
        or_(Token.revoked_at < before, Token.expires_at < before),
        # Without its row the next start would take HOLDFAST_BOOTSTRAP_TOKEN for a new one.
        Token.name != BOOTSTRAP_NAME,
        ~exists().where(made.created_by_token == Token.id),
        ~exists().where(Hold.placed_by_token == Token.id, in_force(now)),
    )


def _sign_ins(session: Session, settings: ServiceSettings) -> int:
    del settings
    return _delete(session, SignIn, SignIn.expires_at < database_now(session))


def _used_identity_tokens(session: Session, settings: ServiceSettings) -> int:
    del settings
    # A day more: until its end by the clocks of all services, and not by the database's alone.
    ended = database_now(session) - timedelta(days=1)
    return _delete(session, UsedIdentityToken, UsedIdentityToken.expires_at < ended)


def _delete(
    session: Session,
    table: type[Operation] | type[Token] | type[SignIn] | type[UsedIdentityToken],
    old: ColumnElement[bool],
) -> int:
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
    """Over `checkpoints`. The lineage leads through what an attempt resumed from, or was offered; the first one
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
