"""What became of what was asked for: what went to the trash, what stays and why, and the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from holdfast_protocol.pruning import FreedBytes, LeftCheckpoint, PrunedCheckpoint
from holdfast_protocol.retention import Reason, ReasonKind
from holdfast_service.context import ServiceContext
from holdfast_service.retention.facts import Fact
from holdfast_service.retention.freed import freed_bytes

CHANGED = (Reason(ReasonKind.CHANGED, "it was changed at this very moment; look again"),)


def pruned_views(facts: Iterable[Fact]) -> list[PrunedCheckpoint]:
    return [
        PrunedCheckpoint(
            checkpoint_id=fact.id,
            step=fact.step,
            attempt=fact.attempt,
            health=fact.health,
            logical_bytes=fact.logical_bytes,
        )
        for fact in facts
    ]


def left_views(facts: Iterable[Fact], reasons: Mapping[str, Sequence[Reason]]) -> list[LeftCheckpoint]:
    """Of those that could have gone and are not among the reasons: they were changed."""
    return [
        LeftCheckpoint(
            checkpoint_id=fact.id, step=fact.step, attempt=fact.attempt, reasons=list(reasons.get(fact.id, CHANGED))
        )
        for fact in facts
    ]


def freed_of(context: ServiceContext, facts: Sequence[Fact]) -> FreedBytes:
    """Looked up by itself, and not under the run's lock: it reads every chunk of the project."""
    with context.database.read() as session:
        return freed_bytes(session, [fact.id for fact in facts])


def when(purge_at: datetime, facts: Sequence[Fact]) -> datetime | None:
    return purge_at if facts else None
