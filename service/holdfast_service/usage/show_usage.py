"""The figures of projects and runs, each by itself (`copies/stored_bytes.py` says which add up)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.states import CheckpointState, StoreRole
from holdfast_protocol.stores import StoreSweep
from holdfast_protocol.usage import StoreBytes, UsageView
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.stored_bytes import CommittedBytes, CountedBytes, KeptFor, committed_bytes, count_bytes
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Project, Run, Store
from holdfast_service.db.tables.operations import StoreMaintenance
from holdfast_service.runs.views import page_of_projects, project_named, run_named

_CURSOR = "usage"


@dataclass(frozen=True)
class _Orphans:
    bytes: int
    swept_at: datetime


def list_usage(context: ServiceContext, caller: Principal, *, cursor: str | None, limit: int) -> Page[UsageView]:
    """The usage of projects, by name."""
    with context.database.read() as session:
        rows, next_cursor = page_of_projects(session, caller, _CURSOR, cursor, limit, deleted=None)
        return Page(items=[_of_project(session, context, project) for project in rows], next_cursor=next_cursor)


def show_usage(context: ServiceContext, caller: Principal, project: str, run: str | None = None) -> UsageView:
    """Raises `forbidden`, `project_not_found` and `run_not_found`."""
    with context.database.read() as session:
        if run is None:
            return _of_project(session, context, project_named(session, caller, project, deleted=True))
        owner, found = run_named(session, caller, project, run, deleted=True)
        return _of_run(session, context, owner, found)


def _of_project(session: Session, context: ServiceContext, project: Project) -> UsageView:
    counted = count_bytes(session, project_id=project.id)
    committed = committed_bytes(session, [project.id])[project.id]
    return _view(session, context, project.name, None, counted, committed, _orphans(session, project.name))


def _of_run(session: Session, context: ServiceContext, project: Project, run: Run) -> UsageView:
    counted = count_bytes(session, project_id=project.id, run_id=run.id)
    logical, deduplicated = session.execute(
        select(func.sum(Checkpoint.logical_bytes), func.sum(Checkpoint.deduplicated_bytes)).where(
            Checkpoint.run_id == run.id, Checkpoint.state == CheckpointState.COMMITTED
        )
    ).one()
    committed = CommittedBytes(int(logical or 0), int(deduplicated or 0))
    return _view(session, context, project.name, run.name, counted, committed, None)


def _view(  # noqa: PLR0917 (the parts of one reply)
    session: Session,
    context: ServiceContext,
    project: str,
    run: str | None,
    counted: list[CountedBytes],
    committed: CommittedBytes,
    orphans: _Orphans | None,
) -> UsageView:
    stores = list(_by_store(session, context, counted))
    return UsageView(
        project=project,
        run=run,
        at=database_now(session),
        logical_bytes=committed.logical,
        deduplicated_bytes=committed.deduplicated,
        stored_bytes=sum(one.stored_bytes for one in stores),
        committed_bytes=sum(one.committed_bytes for one in stores),
        arriving_bytes=sum(one.arriving_bytes for one in stores),
        trashed_bytes=sum(one.trashed_bytes for one in stores),
        pending_collection_bytes=sum(one.pending_collection_bytes for one in stores),
        pinned_bytes=sum(one.pinned_bytes for one in stores),
        held_bytes=sum(one.held_bytes for one in stores),
        orphaned_bytes=None if orphans is None else orphans.bytes,
        swept_at=None if orphans is None else orphans.swept_at,
        stores=stores,
    )


def _by_store(session: Session, context: ServiceContext, counted: list[CountedBytes]) -> Iterable[StoreBytes]:
    rows = {row.id: row for row in session.scalars(select(Store))}
    roles: Mapping[int, StoreRole] = {attached.store_id: attached.role for attached in context.stores}
    groups: defaultdict[tuple[int, str, str], list[CountedBytes]] = defaultdict(list)
    for each in counted:
        groups[each.store_id, each.storage_class or "", each.tier.value].append(each)
    for (store_id, _, _), parts in sorted(groups.items()):
        size = {kind: sum(part.bytes for part in parts if part.kept_for is kind) for kind in KeptFor}
        yield StoreBytes(
            store=roles.get(store_id),
            store_url=rows[store_id].url,
            store_kind=rows[store_id].kind,
            storage_class=parts[0].storage_class,
            tier=parts[0].tier,
            copies=sum(part.copies for part in parts),
            committed_bytes=size[KeptFor.COMMITTED],
            arriving_bytes=size[KeptFor.ARRIVING],
            trashed_bytes=size[KeptFor.TRASHED],
            pending_collection_bytes=size[KeptFor.PENDING_COLLECTION],
            stored_bytes=sum(size.values()),
            pinned_bytes=sum(part.pinned_bytes for part in parts),
            held_bytes=sum(part.held_bytes for part in parts),
        )


def _orphans(session: Session, project: str) -> _Orphans | None:
    """What the last sweep of each store found of this project and left there."""
    found = [
        StoreSweep.model_validate(sweep)
        for sweep in session.scalars(select(StoreMaintenance.sweep).where(StoreMaintenance.sweep.is_not(None)))
        if sweep is not None
    ]
    if not found:
        return None
    swept = [one for sweep in found for one in sweep.projects if one.project == project]
    size = sum(one.orphan_bytes - one.deleted_bytes for one in swept)
    return _Orphans(size, min(sweep.swept_at for sweep in found))
