"""Which checkpoints of a run are the best by a metric, and which are proven: read by the store or the service."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from sqlalchemy import exists, select, text
from sqlalchemy.orm import Session, aliased

from holdfast_service.copies.predicates import KEPT, PROVEN
from holdfast_service.db.tables.core import COPY_TO_READ, Checkpoint, ChunkListEntry, Copy, Shard


class ByMetric(Protocol):
    """What makes a checkpoint the best by a metric: one order for restores, retention and copies (rule finite-metrics).
    A rule or a selector. `mode`: `min`, the smallest is the best, or `max`."""

    @property
    def metric(self) -> str: ...
    @property
    def mode(self) -> str: ...


class Judged(Protocol):
    """`metrics` as the catalog keeps them: name -> {"value": …, "nonfinite": …}."""

    @property
    def metrics(self) -> Mapping[str, Any]: ...
    @property
    def healthy(self) -> bool: ...


J = TypeVar("J", bound=Judged)


def finite_value(metrics: Mapping[str, Any], metric: str) -> float | None:
    """None: the metric is missing or not finite, and no rule can judge by it."""
    value = (metrics.get(metric) or {}).get("value")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def rank(metrics: Mapping[str, Any], by: ByMetric) -> float | None:
    """The smaller, the better; None as `finite_value`."""
    value = finite_value(metrics, by.metric)
    return None if value is None else value if by.mode == "min" else -value


def best_of(newest_first: Iterable[J], by: ByMetric, most: int) -> list[J]:
    """The best first; of equal ones the newest. What is not healthy is no best: it may have diverged to a fine loss."""
    ranked = [(rank(each.metrics, by), each) for each in newest_first if each.healthy]
    judged = [(value, each) for value, each in ranked if value is not None]
    return [each for _, each in sorted(judged, key=lambda pair: pair[0])[:most]]


PROVEN_POINTS = 2
"""So many stay of each run."""
_FIRST_PORTION = 4
_LARGEST_PORTION = 1024


def newest_proven(session: Session, newest_first: Sequence[str]) -> list[str]:
    """The first two ids that are proven. It asks about a few, then about more: mostly the first few will do."""
    found: list[str] = []
    portion, first = _FIRST_PORTION, 0
    while first < len(newest_first) and len(found) < PROVEN_POINTS:
        ids = newest_first[first : first + portion]
        proven = proven_among(session, ids)
        found += [checkpoint_id for checkpoint_id in ids if checkpoint_id in proven]
        first, portion = first + portion, min(_LARGEST_PORTION, portion * 4)
    return found[:PROVEN_POINTS]


def unproven_among(session: Session, checkpoint_ids: Collection[str]) -> set[str]:
    """Those with a chunk that must still be read and of which no other copy is proven. It begins with the copies that
    are to be read, mostly few: a page of large checkpoints must not ask about each of their chunks."""
    other = aliased(Copy)
    proven = exists().where(other.chunk_id == Copy.chunk_id, other.state.in_(KEPT), other.proof.in_(PROVEN))
    to_read = select(Copy.chunk_id).where(text(f"({COPY_TO_READ})"), ~proven)
    return set(
        session.scalars(
            select(Shard.checkpoint_id)
            .distinct()
            .join(ChunkListEntry, ChunkListEntry.chunk_list_id == Shard.chunk_list_id)
            .where(Shard.checkpoint_id.in_(checkpoint_ids), ChunkListEntry.chunk_id.in_(to_read))
        )
    )


def proven_among(session: Session, checkpoint_ids: Collection[str]) -> set[str]:
    """Those of which each chunk has a good copy, in some store, that the store or the service has hashed: data, indexes
    and layouts, because all of them are chunks. The caller must ask for their health.

    A committed checkpoint may rest on copies that only its own client has hashed (rule reuse-only-hashed). Most are
    good; but what must stay of a run is counted over the proven ones (rule two-verified-points).
    """
    proven = exists().where(Copy.chunk_id == ChunkListEntry.chunk_id, Copy.state.in_(KEPT), Copy.proof.in_(PROVEN))
    lacking = exists().where(
        Shard.checkpoint_id == Checkpoint.id, ChunkListEntry.chunk_list_id == Shard.chunk_list_id, ~proven
    )
    return set(session.scalars(select(Checkpoint.id).where(Checkpoint.id.in_(checkpoint_ids), ~lacking)))
