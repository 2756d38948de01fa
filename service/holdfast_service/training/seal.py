"""Seal a shard: what it negotiated, what its seal says, its chunk list; a rank says that its share is complete."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session, load_only

from holdfast_protocol.checkpoints import CheckpointView, SealShard
from holdfast_protocol.digests import MAX_STORED_DOCUMENT_BYTES, shard_digest
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CopyState
from holdfast_protocol.text import counted
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import object_key, usable_by
from holdfast_service.copies.verify_upload import Finding, Upload, Verdict, ask_for_all, settle
from holdfast_service.db.dialect import database_now, insert_all, insert_new
from holdfast_service.db.tables.core import Chunk, ChunkList, ChunkListEntry, Copy, Shard, ShardChunk
from holdfast_service.errors import ProblemError
from holdfast_service.training.commit import Arrived, commit_seal, sealed_before
from holdfast_service.training.fencing import (
    begin_writing,
    keep_alive,
    refuse_unless_uploading,
    shard_of,
)

# The chunk list of a sealed shard: one row for all the shards that have this very list. Until the shard refers to it,
# the chunks are held by what was negotiated.

_ROWS_PER_STATEMENT = 5000


def ensure_chunk_list(session: Session, project_id: str, digest: str, chunk_ids: Sequence[int]) -> int:
    """The row's id, held against the collector until the transaction ends. `digest` is the shard_digest of the list;
    equal lists are those of the same rows, sizes and all."""
    entries_digest = hashlib.sha256(",".join(map(str, chunk_ids)).encode("ascii")).hexdigest()
    same = {"project_id": project_id, "entries_digest": entries_digest}
    while True:  # again only if the collector forgot it between the two statements
        # Waits for a rank that is writing the same list.
        for row in insert_new(session, ChunkList, [same | {"digest": digest}], ChunkList.id):
            _fill_list(session, row.id, chunk_ids)
            return int(row.id)
        held = select(ChunkList.id).filter_by(**same).with_for_update(read=True, key_share=True)
        if (list_id := session.scalar(held)) is not None:
            return list_id


def _fill_list(session: Session, list_id: int, chunk_ids: Sequence[int]) -> None:
    entries = [
        {"chunk_list_id": list_id, "ordinal": ordinal, "chunk_id": chunk_id}
        for ordinal, chunk_id in enumerate(chunk_ids)
    ]
    for first in range(0, len(entries), _ROWS_PER_STATEMENT):
        insert_all(session, ChunkListEntry, entries[first : first + _ROWS_PER_STATEMENT], ChunkListEntry.ordinal)


# What a shard has negotiated: the only chunks that it may be sealed with (rule seal-only-negotiated).

_SHOWN_DIGESTS = 20


class Negotiated(NamedTuple):
    """`bytes` are the chunk's own; `sent`: this shard was told to send it."""

    chunk_id: int
    bytes: int
    copy: Copy
    sent: bool


def all_negotiated(session: Session, shard: Shard | None) -> dict[str, Negotiated]:
    """By digest. Read in one go: 200,000 digests are too many for one statement's parameters."""
    if shard is None:
        return {}
    rows = session.execute(_NEGOTIATED, {"shard": shard.id})
    return {row.digest: Negotiated(row.id, row.bytes, row.Copy, row.uploading) for row in rows}


_NEGOTIATED = (
    select(Chunk.digest, Chunk.id, Chunk.bytes, Copy, ShardChunk.uploading)
    .join(ShardChunk, ShardChunk.chunk_id == Chunk.id)
    .join(Copy, Copy.id == ShardChunk.copy_id)
    .where(ShardChunk.shard_id == bindparam("shard"))
    .options(
        load_only(  # a thousand of them are read in a seal
            Copy.generation,
            Copy.version_id,
            Copy.overwritable_until,
            Copy.attempt_id,
            Copy.state,
            Copy.proof,
            Copy.stored_bytes,
            Copy.stored_digest,
            raiseload=True,
        )
    )
)


