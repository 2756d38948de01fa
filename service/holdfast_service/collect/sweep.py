"""The sweep of one store: its listing against the catalog, orphans deleted, missing objects handed over.

1. list      every project, wholly: any error ends the sweep, for what is not listed looks missing or deletable
2. wait      an orphan goes only when every URL's life is over, by the clock that dated it (protocol rule 25)
3. stop      if the store has newer records than the catalog; and, unless forced, if that is more than the set share
             of the store or of a project (breaker.py)
4. delete    batch by batch: the store says again that it is ours, the catalog is asked again, the exact object goes

Nothing can come to need an orphan: generations are random and never used again, a copy's row is there before its first
ticket, and only a rebuilt catalog takes over what is in a store, in an epoch of its own, which step 4 notices. Asking
again in step 4 is for whatever else may write rows.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import structlog
from sqlalchemy import select

from holdfast_protocol.collection import ProjectSweep, StoreSweep
from holdfast_protocol.problems import ProblemCode
from holdfast_service.attached_store import AttachedStore
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.tables import Project
from holdfast_service.clock import database_now
from holdfast_service.collect.breaker import Amount, why_stop
from holdfast_service.collect.listing import Inventory, find_missing, make_suspect, take_inventory, unknown_of
from holdfast_service.collect.ready import why_not
from holdfast_service.collect.sweep_lease import SweepLease
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import MountedStore, StoredObject, StoreRefused

_DELETE_BATCH = 100

_log = structlog.get_logger("holdfast.sweep")


@dataclass
class _Findings:
    """Of one store, as far as it is known; `projects` and `deleted` by project id. `due` are the orphans that are old
    enough."""

    projects: dict[str, ProjectSweep] = field(default_factory=dict)
    due: list[StoredObject] = field(default_factory=list)
    stopped: str | None = None
    deleted: dict[str, Amount] = field(default_factory=lambda: defaultdict(Amount))
    kept: int = 0


def sweep_store(
    context: ServiceContext,
    attached: AttachedStore,
    *,
    dry_run: bool,
    force: bool,
    actor: Actor,
    on_listed: Callable[[int], object] = lambda _: None,
) -> StoreSweep:
    """Raises `store_foreign`, `busy` while another sweep of it is under way, and StoreError, and then has deleted
    nothing but what it was sure of. `on_listed` is told how many objects were looked at, and may raise to end it."""
    _refuse_foreign(context, attached)
    with SweepLease(context, attached) as lease:

        def looked_at(objects: int) -> None:
            lease.renew()
            on_listed(objects)

        findings = _look(context, attached, looked_at, dry_run=dry_run)
        if force:
            findings.stopped = None
        findings.stopped = _why_older(attached, findings) or findings.stopped
        if not dry_run and findings.stopped is None:
            _delete(context, attached, findings, looked_at)
            _sweep_incoming(context, attached)
        report = _report(context, attached, findings, dry_run=dry_run)
        _settle(context, lease, report, actor, force=force)
    return report


def _look(
    context: ServiceContext, attached: AttachedStore, on_listed: Callable[[int], object], *, dry_run: bool
) -> _Findings:
    with context.database.read() as session:
        projects = session.execute(select(Project.id, Project.name).order_by(Project.id)).all()
        began_at = database_now(session)
    settings = context.settings
    # What came after this is young for certain.
    oldest = attached.store.clock() - timedelta(seconds=settings.ticket_seconds + settings.longest_upload_seconds)
    findings, there, stops = _Findings(), Amount(), []
    for project_id, name in projects:
        inventory = take_inventory(context, attached, project_id, on_listed)
        due = [each for each in inventory.orphans if each.modified_at < oldest]
        findings.due += due
        there = Amount(there.objects + inventory.there.objects, there.bytes + inventory.there.bytes)
        stops.append(why_stop(f"the project {name}", inventory.there, _amount(due), settings.sweep_most_percent))
        missing = _missing(context, attached, project_id, inventory, began_at, dry_run=dry_run)
        findings.projects[project_id] = _project(name, inventory, missing)
        on_listed(0)
    whole = f"the {attached.role.value} store"
    stops.append(why_stop(whole, there, _amount(findings.due), settings.sweep_most_percent))
    findings.stopped = next((stop for stop in reversed(stops) if stop is not None), None)
    return findings


def _missing(
    context: ServiceContext,
    attached: AttachedStore,
    project_id: str,
    inventory: Inventory,
    began_at: datetime,
    *,
    dry_run: bool,
) -> int:
    found = 0
    for copy_ids in find_missing(context, attached, project_id, inventory, began_at):
        found += len(copy_ids) if dry_run else make_suspect(context, copy_ids)
    return found


def _why_older(attached: AttachedStore, findings: _Findings) -> str | None:
    """What looks like an orphan belongs to somebody whom a catalog from an older state does not know. Nobody's force
    helps: it is said of too many orphans, and not of these."""
    why = attached.watch.newer_records.problem(sorted({each.key.project_id for each in findings.due}))
    return None if why is None else f"Nothing is deleted from the {attached.role.value} store: {why}"


def _delete(
    context: ServiceContext, attached: AttachedStore, findings: _Findings, on_listed: Callable[[int], object]
) -> None:
    for batch in _batches(findings.due):
        _refuse_foreign(context, attached)
        unknown = unknown_of(context, attached.store_id, batch)
        findings.kept += len(batch) - len(unknown)
        for each in unknown:
            try:
                attached.store.delete(each.key)
            except StoreRefused as error:
                findings.kept += 1
                _log.warning("orphan_kept", store=attached.role.value, path=each.key.path, reason=str(error))
                continue
            before = findings.deleted[each.key.project_id]
            findings.deleted[each.key.project_id] = Amount(before.objects + 1, before.bytes + each.bytes)
        on_listed(0)


def _batches(due: Sequence[StoredObject]) -> Iterator[list[StoredObject]]:
    """Each of one project, as the catalog is asked."""
    for _, group in itertools.groupby(due, key=lambda each: each.key.project_id):
        while batch := list(itertools.islice(group, _DELETE_BATCH)):
            yield batch


def _sweep_incoming(context: ServiceContext, attached: AttachedStore) -> None:
    if isinstance(attached.store, MountedStore):
        settings = context.settings
        attached.store.sweep_incoming(older_than_seconds=settings.ticket_seconds + settings.longest_upload_seconds)


def _refuse_foreign(context: ServiceContext, attached: AttachedStore) -> None:
    why = why_not(context, attached)
    if why is not None:
        raise ProblemError(
            ProblemCode.STORE_FOREIGN, f"The {attached.role.value} store cannot be swept: {why}", store=attached.role
        )


def _report(context: ServiceContext, attached: AttachedStore, findings: _Findings, *, dry_run: bool) -> StoreSweep:
    with context.database.read() as session:
        swept_at = database_now(session)
    due = _amount(findings.due)
    projects = []
    for project_id, found in findings.projects.items():
        gone = findings.deleted[project_id]
        projects.append(found.model_copy(update={"deleted": gone.objects, "deleted_bytes": gone.bytes}))
    return StoreSweep(
        store=attached.role,
        swept_at=swept_at,
        dry_run=dry_run,
        projects=projects,
        due_orphans=due.objects,
        due_bytes=due.bytes,
        deleted=sum(one.deleted for one in projects),
        deleted_bytes=sum(one.deleted_bytes for one in projects),
        kept=findings.kept,
        stopped=findings.stopped,
    )


def _settle(context: ServiceContext, lease: SweepLease, report: StoreSweep, actor: Actor, *, force: bool) -> None:
    document = report.model_dump(mode="json")
    with context.database.transaction() as session:
        if not report.dry_run:
            lease.settle(session, document)
        if report.deleted or report.stopped or any(one.missing for one in report.projects):
            after = {name: document[name] for name in ("store", "dry_run", "due_orphans", "deleted", "deleted_bytes")}
            record_event(session, actor, "store.sweep", reason=report.stopped, after=after | {"forced": force})


def _amount(objects: Sequence[StoredObject]) -> Amount:
    return Amount(len(objects), sum(each.bytes for each in objects))


def _project(name: str, inventory: Inventory, missing: int) -> ProjectSweep:
    orphans = _amount(inventory.orphans)
    return ProjectSweep(
        project=name,
        objects=inventory.there.objects,
        bytes=inventory.there.bytes,
        orphans=orphans.objects,
        orphan_bytes=orphans.bytes,
        deleted=0,
        deleted_bytes=0,
        missing=missing,
    )
