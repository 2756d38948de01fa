"""A run's checkpoints, the largest step first, with filters. What `holdfast checkpoints` and the dashboards read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, column, exists, func, select, tuple_, type_coerce
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import CheckpointState, Health
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.cursors import cut_page, decode_cursor
from holdfast_service.catalog.proven import unproven_among
from holdfast_service.catalog.resolve import run_named
from holdfast_service.catalog.tables import Checkpoint
from holdfast_service.catalog.views import checkpoint_view, seal_progress
from holdfast_service.context import ServiceContext

_CURSOR = "checkpoints"


@dataclass(frozen=True)
class CheckpointFilter:
    """Empty or None: all of them. `min_step` and `max_step` are within the range."""

    states: Sequence[CheckpointState] = ()
    healths: Sequence[Health] = ()
    min_step: int | None = None
    max_step: int | None = None
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
    """Raises `forbidden`, `project_not_found` and `run_not_found`."""
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
        progress = seal_progress(session, rows)
        unproven = unproven_among(session, [row.id for row in rows if row.committed_at is not None])
        views = [
            checkpoint_view(
                owner.name, found.name, row, progress[row.id].sealed_ranks, progress[row.id].missing_ranks
            ).model_copy(update={"unproven": row.id in unproven})
            for row in rows
        ]
    return Page(items=views, next_cursor=next_cursor)


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
    if wanted.attempt is not None:
        conditions.append(Checkpoint.attempt_number == wanted.attempt)
    if wanted.label is not None:
        conditions.append(_has_label(session, wanted.label))
    return conditions


def _has_label(session: Session, label: str) -> ColumnElement[bool]:
    if session.get_bind().dialect.name == "postgresql":
        return type_coerce(Checkpoint.labels, JSONB).contains([label])
    labels = func.json_each(Checkpoint.labels).table_valued("value")
    return exists(select(1).select_from(labels).where(column("value") == label))