def refuse_not_negotiated(known: Mapping[str, Negotiated], digests: Sequence[str]) -> None:
    """Raises `chunk_not_negotiated`."""
    unknown = [digest for digest in dict.fromkeys(digests) if digest not in known]
    if unknown:
        raise ProblemError(
            ProblemCode.CHUNK_NOT_NEGOTIATED,
            f"The list has {counted(len(unknown), 'chunk')} not negotiated under this shard. Offer what is missing, so "
            "that the collector keeps it, and seal again.",
            digests=unknown[:_SHOWN_DIGESTS],
            count=len(unknown),
        )


def sent_bytes(known: Mapping[str, Negotiated]) -> int:
    """What the shard had to send, on the wire. Pure."""
    return sum(each.copy.stored_bytes for each in known.values() if each.sent)


def deduplicated_bytes(known: Mapping[str, Negotiated], digests: Sequence[str]) -> int:
    """What the shard did not send because it was there: each place in its list, less each chunk that was sent. Pure."""
    needed = sum(known[digest].bytes for digest in digests)
    return needed - sum(known[digest].bytes for digest in dict.fromkeys(digests) if known[digest].sent)


# What a seal says: checked against itself, and against its chunks. Pure.


def check_seal(rank: int, request: SealShard) -> None:
    """Raises `invalid_request`. The client's word for its own digest and ordinals is not taken (rule
    seal-only-negotiated)."""
    if shard_digest(request.chunks) != request.digest:
        _refuse("The shard's digest is not that of its chunk list. Compute it with shard_digest over the same list.")
    ordinals = {"shard": request.index.shard, "layout": request.index.layout}
    for name, ordinal in ordinals.items():
        if ordinal is not None and ordinal >= len(request.chunks):
            _refuse(
                f"index.{name} is {ordinal}, and the shard has {counted(len(request.chunks), 'chunk')}. Give the "
                "ordinal at which "
                "the index stands in the chunk list."
            )
    if rank == 0 and request.index.layout is None:
        _refuse("Rank 0 brings the global layout: give index.layout.")
    if rank != 0 and (request.metrics or request.dropped_components):
        _refuse(f"Metrics and dropped_components come from rank 0, and this is rank {rank}. Send them there only.")


def check_sizes(request: SealShard, sizes: Sequence[int]) -> None:
    """Raises `invalid_request` where the seal says more than its chunks can hold; `sizes` are theirs, by ordinal. What
    is in the documents every reader checks: they are not read here, on the way of a save."""
    if request.logical_bytes > sum(sizes):
        _refuse(f"logical_bytes is {request.logical_bytes}, and the chunks of the shard have {sum(sizes)} bytes.")
    for name, ordinal in (("shard", request.index.shard), ("layout", request.index.layout)):
        if ordinal is not None and sizes[ordinal] > MAX_STORED_DOCUMENT_BYTES:
            _refuse(f"index.{name} is a chunk of {sizes[ordinal]} bytes; no document may be as large as that.")


def _refuse(detail: str) -> None:
    raise ProblemError(ProblemCode.INVALID_REQUEST, detail)


# Seal a shard: a rank says that its share is complete. The seal that completes the world commits (rule
# commit-before-reply).
#
# 1. look     the request against itself, the checkpoint, what was negotiated; a repeated seal ends here
# 2. ask      the store is asked for what is not known to have arrived, outside of any transaction
# 3. commit   what has arrived, the chunk list and the shard are written in one transaction; the last seal commits
#             (training/commit.py)

_SHOWN_MISSING = 100
_ASKED_IN_A_MOMENT = 100
"""The store may take long to answer for more; the commit then comes too late to say that the attempt is alive."""


@dataclass(frozen=True)
class _Look:
    """`view` is set where there is nothing left to do: this very content was sealed before. `known`: what the shard has
    negotiated, by digest."""

    view: CheckpointView | None
    project_id: str = ""
    attempt_id: int = 0
    known: Mapping[str, Negotiated] = field(default_factory=dict)


