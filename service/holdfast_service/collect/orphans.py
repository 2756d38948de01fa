"""The sweep of one store: its listing against the catalog, orphans deleted, missing objects handed over.

1. list      every project, wholly: any error ends the sweep, for what is not listed looks missing or deletable
2. wait      an orphan goes only when every URL's life is over, by the clock that dated it (rule late-put-window)
3. take back what a checkpoint needs and no store has a good copy of (needed_objects.py)
4. stop      if the store has newer records than the catalog; and, unless forced, if that is more than the set share
             of the store or of a project, or if they are more likely another's (doubtful_orphans.py)
5. delete    batch by batch: the store says again that it is ours, the catalog is asked again, the exact object goes

Nothing can come to need an orphan: generations are random and never used again, a copy's row is there before its
first ticket, and only a rebuilt catalog takes over what is in a store, in an epoch of its own, which step 5 notices.
Only a database that was restored may need one already. Asking again in step 5 is for whatever else may write rows, and
for what this sweep has found missing itself.

The pass of the controller `sweep` is at the end.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, NamedTuple

import structlog
from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CopyState
from holdfast_protocol.stores import ProjectSweep, StoreSweep
from holdfast_protocol.text import without_secrets
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.collect.doubtful_orphans import why_anothers, why_unknown
from holdfast_service.collect.garbage import why_not
from holdfast_service.collect.needed_objects import needed_among, take_back
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import object_key
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.tables.core import Chunk, Copy, Project
from holdfast_service.db.tables.operations import StoreMaintenance
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import MountedStore, ObjectKey, ObjectMissing, StoredObject, StoreError, StoreRefused
from holdfast_service.work.report import Backlog, ReconcileReport

# When a sweep must not delete: what looks like very many orphans is more likely a catalog that has lost rows. Pure.

_FLOOR_OBJECTS = 20
_FLOOR_BYTES = 1024**3


class Amount(NamedTuple):
    objects: int = 0
    bytes: int = 0


def why_stop(whose: str, there: Amount, due: Amount, most_percent: float) -> str | None:
    """A sentence if `due` is more than the set share of what is `there`, by number or by bytes; else None. Below the
    floors it always goes: of a tiny store any orphan is a large share."""
    share = most_percent / 100
    many = due.objects > max(_FLOOR_OBJECTS, share * there.objects)
    large = due.bytes > max(_FLOOR_BYTES, share * there.bytes)
    if not many and not large:
        return None
    return (
        f"{due.objects} of {there.objects} objects ({due.bytes} of {there.bytes} bytes) of {whose} are orphans, more "
        f"than {most_percent:g} %, so nothing was deleted. See with `holdfast catalog check` whether the catalog "
        "has lost rows; if no catalog owns them, an administrator may sweep with --force."
    )


# What is in a store of one project, compared with the catalog, both ways.
#
# The order is the guard: first the object is listed, and the catalog is asked afterwards. A copy's row is committed
# before its first ticket is handed out, and stays until its last PUT can no longer land; so an object whose row is not
# there after it was seen has none. The other way round, a row is only called missing if it was verified before the
# listing began and the store says of this very object that it is not there.

BATCH = 1000
_EXPECTED = (CopyState.VERIFIED, CopyState.COLD)


class SeenCopies:
    """The copies of a store whose objects were listed: a bit for each row up to the newest one at the beginning."""

    def __init__(self, newest: int) -> None:
        self._bits = bytearray(newest // 8 + 1)

    def add(self, copy_id: int) -> None:
        if copy_id // 8 < len(self._bits):
            self._bits[copy_id // 8] |= 1 << copy_id % 8

    def __contains__(self, copy_id: int) -> bool:
        return copy_id // 8 < len(self._bits) and bool(self._bits[copy_id // 8] & 1 << copy_id % 8)


@dataclass
class Inventory:
    there: Amount = field(default_factory=Amount)
    orphans: list[StoredObject] = field(default_factory=list)


def take_inventory(
    context: ServiceContext,
    attached: AttachedStore,
    project_id: str,
    seen: SeenCopies,
    on_listed: Callable[[int], object],
) -> Inventory:
    """Raises StoreError: a listing that is not whole proves nothing."""
    inventory = Inventory()
    listed = attached.store.list_objects(project_id)
    while batch := list(itertools.islice(listed, BATCH)):
        inventory.there = Amount(
            inventory.there.objects + len(batch), inventory.there.bytes + sum(each.bytes for each in batch)
        )
        inventory.orphans += unknown_of(context, attached.store_id, batch, seen)
        on_listed(len(batch))
    return inventory


def unknown_of(
    context: ServiceContext, store_id: int, objects: Sequence[StoredObject], seen: SeenCopies | None = None
) -> list[StoredObject]:
    """Those of the objects, of one project, that have no row at this moment; the rows of the others are `seen`. A row
    that says `gone` is none: what is there nevertheless came later than everybody could expect."""
    if not objects:
        return []
    with context.database.read() as session:
        rows = session.execute(
            select(Copy.id, Chunk.digest, Copy.generation)
            .join(Copy, Copy.chunk_id == Chunk.id)
            .where(
                Chunk.project_id == objects[0].key.project_id,
                Chunk.digest.in_({each.key.digest for each in objects}),
                Copy.store_id == store_id,
                Copy.state != CopyState.GONE,
            )
        )
        known = {(row.digest, row.generation): row.id for row in rows}
    unknown = []
    for each in objects:
        copy_id = known.get((each.key.digest, each.key.generation))
        if copy_id is None:
            unknown.append(each)
        elif seen is not None:
            seen.add(copy_id)
    return unknown


def find_missing(
    context: ServiceContext, attached: AttachedStore, seen: SeenCopies, began_at: datetime
) -> Iterator[dict[int, str]]:
    """Copies whose object the store does not have, batch by batch: their ids, and the projects of these. One walk over
    the store's rows for all projects. Raises StoreError."""
    after = 0
    while True:
        with context.database.read() as session:
            ids = session.scalars(
                select(Copy.id)
                .where(
                    Copy.store_id == attached.store_id,
                    Copy.state.in_(_EXPECTED),
                    Copy.verified_at < began_at,
                    Copy.id > after,
                )
                .order_by(Copy.id)
                .limit(BATCH)
            ).all()
            unseen = [copy_id for copy_id in ids if copy_id not in seen]
            rows = session.execute(
                select(Copy, Chunk.digest).join(Chunk, Chunk.id == Copy.chunk_id).where(Copy.id.in_(unseen))
            ).all()
        yield {
            row.Copy.id: row.Copy.project_id
            for row in rows
            if _is_missing(attached, object_key(row.Copy.project_id, row.digest, row.Copy))
        }
        if len(ids) < BATCH:
            return
        after = ids[-1]


