"""A run's checkpoints: listed, named by people, and edited by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, select, text, tuple_
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.checkpoints import MAX_METRICS, CheckpointView, EditCheckpoint
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.runs import AtStep, Best, Latest, Point
from holdfast_protocol.states import CheckpointState, Health
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.stored_bytes import stored_bytes_of_checkpoint
from holdfast_service.db.dialect import database_now, holds_text
from holdfast_service.db.pages import cut_page, decode_cursor
from holdfast_service.db.tables.core import IN_TRASH, UNWELL, Checkpoint, Project, Run
from holdfast_service.errors import ProblemError, refuse_unless_seen
from holdfast_service.lineage.best_and_proven import unproven_among
from holdfast_service.lineage.restore_choice import choose_restore_point, line_of_run, point_of
from holdfast_service.runs.views import (
    checkpoint_by_id,
    checkpoint_view,
    current_checkpoint_view,
    locked_checkpoint,
    project_named,
    run_named,
    seal_progress,
    without_ended_pin,
)

_CURSOR = "checkpoints"


@dataclass(frozen=True)
class CheckpointFilter:
    """Empty or None: all of them. `min_step`, `max_step` and `committed_since` are within the range, `committed_before`
    is not; with one of the last two, what was never committed is left out."""

    states: Sequence[CheckpointState] = ()
    healths: Sequence[Health] = ()
    min_step: int | None = None
    max_step: int | None = None
    committed_since: datetime | None = None
    committed_before: datetime | None = None
    label: str | None = None
    attempt: int | None = None


def list_checkpoints(
    context: ServiceContext,
    caller: Principal,
    project: str,
    run: str,
    wanted: CheckpointFilter,
    *,
    cursor: str | None,
    limit: int,
) -> Page[CheckpointView]:
    """The largest step first, with filters. What `holdfast checkpoints list` and the dashboards read. Raises
    `forbidden`, `project_not_found` and `run_not_found`."""
    query = select(Checkpoint).order_by(Checkpoint.step.desc(), Checkpoint.id.desc()).limit(limit + 1)
    if cursor is not None:
        step, checkpoint_id = decode_cursor(_CURSOR, cursor, int, str)
        query = query.where(tuple_(Checkpoint.step, Checkpoint.id) < tuple_(step, checkpoint_id))
    with context.database.read() as session:
        owner, found = run_named(session, caller, project, run, deleted=True)
        conditions = [Checkpoint.run_id == found.id, *_conditions(session, wanted)]
        rows, next_cursor = cut_page(
            _CURSOR, session.scalars(query.where(*conditions)).all(), limit, lambda row: (row.step, row.id)
        )
        views = _listed(session, [(row, owner.name, found.name) for row in rows])
    return Page(items=views, next_cursor=next_cursor)


_CURSOR_ACROSS = "checkpoints across runs"


def list_across_runs(
    context: ServiceContext,
    caller: Principal,
    project: str | None,
    wanted: CheckpointFilter,
    *,
    cursor: str | None,
    limit: int,
) -> Page[CheckpointView]:
    """Of all runs of a project; `project` None: of every project that the caller may see. Those of one run stand
    together, the largest step first: an index has them in this order, and one has the few that are not well or in the
    trash alone. The runs are in the order of their ids; those in the trash are there as well. Raises `forbidden` and
    `project_not_found`."""
    key = (Checkpoint.run_id, Checkpoint.step, Checkpoint.id)
    query = (
        select(Checkpoint, Project.name, Run.name)
        .join(Run, Run.id == Checkpoint.run_id)
        .join(Project, Project.id == Run.project_id)
        .order_by(*(column.desc() for column in key))
        .limit(limit + 1)
    )
    if cursor is not None:
        query = query.where(tuple_(*key) < tuple_(*decode_cursor(_CURSOR_ACROSS, cursor, str, int, str)))
    with context.database.read() as session:
        if project is not None:
            query = query.where(Run.project_id == project_named(session, caller, project, deleted=True).id)
        elif caller.project_id is not None:
            query = query.where(Run.project_id == caller.project_id)
        query = query.where(Run.purged_at.is_(None), *_conditions(session, wanted))
        if wanted.healths and Health.OK not in wanted.healths:
            query = query.where(text(f"checkpoints.{UNWELL}"))
        if wanted.states and set(wanted.states) <= {CheckpointState.TRASHED, CheckpointState.DELETING}:
            query = query.where(text(f"checkpoints.{IN_TRASH}"))
        rows, next_cursor = cut_page(
            _CURSOR_ACROSS,
            session.execute(query).all(),
            limit,
            lambda row: (row[0].run_id, row[0].step, row[0].id),
        )
        views = _listed(session, rows)
    return Page(items=views, next_cursor=next_cursor)


def _listed(session: Session, rows: Sequence[tuple[Checkpoint, str, str]]) -> list[CheckpointView]:
    """Of each row with the names of its project and its run. The same few statements for however many."""
    found = [row for row, *_ in rows]
    progress = seal_progress(session, found)
    unproven = unproven_among(session, [row.id for row in found if row.committed_at is not None])
    views = [
        checkpoint_view(project, run, row, progress[row.id].sealed_ranks, progress[row.id].missing_ranks).model_copy(
            update={"unproven": row.id in unproven}
        )
        for row, project, run in rows
    ]
    if all(view.pinned_until is None for view in views):
        return views
    now = database_now(session)
    return [without_ended_pin(view, now) for view in views]


def _conditions(session: Session, wanted: CheckpointFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if wanted.states:
        conditions.append(Checkpoint.state.in_(wanted.states))
    if wanted.healths:
        conditions.append(Checkpoint.health.in_(wanted.healths))
    if wanted.min_step is not None:
        conditions.append(Checkpoint.step >= wanted.min_step)
    if wanted.max_step is not None:
        conditions.append(Checkpoint.step <= wanted.max_step)
    if wanted.committed_since is not None:
        conditions.append(Checkpoint.committed_at >= wanted.committed_since)
    if wanted.committed_before is not None:
        conditions.append(Checkpoint.committed_at < wanted.committed_before)
    if wanted.attempt is not None:
        conditions.append(Checkpoint.attempt_number == wanted.attempt)
    if wanted.label is not None:
        conditions.append(holds_text(session, Checkpoint.labels, wanted.label))
    return conditions


_LIVE = (CheckpointState.COMMITTED, CheckpointState.UPLOADING)


def select_checkpoint(
    context: ServiceContext, caller: Principal, project: str, run: str, selector: str
) -> CheckpointView:
    """One checkpoint of a run, by what people write: `latest`, `1200`, `1200#3`, `best:loss`, `ck_…`. Raises
    `forbidden`, `project_not_found`, `run_not_found`, `checkpoint_not_found` and `no_restore_point`.

    This only shows; restoring asks for the restore point instead. A step is therefore shown whatever has become of it,
    while `latest` and `best` mean what a restore would take.
    """
    point = point_of(selector)
    with context.database.read() as session:
        owner, found = run_named(session, caller, project, run)
        if isinstance(point, Latest | Best):
            checkpoint = _restorable(session, found, point)
        elif isinstance(point, AtStep):
            checkpoint = _at_step(session, found, point)
        else:
            checkpoint = _or_not_found(session.get(Checkpoint, point.checkpoint_id), found, point)
        view = current_checkpoint_view(session, owner.name, found.name, checkpoint)
        told = {
            "stored_bytes": stored_bytes_of_checkpoint(session, checkpoint.id),
            "unproven": checkpoint.committed_at is not None and bool(unproven_among(session, [checkpoint.id])),
        }
        return view.model_copy(update=told)


def _restorable(session: Session, run: Run, point: Latest | Best) -> Checkpoint:
    decision = choose_restore_point(session, run.id, point)
    if decision.restore_point is None:
        raise ProblemError(
            ProblemCode.NO_RESTORE_POINT,
            f"No checkpoint of this run can be restored as {point}. `holdfast checkpoints list` shows them, and why "
            "not.",
            selector=str(point),
            ever_committed=decision.ever_committed,
            skipped=[one.model_dump(mode="json") for one in decision.skipped],
        )
    return session.get_one(Checkpoint, decision.restore_point.checkpoint_id)


def _at_step(session: Session, run: Run, point: AtStep) -> Checkpoint:
    query = select(Checkpoint).where(Checkpoint.run_id == run.id, Checkpoint.step == point.step)
    if point.attempt is not None:
        query = query.where(Checkpoint.attempt_number == point.attempt)
    line = line_of_run(session, run.id)
    best = max(
        session.scalars(query),
        # The one on the line, else a living one, else the one begun last.
        key=lambda row: (
            row.state in _LIVE and (row.attempt_number, row.step) in line,
            row.state in _LIVE,
            row.created_at,
            row.id,
        ),
        default=None,
    )
    return _or_not_found(best, run, point)


def _or_not_found(checkpoint: Checkpoint | None, run: Run, point: Point) -> Checkpoint:
    if checkpoint is None or checkpoint.run_id != run.id:
        raise ProblemError(
            ProblemCode.CHECKPOINT_NOT_FOUND,
            f"This run has no checkpoint {point}. `holdfast checkpoints list` lists those that it has.",
            selector=str(point),
        )
    return checkpoint


def edit_checkpoint(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: EditCheckpoint, if_match: str | None
) -> CheckpointView:
    """A person's edit: labels, health with its reason, and metrics. Only onto the version that was seen. Raises
    `checkpoint_not_found`, `edit_needs_version`, `edit_conflict`, `checkpoint_conflict` and `invalid_request`."""
    _refuse_senseless(request)
    with context.database.transaction() as session:
        project, run, _ = checkpoint_by_id(session, caller, checkpoint_id)
        checkpoint = locked_checkpoint(session, checkpoint_id)
        if request.health is not None:
            _refuse_unfit_health(checkpoint)
        if request.metrics is not None and checkpoint.state != CheckpointState.COMMITTED:
            raise _not_committed(checkpoint, "metrics")
        before = _edited(checkpoint)
        if before == _wanted(checkpoint, request):  # an earlier try has done it, and its reply was lost
            return current_checkpoint_view(session, project.name, run.name, checkpoint)
        refuse_unless_seen("the checkpoint", f'"{checkpoint.version}"', if_match)
        after = _wanted(checkpoint, request)
        checkpoint.labels, checkpoint.health, checkpoint.health_reason, checkpoint.metrics = after.values()
        checkpoint.version += 1
        changed = [name for name in after if after[name] != before[name]]
        # Attempts up to this one tell nothing against what a person calls healthy now (`training/crash_loop.py`).
        is_released = "health" in changed and after["health"] == Health.OK
        released = {"latest_attempt": run.latest_attempt} if is_released else {}
        record_event(
            session,
            Actor.person(caller),
            "checkpoint.edit",
            project_id=project.id,
            run_id=run.id,
            checkpoint_id=checkpoint.id,
            reason=request.health_reason,
            before=_told(before, changed, request),
            after=_told(after, changed, request) | released,
        )
        session.flush()
        return current_checkpoint_view(session, project.name, run.name, checkpoint)


def _edited(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "labels": list(checkpoint.labels),
        "health": str(checkpoint.health),
        "health_reason": checkpoint.health_reason,
        "metrics": dict(checkpoint.metrics),
    }


def _told(values: dict[str, Any], changed: Sequence[str], request: EditCheckpoint) -> dict[str, Any]:
    """Of the metrics those that the edit names: a checkpoint may have hundreds."""
    told = {name: values[name] for name in changed}
    if "metrics" in told:
        told["metrics"] = {name: told["metrics"].get(name) for name in request.metrics or ()}
    return told


def _wanted(checkpoint: Checkpoint, request: EditCheckpoint) -> dict[str, Any]:
    """What `_edited` is to be."""
    wanted = _edited(checkpoint)
    if request.labels is not None:
        wanted["labels"] = sorted(set(request.labels))
    if request.health is not None:
        wanted["health"] = str(request.health)
        wanted["health_reason"] = None if request.health is Health.OK else request.health_reason
    for name, value in (request.metrics or {}).items():
        wanted["metrics"].pop(name, None)
        if value is not None:
            wanted["metrics"][name] = value.model_dump()
    if len(wanted["metrics"]) > MAX_METRICS:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"A checkpoint has at most {MAX_METRICS} metrics. Take some away, by null, or give fewer.",
        )
    return wanted


def _refuse_senseless(request: EditCheckpoint) -> None:
    if request.health not in (None, Health.OK) and not request.health_reason:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST, "This health needs a reason that others will read. Give health_reason."
        )


def _refuse_unfit_health(checkpoint: Checkpoint) -> None:
    if checkpoint.health == Health.CORRUPT:
        raise ProblemError(
            ProblemCode.CHECKPOINT_CONFLICT,
            f"Step {checkpoint.step} is corrupt: the service found bytes of it lost. It becomes ok by itself once its "
            "chunks are whole again; no edit makes it so.",
        )
    if checkpoint.state != CheckpointState.COMMITTED:
        raise _not_committed(checkpoint, "a health")


def _not_committed(checkpoint: Checkpoint, what: str) -> ProblemError:
    return ProblemError(
        ProblemCode.CHECKPOINT_CONFLICT,
        f"Step {checkpoint.step} is {checkpoint.state}, and only a committed checkpoint has {what} to edit.",
    )