def seal_shard(
    context: ServiceContext, caller: Principal, checkpoint_id: str, rank: int, request: SealShard
) -> CheckpointView:
    """Repeating it with the same content is fine: a reply may be lost. Raises `manifest_conflict` for other content,
    `chunk_not_negotiated`, `incomplete_checkpoint` with the digests that are missing, `checkpoint_aborted`,
    `chunk_gone` and `stale_attempt`.
    """
    check_seal(rank, request)
    try:
        look = _look(context, caller, checkpoint_id, rank, request)
    except ProblemError as problem:
        if problem.code is not ProblemCode.CHUNK_NOT_NEGOTIATED:
            raise
        # An earlier try of this call, whose reply was lost or late, may have sealed the shard between two statements of
        # the look: what was negotiated goes with the seal. Another look sees the shard sealed.
        look = _look(context, caller, checkpoint_id, rank, request)
    if look.view is not None:
        return look.view
    listed = [look.known[digest] for digest in request.chunks]
    check_sizes(request, [each.bytes for each in listed])
    pending = _pending(look, request.chunks)
    if len(pending) > _ASKED_IN_A_MOMENT:
        with context.database.transaction() as session:
            writing = begin_writing(session, caller, checkpoint_id, request, context.epoch)
            keep_alive(session, writing, context.settings)
    verdicts = ask_for_all(context.store, pending)
    _refuse_incomplete(context, look, request.chunks, verdicts)

    def arrive(session: Session, now: datetime) -> Arrived:
        # The list before the copies: the collector locks a chunk, and then its copies.
        chunk_ids = [each.chunk_id for each in listed]
        list_id = ensure_chunk_list(session, look.project_id, request.digest, chunk_ids)
        settle(session, verdicts, now)
        return Arrived(list_id, sent_bytes(look.known), deduplicated_bytes(look.known, request.chunks))

    return commit_seal(context, caller, checkpoint_id, rank, request, arrive=arrive)


def _look(context: ServiceContext, caller: Principal, checkpoint_id: str, rank: int, request: SealShard) -> _Look:
    """Locks nothing and writes nothing: the commit looks again behind the run's lock."""
    with context.database.read(in_transaction=False) as session:
        # Any attempt may compare once it is committed: the one that staged a late save may have made it in time.
        writing = begin_writing(session, caller, checkpoint_id, request, context.epoch, only_looks=True)
        shard = shard_of(session, writing.checkpoint, rank)
        view = sealed_before(session, writing, shard, request)
        if view is not None:
            return _Look(view)
        refuse_unless_uploading(writing.checkpoint)
        known = all_negotiated(session, shard)
        refuse_not_negotiated(known, request.chunks)
        return _Look(None, writing.project.id, writing.attempt.id, known)


def _pending(look: _Look, digests: Sequence[str]) -> list[Upload]:
    """Uploads that were not reported as finished."""
    return [
        Upload(copy.id, object_key(look.project_id, digest, copy), copy.stored_bytes, copy.stored_digest)
        for digest in dict.fromkeys(digests)
        if (copy := look.known[digest].copy).state == CopyState.PENDING
    ]


def _refuse_incomplete(
    context: ServiceContext, look: _Look, digests: Sequence[str], verdicts: Sequence[Verdict]
) -> None:
    """Every chunk must be in the store as the store itself says (rule seal-only-negotiated). What has arrived is
    settled before the refusal."""
    why = {v.upload.key.digest: v.detail for v in verdicts if v.finding is not Finding.ARRIVED}
    for digest in dict.fromkeys(digests):
        copy = look.known[digest].copy
        if copy.state != CopyState.PENDING and not usable_by(copy, look.attempt_id):
            why[digest] = f"its copy is {copy.state}"
    if not why:
        return
    with context.database.transaction() as session:
        settle(session, verdicts, database_now(session))
    first = next(iter(why))
    raise ProblemError(
        ProblemCode.INCOMPLETE_CHECKPOINT,
        f"{counted(len(why), 'chunk')} of this shard cannot be used (the first: {first}, {why[first]}). "
        "Offer them again, send them and seal again.",
        digests=list(why)[:_SHOWN_MISSING],
        count=len(why),
    )
