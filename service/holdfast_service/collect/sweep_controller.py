"""The controller that sweeps each store once in HOLDFAST_SWEEP_INTERVAL_SECONDS. A person may do so at any time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.audit.record import Actor
from holdfast_service.collect.orphans import sweep_store
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.operations import StoreMaintenance
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import StoreError
from holdfast_service.work.report import Backlog, ReconcileReport

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
