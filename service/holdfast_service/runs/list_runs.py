"""Runs, the newest first, each with its restore point as it is now; making one by name, and its tags and note."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, bindparam, or_, select, tuple_
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page, RunName
from holdfast_protocol.checkpoints import ForkedFrom
from holdfast_protocol.runs import EditRun, RunView
from holdfast_protocol.states import CheckpointState, RunStatus
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.stored_bytes import stored_bytes_of_run
from holdfast_service.db.dialect import holds_text
from holdfast_service.db.pages import cut_page, decode_cursor, moment_from_text, moment_to_text
from holdfast_service.db.tables.core import Attempt, Checkpoint, Project, Run
from holdfast_service.errors import refuse_unless_seen
from holdfast_service.lineage.restore_choice import newest_restore_points
from holdfast_service.quotas.crossings import telling_refusals
from holdfast_service.records.documents import RecordKind
from holdfast_service.records.outbox import subject_changed
from holdfast_service.runs.views import (
    ensure_run,
    in_trash,
    project_named,
    refuse_if_deleted,
    run_named,
    run_status,
    status_detail,
)
from holdfast_service.tallies.sums import sums_of_runs

_CURSOR = "runs"


def list_runs(
    context: ServiceContext,
    caller: Principal,
    project: str | None,
    *,
    statuses: Sequence[RunStatus],
    tag: str | None = None,
    forked_from: str | None = None,
    deleted: bool = False,
    cursor: str | None,
    limit: int,
) -> Page[RunView]:
    """`project` None: of every project that the caller may see. Without `statuses` all of them; with `tag` those that
    have it; with `forked_from` forks of the run of this name, or of the checkpoint with this id; with `deleted` those
    in the trash, and no others. Raises `forbidden` and `project_not_found`."""
    query = select(Run).order_by(Run.created_at.desc(), Run.id.desc()).limit(limit + 1)
    query = query.where(Run.deleted_at.is_not(None) if deleted else Run.deleted_at.is_(None), Run.purged_at.is_(None))
    if statuses:
        query = query.outerjoin(Attempt, _newest()).where(run_status().in_([status.value for status in statuses]))
    if forked_from is not None:
        source = (Run.forked_from[part].as_string() for part in ("run", "checkpoint_id"))
        query = query.where(or_(*(each == forked_from for each in source)))
    if cursor is not None:
        created_at, run_id = decode_cursor(_CURSOR, cursor, str, str)
        query = query.where(tuple_(Run.created_at, Run.id) < tuple_(moment_from_text(created_at), run_id))
    with context.database.read() as session:
        if tag is not None:
            query = query.where(holds_text(session, Run.tags, tag))
        if project is not None:
            query = query.where(Run.project_id == project_named(session, caller, project, deleted=deleted).id)
        elif caller.project_id is not None:
            query = query.where(Run.project_id == caller.project_id)
        found = session.scalars(query).all()
        rows, next_cursor = cut_page(_CURSOR, found, limit, lambda row: (moment_to_text(row.created_at), row.id))
        return Page(items=run_views(session, rows), next_cursor=next_cursor)


def show_run(context: ServiceContext, caller: Principal, project: str, run: str) -> RunView:
    """Raises `forbidden`, `project_not_found` and `run_not_found`."""
    with context.database.read() as session:
        _, found = run_named(session, caller, project, run)
        stored = stored_bytes_of_run(session, found.id)
        return run_views(session, [found])[0].model_copy(update={"stored_bytes": stored})


def put_run(context: ServiceContext, caller: Principal, project: str, run: str) -> tuple[RunView, bool]:
    """The run, and whether this call has made it. Raises `forbidden`, `project_not_found` and `quota_exceeded`."""
    with telling_refusals(context), context.database.transaction() as session:
        owner = project_named(session, caller, project)
        made, is_new = ensure_run(session, owner, run, Actor.person(caller))
        return run_views(session, [made])[0], is_new


def edit_run(
    context: ServiceContext, caller: Principal, name: RunName, request: EditRun, if_match: str | None
) -> RunView:
    """A person's edit of tags and note, only onto the version that was seen. Raises `forbidden`, `project_not_found`,
    `run_not_found`, `edit_needs_version` and `edit_conflict`."""
    with context.database.transaction() as session:
        owner, found = run_named(session, caller, name.project, name.run)
        session.refresh(found, with_for_update={"key_share": True})
        refuse_if_deleted(owner, found)
        before: dict[str, Any] = {"tags": list(found.tags), "note": found.note}
        after = dict(before)
        if request.tags is not None:
            after["tags"] = sorted(set(request.tags))
        if request.note is not None:
            after["note"] = request.note
        if before != after:  # else an earlier try has done it, and its reply was lost
            refuse_unless_seen("the run", _etag(found), if_match)
            found.tags, found.note = after.values()
            changed = [field for field in after if after[field] != before[field]]
            record_event(
                session,
                Actor.person(caller),
                "run.edit",
                project_id=owner.id,
                run_id=found.id,
                before=_told({field: before[field] for field in changed}),
                after=_told({field: after[field] for field in changed}),
            )
            subject_changed(session, RecordKind.RUN, found.id, owner.id)
            session.flush()
        return run_views(session, [found])[0]


def _etag(run: Run) -> str:
    """It follows from what an edit can change, so a rebuilt catalog has the same."""
    said = json.dumps([run.tags, run.note]).encode()
    return f'"{hashlib.sha256(said).hexdigest()[:32]}"'


def _told(edited: dict[str, Any]) -> dict[str, Any]:
    """For the audit log, which keeps for ever what it is told: how long the note is, and not the note."""
    return {
        **{field: value for field, value in edited.items() if field != "note"},
        **({"note_characters": len(edited["note"])} if "note" in edited else {}),
    }


def _newest() -> ColumnElement[bool]:
    """Joins a run with its newest attempt."""
    return (Attempt.run_id == Run.id) & (Attempt.number == Run.latest_attempt)


_NEWEST_STEP = (
    select(Checkpoint.step)
    .where(Checkpoint.run_id == Run.id, Checkpoint.state == CheckpointState.COMMITTED)
    .order_by(Checkpoint.step.desc())
    .limit(1)
    .correlate(Run)
    .scalar_subquery()
)
_NEWEST_OF_RUNS = (
    select(Run.id, run_status(), _NEWEST_STEP, Attempt)
    .outerjoin(Attempt, _newest())
    .where(Run.id.in_(bindparam("run_ids", expanding=True)))
)


def run_views(session: Session, runs: Sequence[Run]) -> list[RunView]:
    """The same few statements for however many runs, and whatever they have."""
    if not runs:
        return []
    ids = [run.id for run in runs]
    owners = {run.project_id for run in runs}
    names = dict(session.execute(select(Project.id, Project.name).where(Project.id.in_(owners))).all())
    sums = sums_of_runs(session, owners, ids)
    newest = {
        run_id: (status, step, attempt)
        for run_id, status, step, attempt in session.execute(_NEWEST_OF_RUNS, {"run_ids": ids})
    }
    points = newest_restore_points(session, [run.id for run in runs if newest[run.id][1] is not None])
    views = []
    for run in runs:
        status, step, attempt = newest[run.id]
        views.append(
            RunView(
                id=run.id,
                project=names[run.project_id],
                name=run.name,
                created_at=run.created_at,
                latest_attempt=run.latest_attempt,
                status=RunStatus(status),
                status_detail=status_detail(attempt),
                last_step=None if attempt is None else attempt.last_step,
                last_heard_at=None if attempt is None else attempt.heartbeat_at or attempt.opened_at,
                committed_checkpoints=sums[run.id].committed,
                newest_step=step,
                logical_bytes=sums[run.id].logical_bytes,
                deduplicated_bytes=sums[run.id].deduplicated_bytes,
                in_trash=in_trash(run),
                restore_point=points.get(run.id),
                tags=list(run.tags),
                note=run.note,
                forked_from=None if run.forked_from is None else ForkedFrom.model_validate(run.forked_from),
                etag=_etag(run),
            )
        )
    return views
