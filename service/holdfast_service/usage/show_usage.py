"""The figures of projects and runs, each by itself (`copies/stored_bytes.py` says which add up). Those of projects are
kept (`tallies/`); those of one run are counted from its rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.states import StoreRole
from holdfast_protocol.usage import StoreBytes, UsageView
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.stored_bytes import CountedBytes, KeptFor, count_bytes, sweeps_of
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Project, Run, Store
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


def usage_of_projects(
    session: Session, context: ServiceContext, projects: Sequence[Project], *, orphans: bool = True
) -> list[UsageView]:
    """The same few statements for however many projects. Without `orphans` the sweeps of stores, which list all
    projects, are not read, and their figures are null."""
    ids = [project.id for project in projects]
    # Before the bytes: what is taken up in between is in them.
    until = counted_until(session)
    committed = sums_of_projects(session, ids)
    counted: defaultdict[str, list[CountedBytes]] = defaultdict(list)
    for each in counted_bytes(session, ids):
        counted[each.project_id].append(each)
    shared = _Shared.read(session, context, until)
    found = _orphans(session, context, [project.name for project in projects]) if orphans else {}
    return [
        _view(shared, project.name, None, counted[project.id], committed[project.id], found.get(project.name))
        for project in projects
    ]


def _of_run(session: Session, context: ServiceContext, project: Project, run: Run) -> UsageView:
    """Counted, and as of now: what a run uses, others may use too."""
    counted = count_bytes(session, run.id)
    committed = sums_of_runs(session, project.id, [run.id])[run.id]
    shared = _Shared.read(session, context, database_now(session))
    return _view(shared, project.name, run.name, counted, committed, None)


@dataclass(frozen=True)
class _Shared:
    """What all views of a reply have in common."""

    at: datetime
    counted_until: datetime | None
    stores: Mapping[int, Store]
    roles: Mapping[int, StoreRole]

    @classmethod
    def read(cls, session: Session, context: ServiceContext, counted_until: datetime | None) -> _Shared:
        return cls(
            at=database_now(session),
            counted_until=counted_until,
            stores={row.id: row for row in session.scalars(select(Store))},
            roles={attached.store_id: attached.role for attached in context.stores},
        )


def _view(  # noqa: PLR0917 (the parts of one reply)
    shared: _Shared,
    project: str,
    run: str | None,
    counted: list[CountedBytes],
    committed: Sums,
    orphans: _Orphans | None,
) -> UsageView:
    stores = list(_by_store(shared, counted))
    return UsageView(
        project=project,
        run=run,
        at=shared.at,
        counted_until=shared.counted_until,
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


def _by_store(shared: _Shared, counted: list[CountedBytes]) -> Iterable[StoreBytes]:
    groups: defaultdict[tuple[int, str, str], list[CountedBytes]] = defaultdict(list)
    for each in counted:
        groups[each.store_id, each.storage_class or "", each.tier.value].append(each)
    for (store_id, _, _), parts in sorted(groups.items()):
        size = {kind: sum(part.bytes for part in parts if part.kept_for is kind) for kind in KeptFor}
        yield StoreBytes(
            store=shared.roles.get(store_id),
            store_url=shared.stores[store_id].url,
            store_kind=shared.stores[store_id].kind,
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


def _orphans(session: Session, context: ServiceContext, projects: Sequence[str]) -> dict[str, _Orphans]:
    """By project, what the last sweep of each store found of it and left there; empty before any sweep."""
    found = sweeps_of(session, context)
    if not found:
        return {}
    size: Counter[str] = Counter()
    for sweep in found:
        for one in sweep.projects:
            size[one.project] += one.orphan_bytes - one.deleted_bytes
    swept_at = min(sweep.swept_at for sweep in found)
    return {project: _Orphans(size[project], swept_at) for project in projects}
