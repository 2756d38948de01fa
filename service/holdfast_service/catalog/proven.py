"""Which checkpoints are proven: somebody other than the client has hashed every byte that a restore would read.

A committed checkpoint may rest on copies that only its own client has hashed (protocol rule 14). Most are good; but
what must stay of a run is counted over those that are known to be (protocol rule 39).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import exists, select, text
from sqlalchemy.orm import Session, aliased

from holdfast_service.catalog.copies import KEPT, PROVEN
from holdfast_service.catalog.tables import COPY_TO_READ, Checkpoint, ChunkListEntry, Copy, Shard

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
    """Those with a chunk that somebody has yet to read and of which no other copy is proven. It begins with the copies
    that are to be read, mostly few: a page of large checkpoints must not ask about each of their chunks."""
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
    and layouts, for all of them are chunks. Their health is the caller's to ask."""
    proven = exists().where(Copy.chunk_id == ChunkListEntry.chunk_id, Copy.state.in_(KEPT), Copy.proof.in_(PROVEN))
    lacking = exists().where(
        Shard.checkpoint_id == Checkpoint.id, ChunkListEntry.chunk_list_id == Shard.chunk_list_id, ~proven
    )
    return set(session.scalars(select(Checkpoint.id).where(Checkpoint.id.in_(checkpoint_ids), ~lacking)))
