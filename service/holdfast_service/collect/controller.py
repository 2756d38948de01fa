"""One pass of the collector, over every attached store. Nothing is deleted unless the store itself says that it is
this catalog's, in this epoch: a cloned staging database must never delete production's objects (rule fencing-token)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.collect import orphans
from holdfast_service.collect.garbage import ready_stores
from holdfast_service.collect.mark_and_delete import Deleted, delete_marked, mark
from holdfast_service.collect.references import drop_past_references
from holdfast_service.collect.scan_copies import look_at_all, look_on
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.lease import has_run_out
from holdfast_service.db.tables.core import Copy
from holdfast_service.db.tables.operations import CollectCandidate
from holdfast_service.records.history import keep_history
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import MountedStore, StoreError
from holdfast_service.work.report import Backlog, ControllerLoop, ReconcileReport, counted

_BATCHES_PER_ROUND = 100
# Garbage is no hurry, and looking for it reads more of the catalog than anything else.
_EVERY_ROUNDS = 12
_LONGEST_PAUSES = 60


@dataclass(frozen=True)
class CollectReport(ReconcileReport):
    """`done`: copies whose bytes went. `failed`: those that a store did not let go; they are tried again.
    `skipped_stores`: where nothing may be deleted now, and why."""

    deleted_bytes: int = 0
    forgotten_chunks: int = 0
    skipped_stores: tuple[str, ...] = ()


def reconcile(context: ServiceContext) -> CollectReport:
    return collect(context)


def collect(
    context: ServiceContext, *, whole: bool = False, on_step: Callable[[int], object] = lambda _: None
) -> CollectReport:
    """`whole`: with a full scan at every copy first, as a person who asks for a pass wants it. `on_step` is told how
    many copies went so far, and may raise to end it."""
    ready = ready_stores(context)
    drop_past_references(context)
    for attached in ready.stores:
        if whole:
            look_at_all(context, attached.store_id, lambda: on_step(0))
        else:
            look_on(context, attached.store_id)
    deleted, forgotten = Deleted(), 0
    for _ in range(_BATCHES_PER_ROUND):
        able = ready.store_ids - deleted.unavailable.keys()
        if not able or context.stopping.is_set():
            break
        marked = context.database.run(partial(mark, context=context, store_ids=able))
        if marked.doomed:
            keep_history(context)  # a database that forgets these marks must not find their chunks present
        deleted.add(delete_marked(context, marked.doomed))
        forgotten += marked.forgotten_chunks
        on_step(deleted.copies)
        if not marked.doomed and not marked.looked_at:
            break
    for attached in ready.stores:
        _sweep_incoming(context, attached, deleted)
    return CollectReport(
        done=deleted.copies,
        failed=deleted.kept,
        error=next(iter([*deleted.problems.values(), *ready.skipped]), None),
        deleted_bytes=deleted.bytes,
        forgotten_chunks=forgotten,
        skipped_stores=ready.skipped,
    )


def backlog(session: Session, context: ServiceContext) -> Backlog:
    """Chunks to look at, and copies that are marked."""
    now = database_now(session)
    due_now = CollectCandidate.due_at <= now
    candidates = counted(session, select(CollectCandidate.chunk_id).where(due_now))
    oldest = session.scalar(select(func.min(CollectCandidate.due_at)).where(due_now))
    deleting = (Copy.store_id.in_(context.store_ids), Copy.state == CopyState.DELETING)
    leased = session.scalar(select(func.count()).where(*deleting, Copy.leased_until > now)) or 0
    due = counted(session, select(Copy.id).where(*deleting, has_run_out(Copy.leased_until, now)))
    return Backlog(due=candidates + due, leased=int(leased), oldest_due_at=oldest)


def _sweep_incoming(context: ServiceContext, attached: AttachedStore, deleted: Deleted) -> None:
    if not isinstance(attached.store, MountedStore) or attached.store_id in deleted.unavailable:
        return
    settings = context.settings
    try:
        attached.store.sweep_incoming(older_than_seconds=settings.ticket_seconds + settings.longest_upload_seconds)
    except StoreError as error:
        deleted.problems[attached.store_id] = str(error)


def loops(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """The controllers of this room."""
    seconds = settings.controller_interval_seconds * _EVERY_ROUNDS
    return (
        ControllerLoop("collect", seconds, reconcile, backlog, longest_pauses=_LONGEST_PAUSES),
        ControllerLoop("sweep", seconds, orphans.reconcile, orphans.backlog, sole=True),
    )
