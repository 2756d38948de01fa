"""The controller `operations`: claims what is due, runs it under a lease, and writes down how it ended."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import structlog
from sqlalchemy import ColumnElement, and_, exists, func, select
from sqlalchemy.orm import Session

from holdfast_protocol.digests import canonical_bytes
from holdfast_protocol.problems import PROBLEM_KINDS
from holdfast_protocol.states import OperationState
from holdfast_protocol.text import without_secrets
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.context import ServiceContext
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.operations import Controller, Operation
from holdfast_service.errors import ProblemError
from holdfast_service.operations.queue import Handler, HandlerStopped, LeaseLost, OperationCancelled, OperationRun
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreError
from holdfast_service.work.report import Backlog, ControllerLoop, ReconcileReport

_ACTOR = Actor.controller("operations")
CANCELLED = "It was cancelled. What it had done by then stays done."
AGAIN_AFTER_SECONDS = 15


def settle(
    context: ServiceContext,
    run: OperationRun,
    state: OperationState,
    *,
    result: dict[str, Any] | None = None,
    error: str | None = None,
) -> bool:
    """Writes how a try ended, only while its lease is still the one that was given (`lease_token`). False if another
    process has it by now: then nothing is written."""
    with context.database.transaction() as session:
        found = _mine(session, run)
        if found is None:
            return False
        found.progress = {**found.progress, **run.said}  # its last word may not have been written
        end(session, found, state, result=result, error=error)
        return True


def give_back(
    context: ServiceContext, run: OperationRun, *, error: str | None = None, counted: bool, wait_seconds: float = 0.0
) -> bool:
    """Puts it back into the queue, for any worker. `counted`: this try was one of those that are allowed."""
    with context.database.transaction() as session:
        found = _mine(session, run)
        if found is None:
            return False
        found.state = OperationState.QUEUED
        found.kept = run.kept
        lease.end_locked(found, database_now(session) + timedelta(seconds=wait_seconds) if wait_seconds else None)
        found.error = error
        if not counted:
            found.tries -= 1
        return True


def end(
    session: Session,
    found: Operation,
    state: OperationState,
    *,
    result: dict[str, Any] | None = None,
    error: str | None = None,
) -> None:
    """Ends an operation whose row the caller has locked."""
    before = found.state
    found.state = state
    found.result = result
    found.kept = None
    found.error = error
    found.ended_at = database_now(session)
    lease.end_locked(found)
    record_event(
        session,
        _ACTOR,
        "operation.end",
        project_id=found.project_id,
        run_id=found.run_id,
        checkpoint_id=found.checkpoint_id,
        reason=error,
        before={"operation": found.id, "state": before},
        after={"operation": found.id, "kind": found.kind, "state": state},
    )


def _mine(session: Session, run: OperationRun) -> Operation | None:
    return lease.locked(session, Operation, run.lease_token, Operation.id == run.id)


NAME = "operations"
MOST_TRIES = 3
# A drill of an hour must not keep a check of a second waiting.
_THREADS = 4
MOST_OF_A_KIND = 2
"""In each process: comparisons of two projects, which take hours, would have all four threads."""


def claim_next(context: ServiceContext, kinds: Collection[str], worker_id: str) -> OperationRun | None:
    """The oldest operation that is due, of the kinds that this version knows; None if none is, or the controller is
    paused. It is claimed under its row's lock, with a lease that `progress` renews and a token that settles.

    A running operation whose lease has run out belonged to a process that was killed, and is claimed again, but not for
    ever: an operation that takes its process with it (out of memory, a crash in a library) would take them all, one
    after the other.
    """
    while True:
        with context.database.transaction() as session:
            now = database_now(session)
            paused = exists().where(Controller.name == NAME, Controller.paused_at.is_not(None))
            found = session.scalar(
                select(Operation)
                .where(_is_due(now), Operation.kind.in_(kinds), ~paused)
                .order_by(Operation.created_at, Operation.id)
                .limit(1)
                .with_for_update(of=Operation, skip_locked=True)
            )
            if found is None:
                return None
            if found.cancel_requested_at is not None:
                end(session, found, OperationState.CANCELLED, error=CANCELLED)
            elif found.tries >= MOST_TRIES:
                end(session, found, OperationState.FAILED, error=_given_up(found))
            else:
                return _claim(session, context, found, worker_id)


def backlog(session: Session, context: ServiceContext) -> Backlog:
    """What waits for the controller, and what a process works on."""
    del context
    now = database_now(session)
    due = _is_due(now)
    waiting, oldest, running = session.execute(
        select(
            func.count().filter(due),
            func.min(Operation.created_at).filter(due),
            func.count().filter(Operation.state == OperationState.RUNNING, ~due),
        ).where(Operation.state.in_((OperationState.QUEUED, OperationState.RUNNING)))
    ).one()
    return Backlog(waiting, running, oldest)


def _is_due(now: datetime) -> ColumnElement[bool]:
    open_states = (OperationState.QUEUED, OperationState.RUNNING)
    return and_(Operation.state.in_(open_states), lease.is_free(Operation.leased_until, now))


def _claim(session: Session, context: ServiceContext, found: Operation, worker_id: str) -> OperationRun:
    found.state = OperationState.RUNNING
    found.started_at = found.started_at or database_now(session)
    token = lease.claim_locked(session, found, seconds=context.settings.lease_seconds)
    found.worker_id = worker_id
    found.tries += 1
    return OperationRun(
        context=context,
        id=found.id,
        kind=found.kind,
        project_id=found.project_id,
        run_id=found.run_id,
        checkpoint_id=found.checkpoint_id,
        arguments=found.arguments,
        actor=Actor("person", found.created_by, found.created_by_token),
        lease_token=token,
        tries=found.tries,
        kept=found.kept,
    )


def _given_up(found: Operation) -> str:
    return (
        f"Given up after {found.tries} tries: each time its process ended or fell silent, the last time "
        f"{found.worker_id}. Look at that process's log, then start it again."
    )


_log = structlog.get_logger("holdfast.operations")


@dataclass(frozen=True, kw_only=True)
class OperationsReport(ReconcileReport):
    cancelled: int = 0
    again: int = 0


@dataclass
class UnderWay:
    """What the threads of one process are carrying out, by kind."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _kinds: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def claimed(self, context: ServiceContext, kinds: Collection[str]) -> Iterator[OperationRun | None]:
        """What is due, of a kind that has room; it counts until the block ends. One thread claims at a time."""
        with self._lock:
            room = [kind for kind in kinds if self._kinds[kind] < MOST_OF_A_KIND]
            run = claim_next(context, room, context.process_id)
            if run is not None:
                self._kinds[run.kind] += 1
        try:
            yield run
        finally:
            if run is not None:
                with self._lock:
                    self._kinds[run.kind] -= 1


