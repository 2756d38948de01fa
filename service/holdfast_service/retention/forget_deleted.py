"""What is left of deleted runs and projects goes, once their time in the trash is over (protocol rule 46).

    nothing of the run is committed, in the trash or going any more   -> purged: from here on nobody takes it back
    each checkpoint whose chunks and records are gone                  -> its rows go
    the record beside the data says that it is purged                  -> the name is free

Each step is a transaction of its own and finds its own work, so a crash between two of them, and two processes at once,
change nothing. The run's row and its attempts stay: copies that other runs share name the attempt that uploaded them.
What they said of the job is taken out.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from sqlalchemy import ColumnElement, and_, delete, exists, select, update
from sqlalchemy.orm import Session

from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.custody_tables import Operation, Policy, RetentionMark
from holdfast_service.catalog.record_content import gone_name
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_outbox import subject_changed
from holdfast_service.catalog.record_tables import RecordSubject, WrittenRecord
from holdfast_service.catalog.tables import Attempt, Checkpoint, Project, Run, Token
from holdfast_service.catalog.webhook_tables import Webhook
from holdfast_service.catalog.went_back import refuse_if_went_back
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.retention.forget_checkpoints import AT_ONCE, OVER, forget_checkpoints, is_forgettable
from holdfast_service.retention.trash import lock_run

_Deleted = TypeVar("_Deleted", Run, Project)
_UNSYNCHRONIZED = {"synchronize_session": False}


def forget_deleted(context: ServiceContext, actor: Actor) -> int:
    """How many runs and projects were purged in this round. Raises WentBackError."""
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
    run.purged_at = database_now(session)
    session.execute(
        update(Attempt)
        .where(Attempt.run_id == run_id)
        .values(host="", environment={}, outcome_detail=None, error_type=None, notice=None),
        execution_options=_UNSYNCHRONIZED,
    )
    for table in (RetentionMark, Policy):
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
        (Webhook, Webhook.deleted_at, {"deleted_at": now, "secret": b""}),
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
