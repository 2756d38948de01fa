"""What counts against the quotas of a project, and what would exceed a hard one (rule quota-reserved).

The rows are the reservation: whatever may be in the store counts, and what is begun. No counter that could drift. A
soft quota refuses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import QuotaKind
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Project, Run
from holdfast_service.errors import ProblemError
from holdfast_service.tallies.sums import Sums, copies_against_quota, sums_of_projects

HARD = {kind: f"quota_{kind}" for kind in QuotaKind}
"""The columns of `projects`."""
SOFT = {kind: f"soft_quota_{kind}" for kind in QuotaKind}

_WHAT_TO_DO = {
    QuotaKind.BYTES: "more are to be sent. Delete checkpoints",
    QuotaKind.OBJECTS: "more are to be sent. Delete checkpoints",
    QuotaKind.RUNS: "more is to be made. Delete runs",
    QuotaKind.CHECKPOINTS: "more is to be begun. Delete checkpoints",
}


class OverQuotaError(ProblemError):
    """`quota_exceeded`, with what is left."""

    def __init__(self, project: Project, kind: QuotaKind, quota: int, left: int, wanted: int) -> None:
        super().__init__(
            ProblemCode.QUOTA_EXCEEDED,
            f"The project {project.name!r} has {left} {kind} left of its quota of {quota}, and {wanted} "
            f"{_WHAT_TO_DO[kind]}, or raise the quota.",
            **{f"quota_{kind}": quota, f"left_{kind}": left, f"wanted_{kind}": wanted},
        )
        self.project_id = project.id
        self.kind = kind


def used_of(
    session: Session, context: ServiceContext, project_ids: Collection[str], sums: Mapping[str, Sums] | None = None
) -> dict[str, dict[QuotaKind, int]]:
    """By project id, what counts now: copies in the primary store, runs that are not in the trash, checkpoints that are
    committed or uploading. `sums`: those of these projects, if they were read already."""
    copies = copies_against_quota(session, context, project_ids)
    sums = sums_of_projects(session, project_ids) if sums is None else sums
    runs = _living_runs(session, project_ids)
    return {
        each: {
            QuotaKind.BYTES: copies[each].bytes,
            QuotaKind.OBJECTS: copies[each].copies,
            QuotaKind.RUNS: runs.get(each, 0),
            QuotaKind.CHECKPOINTS: _checkpoints(sums[each]),
        }
        for each in project_ids
    }


def _living_runs(session: Session, project_ids: Collection[str]) -> dict[str, int]:
    living = Run.project_id.in_(project_ids), Run.deleted_at.is_(None)
    return dict(session.execute(select(Run.project_id, func.count()).where(*living).group_by(Run.project_id)).all())


def _checkpoints(sums: Sums) -> int:
    return sums.committed + sums.uploading


def lock_quotas(session: Session, project: Project, *kinds: QuotaKind) -> dict[QuotaKind, int]:
    """The project's hard quotas of these kinds, its row locked until the transaction ends; empty (and no lock) where
    `project`, as this transaction has read it, has none of them.

    Taken before any chunk is locked. FOR NO KEY UPDATE: rows that refer to the project can still be inserted.
    """
    if all(getattr(project, HARD[kind]) is None for kind in kinds):
        return {}
    columns = [getattr(Project, HARD[kind]) for kind in kinds]
    row = session.execute(
        select(*columns).where(Project.id == project.id).with_for_update(key_share=True)
    ).one_or_none()
    return {kind: quota for kind, quota in zip(kinds, row or (), strict=False) if quota is not None}


def refuse_over_quota(
    session: Session,
    context: ServiceContext,
    project: Project,
    quotas: Mapping[QuotaKind, int],
    stored_bytes: Sequence[int],
) -> None:
    """Called under `lock_quotas`' lock, when the wanted copies have their rows. `stored_bytes`: of each of these.
    Raises `quota_exceeded` with what is left."""
    used = copies_against_quota(session, context, [project.id])[project.id]
    wanted = {QuotaKind.BYTES: (used.bytes, sum(stored_bytes)), QuotaKind.OBJECTS: (used.copies, len(stored_bytes))}
    for kind, (in_all, more) in wanted.items():
        if kind in quotas:
            _refuse(project, kind, quotas[kind], in_all - more, more)


def refuse_one_more(session: Session, project: Project, kind: QuotaKind) -> None:
    """For a run or a checkpoint, when it has its row. Raises `quota_exceeded`."""
    quotas = lock_quotas(session, project, kind)
    if not quotas:
        return
    if kind is QuotaKind.RUNS:
        in_all = _living_runs(session, [project.id]).get(project.id, 0)
    else:
        in_all = _checkpoints(sums_of_projects(session, [project.id])[project.id])
    _refuse(project, kind, quotas[kind], in_all - 1, 1)


def _refuse(project: Project, kind: QuotaKind, quota: int, used: int, wanted: int) -> None:
    left = max(0, quota - used)
    if wanted > left:
        raise OverQuotaError(project, kind, quota, left, wanted)
