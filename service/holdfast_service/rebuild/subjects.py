"""Rows of projects, policies, runs and attempts, from their records; and from those of the checkpoints where a record
is damaged, or older than the checkpoint is.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import ForkedFrom
from holdfast_service.db.dialect import insert_absent
from holdfast_service.db.tables.core import QUOTA_COLUMNS, Attempt, Project, Run
from holdfast_service.db.tables.operations import Policy
from holdfast_service.db.tables.records import RecordSubject, WrittenRecord
from holdfast_service.records.documents import (
    AttemptFacts,
    DamagedRecordError,
    DeletionFacts,
    ProjectFacts,
    ProjectRecord,
    RecordKind,
    RunFacts,
    RunRecord,
)

_ATTEMPTS_PER_STATEMENT = 500


def put_project(session: Session, record: ProjectRecord, store_id: int, name: str | None) -> None:
    """`name`: what the store has it as, if it has it."""
    _project_row(session, record.project, record.quota_bytes, record.created_at)
    found = session.get_one(Project, record.project.id)
    _put_deletion(found, record.deletion)
    for column in QUOTA_COLUMNS:
        if column in record.quotas:
            setattr(found, column, record.quotas[column])
    policies = [each.model_dump() | {"project_id": record.project.id} for each in record.policies]
    insert_absent(session, Policy, policies)
    _written(session, record, store_id, name)


def put_run(session: Session, record: RunRecord, store_id: int, name: str | None) -> None:
    _project_row(session, record.project, None, record.created_at)
    _run_row(session, record.run, record.project.id, record.created_at, record.latest_attempt)
    found = session.get_one(Run, record.run.id)
    _put_deletion(found, record.deletion)
    found.tags, found.note = record.tags, record.note
    if record.forked_from is not None:
        found.forked_from = record.forked_from.model_dump()
    rows = [_attempt_row(record.run.id, facts) for facts in record.attempts]
    for first in range(0, len(rows), _ATTEMPTS_PER_STATEMENT):
        insert_absent(session, Attempt, rows[first : first + _ATTEMPTS_PER_STATEMENT])
    _written(session, record, store_id, name)


def put_lineage(
    session: Session, project: ProjectFacts, run: RunFacts, facts: AttemptFacts, forked_from: ForkedFrom | None
) -> int:
    """What a checkpoint says of where it comes from; the id of its attempt's row. A run's record may be damaged, or
    older than the commit that cut the line. Raises DamagedRecordError where other records contradict it."""
    _project_row(session, project, None, facts.opened_at)
    _run_row(session, run, project.id, facts.opened_at, facts.number)
    if forked_from is not None and (forked := session.get_one(Run, run.id)).forked_from is None:
        forked.forked_from = forked_from.model_dump()
    insert_absent(session, Attempt, [_attempt_row(run.id, facts)])
    attempt = session.scalar(select(Attempt).where(Attempt.run_id == run.id, Attempt.number == facts.number))
    if attempt is None:
        raise DamagedRecordError(f"the launch of attempt {facts.number} has another number in its run")
    if attempt.cut_at is None and facts.cut_at is not None:
        attempt.cut_at, attempt.resumed_from_id = facts.cut_at, facts.resumed_from_id
    if facts.last_step is not None and (attempt.last_step is None or attempt.last_step < facts.last_step):
        attempt.last_step = facts.last_step
    return attempt.id


def _put_deletion(found: Project | Run, facts: DeletionFacts | None) -> None:
    for name, value in ({} if facts is None else facts.model_dump()).items():
        setattr(found, name, value)


def _project_row(session: Session, project: ProjectFacts, quota_bytes: int | None, created_at: datetime) -> None:
    insert_absent(
        session,
        Project,
        [{"id": project.id, "name": project.name, "quota_bytes": quota_bytes, "created_at": created_at}],
    )
    if session.get(Project, project.id) is None:
        raise DamagedRecordError(f"another project is called {project.name} already")
    _subject_row(session, RecordKind.PROJECT, project.id, project.id)


def _run_row(session: Session, run: RunFacts, project_id: str, created_at: datetime, latest_attempt: int) -> None:
    row = {"id": run.id, "project_id": project_id, "name": run.name, "created_at": created_at}
    insert_absent(session, Run, [row | {"latest_attempt": latest_attempt}])
    found = session.get(Run, run.id)
    if found is None:
        raise DamagedRecordError(f"another run of its project is called {run.name} already")
    found.latest_attempt = max(found.latest_attempt, latest_attempt)
    _subject_row(session, RecordKind.RUN, run.id, project_id)


def _attempt_row(run_id: str, facts: AttemptFacts) -> dict[str, object]:
    row = facts.model_dump(exclude={"resumed_from_attempt", "resumed_from_step"})
    return row | {"run_id": run_id, "heartbeat_at": None}


def _subject_row(session: Session, kind: RecordKind, subject_id: str, project_id: str) -> None:
    row = {"kind": kind, "subject_id": subject_id, "project_id": project_id, "version": 1, "recorded_version": 0}
    insert_absent(session, RecordSubject, [row])


def _written(session: Session, record: ProjectRecord | RunRecord, store_id: int, name: str | None) -> None:
    """Versions go on from the record's, so that the next one outdoes it."""
    kind = RecordKind(record.kind)
    subject_id = record.run.id if isinstance(record, RunRecord) else record.project.id
    _subject_row(session, kind, subject_id, record.project.id)
    subject = session.get_one(RecordSubject, (kind, subject_id))
    subject.version = max(subject.version, record.version)
    if name is None:
        return
    written = {"kind": kind, "subject_id": subject_id, "store_id": store_id, "version": record.version, "name": name}
    insert_absent(session, WrittenRecord, [written])
