"""Uploads that a rank reports as done: verified with the store while the rest is still going up (protocol rule 11)."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.chunks import FinishedAnswer, FinishedState, NegotiateChunks
from holdfast_protocol.counted import counted
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CopyState
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.copies import object_key
from holdfast_service.catalog.tables import Chunk, Copy, Shard, ShardChunk
from holdfast_service.catalog.verification import Finding, Upload, verify_uploads
from holdfast_service.catalog.writing import begin_writing, keep_alive, refuse_unless_uploading
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError

_STATES = {
    Finding.ARRIVED: FinishedState.VERIFIED,
    Finding.MISSING: FinishedState.MISSING,
    Finding.MISMATCH: FinishedState.MISMATCH,
}


def verify_finished(
    context: ServiceContext, caller: Principal, checkpoint_id: str, rank: int, request: NegotiateChunks
) -> list[FinishedAnswer]:
    """One answer per reported digest. Raises `chunk_not_negotiated`, and StoreError if the store does not say."""
    digests = list(dict.fromkeys(request.finished))
    if not digests:
        return []
    with context.database.transaction() as session:
        writing = begin_writing(session, caller, checkpoint_id, request, context.epoch)
        refuse_unless_uploading(writing.checkpoint)
        keep_alive(session, writing, context.settings)
        copies = _negotiated(session, checkpoint_id, rank, digests)
        project_id = writing.project.id
    answers: dict[str, FinishedAnswer] = {}
    pending: list[Upload] = []
    for digest, copy in copies.items():
        if copy.state == CopyState.PENDING:
            key = object_key(project_id, digest, copy)
            pending.append(Upload(copy.id, key, copy.stored_bytes, copy.stored_digest))
        elif copy.state == CopyState.VERIFIED:
            answers[digest] = FinishedAnswer(digest=digest, state=FinishedState.VERIFIED)
        else:
            answers[digest] = FinishedAnswer(
                digest=digest, state=FinishedState.MISMATCH, detail=f"this copy is {copy.state}; offer the chunk again"
            )
    for verdict in verify_uploads(context.database, context.store, pending):
        digest = verdict.upload.key.digest
        answers[digest] = FinishedAnswer(digest=digest, state=_STATES[verdict.finding], detail=verdict.detail)
    return [answers[digest] for digest in digests]


def _negotiated(session: Session, checkpoint_id: str, rank: int, digests: Sequence[str]) -> dict[str, Copy]:
    rows = session.execute(
        select(Chunk.digest, Copy)
        .join(ShardChunk, ShardChunk.chunk_id == Chunk.id)
        .join(Copy, Copy.id == ShardChunk.copy_id)
        .join(Shard, Shard.id == ShardChunk.shard_id)
        .where(Shard.checkpoint_id == checkpoint_id, Shard.rank == rank, Chunk.digest.in_(digests))
    )
    copies: dict[str, Copy] = {row.digest: row.Copy for row in rows}
    unknown = [digest for digest in digests if digest not in copies]
    if unknown:
        raise ProblemError(
            ProblemCode.CHUNK_NOT_NEGOTIATED,
            f"Rank {rank} reports {counted(len(unknown), 'chunk')} as sent that it has not negotiated under this "
            "checkpoint. "
            "Offer them first.",
            digests=unknown[:20],
        )
    return copies
