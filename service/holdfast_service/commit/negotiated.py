"""What a shard has negotiated: the only chunks that it may be sealed with (protocol rule 10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.counted import counted
from holdfast_protocol.problems import ProblemCode
from holdfast_service.catalog.tables import Chunk, Copy, Shard, ShardChunk
from holdfast_service.errors import ProblemError

_SHOWN_DIGESTS = 20


class Negotiated(NamedTuple):
    """`bytes` are the chunk's own; `sent`: this shard was told to send it."""

    chunk_id: int
    bytes: int
    copy: Copy
    sent: bool


def chunks_negotiated(session: Session, shard: Shard | None, digests: Sequence[str]) -> dict[str, Negotiated]:
    """By digest, for exactly these. Raises `chunk_not_negotiated`.

    All references of the shard are read in one go: 200,000 digests are too many for one statement's parameters.
    """
    known: dict[str, Negotiated] = {}
    if shard is not None:
        rows = session.execute(
            select(Chunk.digest, Chunk.id, Chunk.bytes, Copy, ShardChunk.uploading)
            .join(ShardChunk, ShardChunk.chunk_id == Chunk.id)
            .join(Copy, Copy.id == ShardChunk.copy_id)
            .where(ShardChunk.shard_id == shard.id)
        )
        known = {row.digest: Negotiated(row.id, row.bytes, row.Copy, row.uploading) for row in rows}
    wanted = dict.fromkeys(digests)
    unknown = [digest for digest in wanted if digest not in known]
    if unknown:
        raise ProblemError(
            ProblemCode.CHUNK_NOT_NEGOTIATED,
            f"The list has {counted(len(unknown), 'chunk')} not negotiated under this shard. Offer what is missing, so "
            "that the collector keeps it, and seal again.",
            digests=unknown[:_SHOWN_DIGESTS],
            count=len(unknown),
        )
    return {digest: known[digest] for digest in wanted}


def deduplicated_bytes(negotiated: Mapping[str, Negotiated], digests: Sequence[str]) -> int:
    """What the shard did not send because it was there: each place in its list, less each chunk that was sent. Pure."""
    needed = sum(negotiated[digest].bytes for digest in digests)
    return needed - sum(each.bytes for each in negotiated.values() if each.sent)


def sent_bytes(session: Session, shard: Shard) -> int:
    """What this shard had to send."""
    total = session.scalar(
        select(func.coalesce(func.sum(Copy.stored_bytes), 0))
        .join(ShardChunk, ShardChunk.copy_id == Copy.id)
        .where(ShardChunk.shard_id == shard.id, ShardChunk.uploading)
    )
    return int(total or 0)
