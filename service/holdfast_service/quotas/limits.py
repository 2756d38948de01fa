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
from holdfast_service.tallies.sums import Sums, copies_against_quota, list_entries, sums_of_projects

HARD = {kind: f"quota_{kind}" for kind in QuotaKind}
"""The columns of `projects`."""
SOFT = {kind: f"soft_quota_{kind}" for kind in QuotaKind}

_WHAT_TO_DO = {
    QuotaKind.BYTES: "more are to be sent. Delete checkpoints",
    QuotaKind.OBJECTS: "more are to be sent. Delete checkpoints",
    QuotaKind.RUNS: "more is to be made. Delete runs",
    QuotaKind.CHECKPOINTS: "more is to be begun. Delete checkpoints",
    QuotaKind.ROWS: "more are to be made. Delete checkpoints",
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
    committed or uploading, rows of copies and of chunk lists. `sums`: those of these projects, if they were read
    already."""
    stored = stored_against_quota(session, context, project_ids)
    sums = sums_of_projects(session, project_ids) if sums is None else sums
    runs = _living_runs(session, project_ids)
    return {
        each: {
            **stored[each],
            QuotaKind.RUNS: runs.get(each, 0),
            QuotaKind.CHECKPOINTS: _checkpoints(sums[each]),
        }
        for each in project_ids
    }


STORED = (QuotaKind.BYTES, QuotaKind.OBJECTS, QuotaKind.ROWS)
"""What grows with each save, and goes with a purge."""


def stored_against_quota(
    session: Session, context: ServiceContext, project_ids: Collection[str], *, with_rows: bool = True
) -> dict[str, dict[QuotaKind, int]]:
    """By project id, of the kinds of STORED. Without `with_rows` a statement less."""
    copies = copies_against_quota(session, context, project_ids)
    stored = {each: {QuotaKind.BYTES: of.bytes, QuotaKind.OBJECTS: of.copies} for each, of in copies.items()}
    if with_rows:
        for each, entries in list_entries(session, project_ids).items():
            stored[each][QuotaKind.ROWS] = copies[each].copies + entries
    return stored


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
    *,
    stored_bytes: Sequence[int],
    references: int,
    before: int,
) -> None:
    """Called under `lock_quotas`' lock, when the wanted copies have their rows. `stored_bytes`: of each of these.
    `references`: how many chunks are referred to anew; `before`: by earlier calls of the same shards. A seal makes
    entries of its list of them, and is not refused: what others have negotiated and not sealed is not in the sum.
    Raises `quota_exceeded` with what is left."""
    used = stored_against_quota(session, context, [project.id], with_rows=QuotaKind.ROWS in quotas)[project.id]
    made = {QuotaKind.BYTES: sum(stored_bytes), QuotaKind.OBJECTS: len(stored_bytes), QuotaKind.ROWS: len(stored_bytes)}
    wanted = made | {QuotaKind.ROWS: len(stored_bytes) + references}
    to_come = {QuotaKind.ROWS: before}
    for kind, quota in quotas.items():
        _refuse(project, kind, quota, used[kind] - made[kind] + to_come.get(kind, 0), wanted[kind])


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
