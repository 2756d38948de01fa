"""What is told of a run or a project that was deleted."""

from __future__ import annotations

from holdfast_protocol.deletion import InTrash
from holdfast_service.catalog.tables import Project, Run

PURGED = "(purged)"


def in_trash(found: Project | Run) -> InTrash | None:
    """How it can be taken back; None for what is not deleted."""
    if found.deleted_at is None or found.deleted_by is None or found.purge_at is None:
        return None
    return InTrash(
        deleted_at=found.deleted_at,
        deleted_by=found.deleted_by,
        reason=found.delete_reason,
        purge_at=found.purge_at,
    )


def project_label(name: str) -> str:
    """For metrics, by a project's name: all that are purged under one, or each would be a label for ever."""
    return PURGED if "~" in name else name
