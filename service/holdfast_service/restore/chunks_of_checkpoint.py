"""The chunks that a reader asks for: only those of this checkpoint, whatever digests it knows."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_service.catalog.tables import Checkpoint, Chunk, ChunkListEntry, Shard
from holdfast_service.errors import ProblemError

_SHOWN_DIGESTS = 20


def chunks_of_checkpoint(
    session: Session, project_id: str, checkpoint: Checkpoint, digests: Sequence[str]
) -> dict[str, Chunk]:
    """By digest. Raises `chunk_not_found` for one that does not belong to the checkpoint: no existence oracle."""
    used = (
        exists()
        .where(ChunkListEntry.chunk_id == Chunk.id)
        .where(ChunkListEntry.chunk_list_id == Shard.chunk_list_id)
        .where(Shard.checkpoint_id == checkpoint.id)
    )
    rows = session.scalars(select(Chunk).where(Chunk.project_id == project_id, Chunk.digest.in_(digests), used))
    chunks = {chunk.digest: chunk for chunk in rows}
    unknown = [digest for digest in digests if digest not in chunks]
    if unknown:
        raise ProblemError(
            ProblemCode.CHUNK_NOT_FOUND,
            f"The checkpoint {checkpoint.id} has no chunk {unknown[0]}. Read its shards for those that it has.",
            digests=unknown[:_SHOWN_DIGESTS],
            count=len(unknown),
        )
    return chunks
