"""The figures of projects and runs, each by itself (`copies/stored_bytes.py` says which add up). Those of projects are
kept (`tallies/`); those of one run are counted from its rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.states import StoreRole
from holdfast_protocol.stores import StoreSweep
from holdfast_protocol.usage import StoreBytes, UsageView
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.stored_bytes import CountedBytes, KeptFor, count_bytes
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Project, Run, Store
from holdfast_service.db.tables.operations import StoreMaintenance
from holdfast_service.runs.views import page_of_projects, project_named, run_named
from holdfast_service.tallies.sums import Sums, counted_bytes, counted_until, sums_of_projects, sums_of_runs

_CURSOR = "usage"


@dataclass(frozen=True)
class _Orphans:
    bytes: int
    swept_at: datetime


def list_usage(context: ServiceContext, caller: Principal, *, cursor: str | None, limit: int) -> Page[UsageView]:
    """The usage of projects, by name."""
    with context.database.read() as session:
        rows, next_cursor = page_of_projects(session, caller, _CURSOR, cursor, limit, deleted=None)
        return Page(items=usage_of_projects(session, context, rows), next_cursor=next_cursor)


def show_usage(context: ServiceContext, caller: Principal, project: str, run: str | None = None) -> UsageView:
    """Raises `forbidden`, `project_not_found` and `run_not_found`."""
    with context.database.read() as session:
        if run is None:
            return usage_of_projects(session, context, [project_named(session, caller, project, deleted=True)])[0]
        owner, found = run_named(session, caller, project, run, deleted=True)
        return _of_run(session, context, owner, found)


def usage_of_projects(session: Session, context: ServiceContext, projects: Sequence[Project]) -> list[UsageView]:
    ids = [project.id for project in projects]
    # Before the bytes: what is taken up in between is in them.
    until = counted_until(session)
    committed = sums_of_projects(session, ids)
    counted: defaultdict[str, list[CountedBytes]] = defaultdict(list)
    for each in counted_bytes(session, ids):
        counted[each.project_id].append(each)
    return [
        _view(session, context, project.name, None, counted[project.id], committed[project.id], until)
        for project in projects
    ]


def _of_run(session: Session, context: ServiceContext, project: Project, run: Run) -> UsageView:
    """Counted, and as of now: what a run uses, others may use too."""
    counted = count_bytes(session, run.id)
    committed = sums_of_runs(session, project.id, [run.id])[run.id]
    return _view(session, context, project.name, run.name, counted, committed, database_now(session))


def _view(  # noqa: PLR0917 (the parts of one reply)
    session: Session,
    context: ServiceContext,
    project: str,
    run: str | None,
    counted: list[CountedBytes],
    committed: Sums,
    until: datetime | None,
) -> UsageView:
    orphans = _orphans(session, project) if run is None else None
    stores = list(_by_store(session, context, counted))
    return UsageView(
        project=project,
        run=run,
        at=database_now(session),
        counted_until=until,
        logical_bytes=committed.logical_bytes,
        deduplicated_bytes=committed.deduplicated_bytes,
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
