"""One pass of the controller `replicate`: judge what is new, then copy what is due, newest checkpoint first.

A second store that is unavailable is told and tried again in the next pass; it blocks nothing but its own copies (rule
row-before-copy).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState, CopyState, StoreRole
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Copy
from holdfast_service.db.tables.operations import TO_COPY, CheckpointCopy
from holdfast_service.replicate.copy_checkpoint import copy_checkpoint, due
from holdfast_service.replicate.policy import judge, reopen_damaged
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.read_rate_limit import ReadRateLimit
from holdfast_service.work.report import Backlog, ControllerLoop, ReconcileReport

_CHECKPOINTS_AT_ONCE = 50
_SHORTEST_ROUND_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class ReplicateReport(ReconcileReport):
    """`done` are chunks; `whole` the checkpoints that were found whole in the second store."""

    copied_bytes: int = 0
    judged: int = 0
    reopened: int = 0
    whole: tuple[str, ...] = ()


def reconcile(context: ServiceContext) -> ReplicateReport:
    """Copies for about one interval, or until nothing is due; at least the first chunk that is due."""
    second = context.attached(StoreRole.SECOND)
    if second is None:
        return ReplicateReport()
    for attached in context.stores:
        attached.watch.refresh()
    judged = judge(context, second.store_id)
    reopened = reopen_damaged(context, second.store_id)
    limit = ReadRateLimit(context.settings.copy_bytes_per_second)
    done = failed = copied_bytes = 0
    error: str | None = None
    whole: list[str] = []

    def go_on() -> bool:
        return not second.watch.unavailable and not context.stopping.is_set() and time.monotonic() < ends_at

    with context.database.read() as session:
        statement = due(second.store_id, database_now(session)).limit(_CHECKPOINTS_AT_ONCE)
        checkpoint_ids = [row.CheckpointCopy.checkpoint_id for row in session.execute(statement)]
    # From here on: what it took to find the work takes nothing from doing it.
    ends_at = time.monotonic() + max(context.settings.controller_interval_seconds, _SHORTEST_ROUND_SECONDS)
    for checkpoint_id in () if second.watch.unavailable else checkpoint_ids:
        copied = copy_checkpoint(context, second, checkpoint_id, on_bytes=limit.acquire, go_on=go_on)
        done, failed, copied_bytes = done + copied.chunks, failed + copied.failed, copied_bytes + copied.bytes
        error = copied.error or error
        if copied.whole:
            whole.append(checkpoint_id)
        if copied.target_failed or not go_on():
            break
    if second.watch.unavailable:
        error = error or f"The second store is unavailable: {second.watch.reason}"
    return ReplicateReport(
        done=done,
        failed=failed,
        error=error,
        copied_bytes=copied_bytes,
        judged=judged,
        reopened=reopened,
        whole=tuple(whole),
    )


def backlog(session: Session, context: ServiceContext) -> Backlog:
    """`due` are checkpoints, `leased` the chunks that are on their way."""
    second = context.attached(StoreRole.SECOND)
    if second is None:
        return Backlog(0)
    waiting, oldest = session.execute(
        select(func.count(), func.min(Checkpoint.committed_at))
        .select_from(CheckpointCopy)
        .join(Checkpoint, Checkpoint.id == CheckpointCopy.checkpoint_id)
        .where(
            CheckpointCopy.store_id == second.store_id,
            text(f"({TO_COPY})"),
            Checkpoint.state == CheckpointState.COMMITTED,
        )
    ).one()
    leased = session.scalar(
        select(func.count()).where(
            Copy.store_id == second.store_id,
            Copy.state == CopyState.COPYING,
            Copy.leased_until > database_now(session),
        )
    )
    return Backlog(int(waiting), int(leased or 0), oldest)


def loops(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """The controllers of this room."""
    return (ControllerLoop("replicate", settings.controller_interval_seconds, reconcile, backlog),)
