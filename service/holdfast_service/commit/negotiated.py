"""What a shard has negotiated: the only chunks that it may be sealed with (protocol rule 10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_service.catalog.tables import Chunk, Copy, Shard, ShardChunk
from holdfast_service.errors import ProblemError

_SHOWN_DIGESTS = 20


class Negotiated(NamedTuple):
    chunk_id: int
    copy: Copy


def chunks_negotiated(session: Session, shard: Shard | None, digests: Sequence[str]) -> dict[str, Negotiated]:
    """By digest, for exactly these. Raises `chunk_not_negotiated`.

    All references of the shard are read in one go: 200,000 digests are too many for one statement's parameters.
    """
    known: dict[str, Negotiated] = {}
    if shard is not None:
        rows = session.execute(
            select(Chunk.digest, Chunk.id, Copy)
            .join(ShardChunk, ShardChunk.chunk_id == Chunk.id)
            .join(Copy, Copy.id == ShardChunk.copy_id)
            .where(ShardChunk.shard_id == shard.id)
        )
        known = {digest: Negotiated(chunk_id, copy) for digest, chunk_id, copy in rows}
    wanted = dict.fromkeys(digests)
    unknown = [digest for digest in wanted if digest not in known]
    if unknown:
        raise ProblemError(
            ProblemCode.CHUNK_NOT_NEGOTIATED,
            f"{len(unknown)} chunks of the list were not negotiated under this shard. Offer them first, so that they "
            "are kept from the collector, and seal again.",
            digests=unknown[:_SHOWN_DIGESTS],
            count=len(unknown),
        )
    return {digest: known[digest] for digest in wanted}


def sent_bytes(session: Session, shard: Shard) -> int:
    """What this shard had to send."""
    total = session.scalar(
        select(func.coalesce(func.sum(Copy.stored_bytes), 0))
        .join(ShardChunk, ShardChunk.copy_id == Copy.id)
        .where(ShardChunk.shard_id == shard.id, ShardChunk.uploading)
    )
    return int(total or 0)
