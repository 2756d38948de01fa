"""What a project's copies take up in its stores. The rows themselves are counted: no counter that could drift."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState
from holdfast_service.catalog.tables import Copy


def stored_bytes(session: Session, project_ids: Collection[str]) -> dict[str, int]:
    """By project id; everything that may be in the store, uploads that are under way among it."""
    rows = session.execute(
        select(Copy.project_id, func.sum(Copy.stored_bytes))
        .where(Copy.project_id.in_(project_ids), Copy.state != CopyState.GONE)
        .group_by(Copy.project_id)
    )
    found = {project_id: int(total) for project_id, total in rows}
    return {project_id: found.get(project_id, 0) for project_id in project_ids}