def reconcile(
    context: ServiceContext, *, kinds: Mapping[str, Handler], under_way: UnderWay | None = None
) -> OperationsReport:
    """One pass of the controller `operations`: claims what is due, one after the other, and runs its handler, until
    none is due or the process is asked to end. `kinds` are those that it can carry out; others wait for a process that
    can.

    Every process has a few threads that do this, of which one kind has half (`under_way`, which they share): a drill of
    an hour keeps no other operation waiting. A killed process leaves its lease, which runs out; a process that is asked
    to end gives its operation back.
    """
    report, under_way = OperationsReport(), under_way or UnderWay()
    while not context.stopping.is_set():
        with under_way.claimed(context, kinds.keys()) as run:
            if run is None:
                break
            report = _carry_out(context, run, kinds[run.kind], report)
    return report


def _carry_out(
    context: ServiceContext, run: OperationRun, handler: Handler, report: OperationsReport
) -> OperationsReport:
    try:
        result = handler(context, run)
        canonical_bytes(result)  # what JSON cannot say is the handler's bug, and told as one
    except OperationCancelled:
        settle(context, run, OperationState.CANCELLED, error=CANCELLED)
        return replace(report, cancelled=report.cancelled + 1)
    except LeaseLost:
        _log.warning("operation_lost", operation=run.id, kind=run.kind)
        return replace(report, again=report.again + 1)
    except HandlerStopped:
        give_back(context, run, counted=False)
        return replace(report, again=report.again + 1)
    except (ProblemError, StoreError) as error:
        return _failed(context, run, report, without_secrets(str(error)), again=_is_passing(error))
    except Exception as error:
        _log.exception("operation_failed", operation=run.id, kind=run.kind)
        reason = f"A bug ({type(error).__name__}); the log of {context.process_id} says where. Report it."
        return _failed(context, run, report, reason, again=False)
    settle(context, run, OperationState.DONE, result=result)
    return replace(report, done=report.done + 1)


def _failed(
    context: ServiceContext, run: OperationRun, report: OperationsReport, reason: str, *, again: bool
) -> OperationsReport:
    if again and run.tries < MOST_TRIES:
        give_back(context, run, error=reason, counted=True, wait_seconds=AGAIN_AFTER_SECONDS)
        return replace(report, again=report.again + 1, error=reason)
    settle(context, run, OperationState.FAILED, error=reason)
    return replace(report, failed=report.failed + 1, error=f"{run.kind} {run.id}: {reason}")


def _is_passing(error: ProblemError | StoreError) -> bool:
    """A store or a database that is unavailable comes back; what is wrong with the operation itself stays wrong."""
    if isinstance(error, StoreError):
        return error.retryable
    return PROBLEM_KINDS[error.code].retryable


def loops(settings: ServiceSettings, kinds: Mapping[str, Handler]) -> tuple[ControllerLoop, ...]:
    """The controller of this room, for these kinds of operations."""
    reconcile_kinds = partial(reconcile, kinds=kinds, under_way=UnderWay())
    return (ControllerLoop(NAME, settings.controller_interval_seconds, reconcile_kinds, backlog, threads=_THREADS),)