def make_suspect(context: ServiceContext, copy_ids: Sequence[int]) -> set[int]:
    """Hands them over to those who read copies again and mark what is lost. Which of them."""
    if not copy_ids:
        return set()
    with context.database.transaction() as session:
        changed = session.scalars(
            update(Copy)
            .where(Copy.id.in_(copy_ids), Copy.state.in_(_EXPECTED))
            .values(state=CopyState.SUSPECT, **lease.ended())
            .returning(Copy.id),
            execution_options={"synchronize_session": False},
        )
        return set(changed)


def _is_missing(attached: AttachedStore, key: ObjectKey) -> bool:
    try:
        attached.store.head(key)
    except ObjectMissing:
        return True
    return False


# One sweep of a store at a time: a second one would list it for nothing. It is no guard of what is deleted; two that
# overlap after a hang delete the same objects.

_UNSYNCHRONIZED = {"synchronize_session": False}


class SweepLease:
    """A context manager. Entering raises `busy`; `renew` does as well once another process has it."""

    def __init__(self, context: ServiceContext, attached: AttachedStore) -> None:
        self._context = context
        self._attached = attached
        self._token: str | None = None
        self._seconds = context.settings.lease_seconds
        self._renewed_at = float("-inf")

    def __enter__(self) -> SweepLease:
        with self._context.database.transaction() as session:
            insert_absent(session, StoreMaintenance, [{"store_id": self._attached.store_id}])
            self._token = lease.claim(session, StoreMaintenance, self._mine, seconds=self._seconds)
        if self._token is None:
            raise self._busy()
        self._renewed_at = time.monotonic()
        return self

    def renew(self) -> None:
        """Between two steps; it writes only now and then."""
        if time.monotonic() - self._renewed_at < self._seconds / 4:
            return
        with self._context.database.transaction() as session:
            if not lease.renew(session, StoreMaintenance, str(self._token), self._mine, seconds=self._seconds):
                raise self._busy()
        self._renewed_at = time.monotonic()

    def settle(self, session: Session, sweep: dict[str, Any]) -> None:
        session.execute(
            update(StoreMaintenance)
            .where(StoreMaintenance.store_id == self._attached.store_id)
            .values(swept_at=database_now(session), sweep=sweep),
            execution_options=_UNSYNCHRONIZED,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._context.database.transaction() as session:
            lease.give_back(session, StoreMaintenance, str(self._token), self._mine)

    @property
    def _mine(self) -> ColumnElement[bool]:
        return StoreMaintenance.store_id == self._attached.store_id

    def _busy(self) -> ProblemError:
        return ProblemError(
            ProblemCode.BUSY,
            f"The {self._attached.role.value} store is being swept by another process. Wait until it is done.",
        )


_DELETE_BATCH = 100

_log = structlog.get_logger("holdfast.sweep")


@dataclass
class _Findings:
    """Of one store, as far as it is known; `projects` and `deleted` by project id. `due` are the orphans that are old
    enough, without those that are `needed`."""

    projects: dict[str, ProjectSweep] = field(default_factory=dict)
    due: list[StoredObject] = field(default_factory=list)
    needed: list[StoredObject] = field(default_factory=list)
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
    nothing but what it was sure of, and has said so in the audit. `on_listed` is told how many objects were looked at,
    and may raise to end it."""
    _refuse_foreign(context, attached)
    with SweepLease(context, attached) as held:

        def looked_at(objects: int) -> None:
            held.renew()
            on_listed(objects)

        findings = _look(context, attached, looked_at, dry_run=dry_run)
        if force:
            findings.stopped = None
        findings.stopped = _why_older(attached, findings) or findings.stopped
        if not dry_run:
            _take_back(context, attached, findings, actor, looked_at)
        if not dry_run and findings.stopped is None:
            try:
                _delete(context, attached, findings, looked_at)
            except Exception as error:
                _tell_cut_off(context, attached, findings, actor, error, force=force)
                raise
            _sweep_incoming(context, attached)
        report = _report(context, attached, findings, dry_run=dry_run)
        _settle(context, held, report, actor, force=force)
    return report


def _look(
    context: ServiceContext, attached: AttachedStore, on_listed: Callable[[int], object], *, dry_run: bool
) -> _Findings:
    with context.database.read() as session:
        projects = session.execute(select(Project.id, Project.name).order_by(Project.id)).all()
        began_at = database_now(session)
        # Later than that moment: what was verified before it is not newer.
        newest = session.scalar(select(func.max(Copy.id)).where(Copy.store_id == attached.store_id)) or 0
    settings, now = context.settings, attached.store.clock()
    # What came after this is young for certain.
    oldest = now - timedelta(seconds=settings.ticket_seconds + settings.longest_upload_seconds)
    findings, there, stops = _Findings(), Amount(), []
    latest: list[StoredObject] = []
    seen = SeenCopies(newest)
    for project_id, name in projects:
        inventory = take_inventory(context, attached, project_id, seen, on_listed)
        old = [each for each in inventory.orphans if each.modified_at < oldest]
        needed, due = _apart(context, old, on_listed)
        # What is dated later than now a clock has dated that was ahead. It says nothing of when it was written.
        young = (each for each in inventory.orphans if oldest <= each.modified_at <= now)
        latest = heapq.nlargest(1, itertools.chain(latest, due, young), key=lambda each: each.modified_at)
        findings.needed += needed
        findings.due += due
        there = Amount(there.objects + inventory.there.objects, there.bytes + inventory.there.bytes)
        stops.append(why_stop(f"the project {name}", inventory.there, _amount(due), settings.sweep_most_percent))
        findings.projects[project_id] = _project(name, inventory)
    for missing in find_missing(context, attached, seen, began_at):
        changed = set(missing) if dry_run else make_suspect(context, list(missing))
        for project_id, copies in Counter(missing[copy_id] for copy_id in changed).items():
            found = findings.projects[project_id]
            findings.projects[project_id] = found.model_copy(update={"missing": found.missing + copies})
        on_listed(0)
    whole = f"the {attached.role.value} store"
    stops.append(why_stop(whole, there, _amount(findings.due), settings.sweep_most_percent))
    stops.append(why_unknown(context, {each.key.project_id for each in findings.due}))
    stops.append(why_anothers(context, latest))
    findings.stopped = next((stop for stop in reversed(stops) if stop is not None), None)
    return findings


def _apart(
    context: ServiceContext, orphans: Sequence[StoredObject], on_listed: Callable[[int], object]
) -> tuple[list[StoredObject], list[StoredObject]]:
    """Those that a checkpoint needs, and the others."""
    needed: list[StoredObject] = []
    for batch in _batches(orphans):
        needed += needed_among(context, batch)
        on_listed(0)
    keys = {each.key for each in needed}
    return needed, [each for each in orphans if each.key not in keys]


def _take_back(
    context: ServiceContext,
    attached: AttachedStore,
    findings: _Findings,
    actor: Actor,
    on_listed: Callable[[int], object],
) -> None:
    for batch in _batches(findings.needed):
        taken = take_back(context, attached.store_id, batch, actor)
        _log.warning("needed_objects_taken_back", store=attached.role.value, objects=len(batch), copies=taken)
        on_listed(0)


def _why_older(attached: AttachedStore, findings: _Findings) -> str | None:
    """What looks like an orphan may belong to a job that a catalog from an older state does not know. No force
    helps: it is said of too many orphans, and not of these."""
    why = attached.watch.newer_records.problem(sorted({each.key.project_id for each in findings.due}))
    return None if why is None else f"Nothing is deleted from the {attached.role.value} store: {why}"


def _delete(
    context: ServiceContext, attached: AttachedStore, findings: _Findings, on_listed: Callable[[int], object]
) -> None:
    for batch in _batches(findings.due):
        _refuse_foreign(context, attached)
        unknown = unknown_of(context, attached.store_id, batch)
        needed = {each.key for each in needed_among(context, unknown)}
        orphans = [each for each in unknown if each.key not in needed]
        findings.kept += len(batch) - len(orphans)
        for each in orphans:
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


def _settle(context: ServiceContext, held: SweepLease, report: StoreSweep, actor: Actor, *, force: bool) -> None:
    document = report.model_dump(mode="json")
    with context.database.transaction() as session:
        if not report.dry_run:
            held.settle(session, document)
        if report.deleted or report.stopped or any(one.missing for one in report.projects):
            after = {name: document[name] for name in ("store", "dry_run", "due_orphans", "deleted", "deleted_bytes")}
            record_event(session, actor, "store.sweep", reason=report.stopped, after=after | {"forced": force})


def _tell_cut_off(
    context: ServiceContext,
    attached: AttachedStore,
    findings: _Findings,
    actor: Actor,
    error: Exception,
    *,
    force: bool,
) -> None:
    """A sweep that ends in the middle has no report, and what it has deleted is gone all the same."""
    gone = findings.deleted.values()
    if not gone:
        return
    why = f" {without_secrets(str(error))}" if str(error) else ""
    after = {
        "store": attached.role.value,
        "dry_run": False,
        "due_orphans": len(findings.due),
        "deleted": sum(each.objects for each in gone),
        "deleted_bytes": sum(each.bytes for each in gone),
        "forced": force,
    }
    with context.database.transaction() as session:
        record_event(session, actor, "store.sweep", reason=f"It ended before all of them were gone.{why}", after=after)


def _amount(objects: Sequence[StoredObject]) -> Amount:
    return Amount(len(objects), sum(each.bytes for each in objects))


def _project(name: str, inventory: Inventory) -> ProjectSweep:
    orphans = _amount(inventory.orphans)
    return ProjectSweep(
        project=name,
        objects=inventory.there.objects,
        bytes=inventory.there.bytes,
        orphans=orphans.objects,
        orphan_bytes=orphans.bytes,
        deleted=0,
        deleted_bytes=0,
        missing=0,
    )


# The pass that sweeps each store once in HOLDFAST_SWEEP_INTERVAL_SECONDS. A person may do so at any time.

_ACTOR = Actor.controller("sweep")


@dataclass(frozen=True, kw_only=True)
class SweepPass(ReconcileReport):
    """`done`: stores that were swept; `deleted` orphans; `missing` objects, handed over."""

    deleted: int = 0
    deleted_bytes: int = 0
    missing: int = 0


class _ProcessEndsError(Exception):
    """This process was asked to end in the middle of a listing."""


def reconcile(context: ServiceContext) -> SweepPass:
    """An outage of one store keeps no other from being swept."""
    with context.database.read() as session:
        due = _due(session, context)
    done = failed = deleted = size = missing = 0
    error: str | None = None
    for attached in due:
        try:
            report = sweep_store(
                context,
                attached,
                dry_run=False,
                force=False,
                actor=_ACTOR,
                on_listed=lambda _: _end_if_asked(context),
            )
        except _ProcessEndsError:
            break
        except (ProblemError, StoreError) as problem:
            if isinstance(problem, ProblemError) and problem.code is ProblemCode.BUSY:
                continue
            failed, error = failed + 1, f"{attached.role.value} store: {problem}"
            continue
        done, deleted, size = done + 1, deleted + report.deleted, size + report.deleted_bytes
        missing += sum(one.missing for one in report.projects)
        error = report.stopped or error
    return SweepPass(done=done, failed=failed, error=error, deleted=deleted, deleted_bytes=size, missing=missing)


def backlog(session: Session, context: ServiceContext) -> Backlog:
    return Backlog(due=len(_due(session, context)))


def _due(session: Session, context: ServiceContext) -> list[AttachedStore]:
    before = database_now(session) - timedelta(seconds=context.settings.sweep_interval_seconds)
    swept = set(
        session.scalars(
            select(StoreMaintenance.store_id).where(
                StoreMaintenance.store_id.in_(context.store_ids), StoreMaintenance.swept_at > before
            )
        )
    )
    return [attached for attached in context.stores if attached.store_id not in swept]


def _end_if_asked(context: ServiceContext) -> None:
    if context.stopping.is_set():
        raise _ProcessEndsError
