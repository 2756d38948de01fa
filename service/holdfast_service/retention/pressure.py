"""Whether room is so short that what a policy expired is purged before its time (protocol rule 26).

What a person deleted keeps its time: nobody but them knows whether they meant it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, select, true
from sqlalchemy.orm import Session

from holdfast_service.catalog.stored_bytes import bytes_against_quota
from holdfast_service.catalog.tables import Checkpoint, Project, Run
from holdfast_service.context import ServiceContext
from holdfast_service.stores.posix import PosixStore


@dataclass(frozen=True)
class Pressure:
    """`disk`: a store's disk is fuller than HOLDFAST_TRASH_DISK_PERCENT, which concerns every project; `projects`: ids
    of those that use more of their quota than HOLDFAST_TRASH_QUOTA_PERCENT."""

    disk: bool = False
    projects: frozenset[str] = field(default_factory=frozenset)

    def early(self) -> ColumnElement[bool]:
        """Over `checkpoints` joined to `runs`: it goes now, whatever its `purge_at` says."""
        by_policy: ColumnElement[bool] = Checkpoint.trashed_by == "policy"
        return by_policy & (true() if self.disk else Run.project_id.in_(self.projects))


def pressure_now(session: Session, context: ServiceContext) -> Pressure:
    quotas = {row.id: row.quota_bytes for row in session.execute(select(Project.id, Project.quota_bytes))}
    limited = {project_id: quota for project_id, quota in quotas.items() if quota is not None}
    used = bytes_against_quota(session, context, limited) if limited else {}
    share = context.settings.trash_quota_percent / 100
    return Pressure(
        disk=any(_is_full(attached.store, context) for attached in context.stores),
        projects=frozenset(project_id for project_id, quota in limited.items() if used[project_id] > quota * share),
    )


def _is_full(store: object, context: ServiceContext) -> bool:
    """A bucket has no end, and a mount that is away says nothing."""
    if not isinstance(store, PosixStore):
        return False
    try:
        usage = shutil.disk_usage(store.root)
    except OSError:
        return False
    # As df counts: what only root may use is not free to us.
    return usage.used > (usage.used + usage.free) * context.settings.trash_disk_percent / 100
