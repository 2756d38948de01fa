"""A project's quota, reserved before a byte is sent (protocol rule 19).

The copies' rows are the reservation: whatever may be in the store counts. No counter that could drift.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_service.catalog.stored_bytes import bytes_against_quota
from holdfast_service.catalog.tables import Project
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


def lock_quota(session: Session, project: Project) -> int | None:
    """The quota in bytes, its row locked until the transaction ends; None (and no lock) where `project`, as this
    transaction has read it, has none.

    Taken before any chunk is locked. FOR NO KEY UPDATE: rows that refer to the project can still be inserted.
    """
    if project.quota_bytes is None:
        return None
    return session.scalar(select(Project.quota_bytes).where(Project.id == project.id).with_for_update(key_share=True))


def refuse_over_quota(
    session: Session, context: ServiceContext, project: Project, quota_bytes: int, wanted_bytes: int
) -> None:
    """Called under `lock_quota`'s lock, when the wanted copies have their rows.

    Raises `quota_exceeded` with what is left.
    """
    used = bytes_against_quota(session, context, [project.id])[project.id] - wanted_bytes
    left = max(0, quota_bytes - used)
    if wanted_bytes > left:
        raise ProblemError(
            ProblemCode.QUOTA_EXCEEDED,
            f"The project {project.name!r} has {left} bytes left of its quota of {quota_bytes}, and {wanted_bytes} "
            "more are to be sent. Delete checkpoints, or raise the quota.",
            quota_bytes=quota_bytes,
            left_bytes=left,
            wanted_bytes=wanted_bytes,
        )
