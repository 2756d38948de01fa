"""Seal a shard: what it negotiated, what its seal says, its chunk list; a rank says that its share is complete."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import delete, exists, func, insert, select
from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import CheckpointView, FailShard, SealShard, ShardContent
from holdfast_protocol.digests import MAX_STORED_DOCUMENT_BYTES, shard_digest
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import AbortCause, CheckpointState, CopyState, ShardState
from holdfast_protocol.text import counted, without_secrets
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import object_key, usable_by
from holdfast_service.copies.verify_upload import Finding, Upload, Verdict, verify_uploads
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Checkpoint, Chunk, ChunkList, ChunkListEntry, Copy, Shard, ShardChunk
from holdfast_service.errors import ProblemError
from holdfast_service.runs.views import current_checkpoint_view
from holdfast_service.training.commit import abort, complete_if_whole
from holdfast_service.training.fencing import (
    Writing,
    begin_writing,
    keep_alive,
    refuse_unless_in_world,
    refuse_unless_uploading,
)

# One rank's shard: its row, its chunk list, what it negotiated and what its seal says.

# One rank's shard of a checkpoint, as a row.


def shard_of(session: Session, checkpoint: Checkpoint, rank: int) -> Shard | None:
    """None if the rank has not called yet. Raises `invalid_request` for a rank outside the world."""
    refuse_unless_in_world(checkpoint, rank)
    return session.execute(
        select(Shard).where(Shard.checkpoint_id == checkpoint.id, Shard.rank == rank),
        execution_options={"populate_existing": True},
    ).scalar_one_or_none()


def locked_shard(session: Session, checkpoint: Checkpoint, rank: int) -> Shard:
    """FOR UPDATE: a late negotiation of the same rank must not add references while it is sealed. Made if absent."""
    refuse_unless_in_world(checkpoint, rank)
    locked = select(Shard).where(Shard.checkpoint_id == checkpoint.id, Shard.rank == rank).with_for_update()
    anew = {"populate_existing": True}
    if (shard := session.execute(locked, execution_options=anew).scalar_one_or_none()) is not None:
        return shard
    insert_absent(
        session,
        Shard,
        [
            {
                "checkpoint_id": checkpoint.id,
                "rank": rank,
                "state": ShardState.OPEN,
                "logical_bytes": 0,
                "uploaded_bytes": 0,
                "components": {},
                "finite": True,
            }
        ],
    )
    return session.execute(locked, execution_options=anew).scalar_one()


# The chunk list of a sealed shard: one row for all the shards that have this very list.
#
# Written in a transaction of its own, before the checkpoint is locked: a list may have 200,000 entries, and the other
# ranks' seals would wait for it. Until the shard refers to it, the chunks are held by what was negotiated.

_ROWS_PER_STATEMENT = 5000


def ensure_chunk_list(database: Database, project_id: str, digest: str, chunk_ids: Sequence[int]) -> int:
    """The row's id. `digest` is the shard_digest of the list; equal lists are those of the same rows, sizes and all."""
    return database.run(lambda session: _ensure(session, project_id, digest, chunk_ids))


def _ensure(session: Session, project_id: str, digest: str, chunk_ids: Sequence[int]) -> int:
    # Waits for a rank that is writing the same list; what it wrote is seen by the next statement.
    entries_digest = hashlib.sha256(",".join(map(str, chunk_ids)).encode("ascii")).hexdigest()
    same = {"project_id": project_id, "entries_digest": entries_digest}
    insert_absent(session, ChunkList, [same | {"digest": digest}])
    list_id = session.execute(select(ChunkList.id).filter_by(**same).with_for_update()).scalar_one()
    if not session.scalar(select(exists().where(ChunkListEntry.chunk_list_id == list_id))):
        entries = [
            {"chunk_list_id": list_id, "ordinal": ordinal, "chunk_id": chunk_id}
            for ordinal, chunk_id in enumerate(chunk_ids)
        ]
        for first in range(0, len(entries), _ROWS_PER_STATEMENT):
            session.execute(insert(ChunkListEntry), entries[first : first + _ROWS_PER_STATEMENT])
    return list_id


# What a shard has negotiated: the only chunks that it may be sealed with (rule seal-only-negotiated).

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


# What a seal says: checked against itself, compared when it comes twice. Pure.


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


def refuse_other_content(shard: Shard, request: SealShard) -> None:
    """Raises `manifest_conflict` if the shard was sealed with anything else than this."""
    sealed, said = _content(shard.summary), _content(request)
    sealed |= {"digest": shard.digest, "index_ordinal": shard.index_ordinal, "layout_ordinal": shard.layout_ordinal}
    said |= {"digest": request.digest, "index_ordinal": request.index.shard, "layout_ordinal": request.index.layout}
    different = [name for name, value in said.items() if sealed[name] != value]
    if different:
        raise ProblemError(
            ProblemCode.MANIFEST_CONFLICT,
            f"Rank {shard.rank} has sealed this shard with other content ({', '.join(different)}). What is sealed "
            "stays; save under another step.",
            rank=shard.rank,
            different=different,
            sealed_digest=shard.digest,
        )


def _content(said: ShardContent) -> dict[str, Any]:
    return {name: getattr(said, name) for name in ShardContent.model_fields}


def _refuse(detail: str) -> None:
    raise ProblemError(ProblemCode.INVALID_REQUEST, detail)


# Seal a shard: a rank says that its share is complete. The seal that completes the world commits (rule
# commit-before-reply).
#
# 1. look     the request against itself, the checkpoint, what was negotiated; a repeated seal ends here
# 2. verify   what nobody has reported as finished is asked of the store, outside of any transaction
# 3. list     the chunk list gets its row, shared by all shards that have this very list
# 4. settle   under the checkpoint's lock: the shard is sealed, the seals are counted, the last one commits

_SHOWN_MISSING = 100
_LIST_TRIES = 3


@dataclass(frozen=True)
class _Look:
    """`view` is set where there is nothing left to do: this very content was sealed before."""

    view: CheckpointView | None
    project_id: str = ""
    attempt_id: int = 0
    negotiated: dict[str, Negotiated] | None = None


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
    assert look.negotiated is not None
    check_sizes(request, [look.negotiated[digest].bytes for digest in request.chunks])
    _refuse_incomplete(look, _verify_the_rest(context, look))
    deduplicated = deduplicated_bytes(look.negotiated, request.chunks)
    for _ in range(_LIST_TRIES):
        list_id = ensure_chunk_list(
            context.database,
            look.project_id,
            request.digest,
            [look.negotiated[digest].chunk_id for digest in request.chunks],
        )
        view = _settle(context, caller, checkpoint_id, rank, request, list_id=list_id, deduplicated=deduplicated)
        if view is not None:
            return view
    raise ProblemError(ProblemCode.BUSY, "The chunk list was collected while the shard was being sealed. Try again.")


def _look(context: ServiceContext, caller: Principal, checkpoint_id: str, rank: int, request: SealShard) -> _Look:
    with context.database.transaction() as session:
        # Comparing is open to whoever finds it committed: the attempt that staged a late save may have made it in time.
        writing = begin_writing(session, caller, checkpoint_id, request, context.epoch, compares=True)
        shard = shard_of(session, writing.checkpoint, rank)
        view = _sealed_before(session, writing, shard, request)
        if view is not None:
            return _Look(view)
        refuse_unless_uploading(writing.checkpoint)
        keep_alive(session, writing, context.settings)
        negotiated = chunks_negotiated(session, shard, request.chunks)
        return _Look(None, writing.project.id, writing.attempt.id, negotiated)


def _sealed_before(
    session: Session, writing: Writing, shard: Shard | None, request: SealShard
) -> CheckpointView | None:
    """The view, if this very content was sealed already; also after the commit. Raises `manifest_conflict`."""
    if shard is None or shard.state != ShardState.SEALED or writing.checkpoint.state == CheckpointState.ABORTED:
        return None
    refuse_other_content(shard, request)
    return current_checkpoint_view(session, writing.project.name, writing.run.name, writing.checkpoint)


def _verify_the_rest(context: ServiceContext, look: _Look) -> list[Verdict]:
    assert look.negotiated is not None
    pending = [
        Upload(
            each.copy.id,
            object_key(look.project_id, digest, each.copy),
            each.copy.stored_bytes,
            each.copy.stored_digest,
        )
        for digest, each in look.negotiated.items()
        if each.copy.state == CopyState.PENDING
    ]
    return verify_uploads(context.database, context.store, pending)


def _refuse_incomplete(look: _Look, verdicts: list[Verdict]) -> None:
    """Every chunk must be in the store as the store itself says (rule seal-only-negotiated)."""
    assert look.negotiated is not None
    why = {v.upload.key.digest: v.detail for v in verdicts if v.finding is not Finding.ARRIVED}
    for digest, each in look.negotiated.items():
        if each.copy.state != CopyState.PENDING and not usable_by(each.copy, look.attempt_id):
            why[digest] = f"its copy is {each.copy.state}"
    if not why:
        return
    first = next(iter(why))
    raise ProblemError(
        ProblemCode.INCOMPLETE_CHECKPOINT,
        f"{counted(len(why), 'chunk')} of this shard cannot be used (the first: {first}, {why[first]}). "
        "Offer them again, send them and seal again.",
        digests=list(why)[:_SHOWN_MISSING],
        count=len(why),
    )


def _settle(
    context: ServiceContext,
    caller: Principal,
    checkpoint_id: str,
    rank: int,
    request: SealShard,
    *,
    list_id: int,
    deduplicated: int,
) -> CheckpointView | None:
    """None: the chunk list was collected meanwhile, before this shard referred to it."""
    refusal: ProblemError | None = None
    with context.database.transaction() as session:
        # The checkpoint's row FOR UPDATE: two last seals at once would each count the other as missing.
        writing = begin_writing(session, caller, checkpoint_id, request, context.epoch, lock=True)
        shard = locked_shard(session, writing.checkpoint, rank)
        view = _sealed_before(session, writing, shard, request)
        if view is not None:
            return view
        refuse_unless_uploading(writing.checkpoint)
        # KEY SHARE holds the collector off until this shard refers to the list.
        held = select(ChunkList.id).where(ChunkList.id == list_id).with_for_update(read=True, key_share=True)
        if session.scalar(held) is None:
            return None
        now = database_now(session)
        shard.state = ShardState.SEALED
        shard.chunk_list_id = list_id
        shard.sealed_at = now
        shard.uploaded_bytes = sent_bytes(session, shard)
        shard.deduplicated_bytes = deduplicated
        shard.digest = request.digest
        shard.index_ordinal, shard.layout_ordinal = request.index.shard, request.index.layout
        shard.summary = request.summary
        session.flush()
        # From here on the chunk list is the reference.
        session.execute(
            delete(ShardChunk).where(ShardChunk.shard_id == shard.id), execution_options={"synchronize_session": False}
        )
        keep_alive(session, writing, context.settings)
        try:
            complete_if_whole(session, writing, context.store_id, now)
        except ProblemError as problem:
            # Another rank's chunk was lost since it sealed, or has another size there; nobody could ever complete this.
            gone = problem.code is ProblemCode.CHUNK_GONE
            cause = AbortCause.CHUNK_GONE if gone else AbortCause.RANK_FAILED
            abort(writing.checkpoint, problem.detail, now, cause=cause)
            refusal = problem
        session.flush()
        view = current_checkpoint_view(session, writing.project.name, writing.run.name, writing.checkpoint)
    if view.state != CheckpointState.UPLOADING:
        context.notifier.notify(checkpoint_id)
    if refusal is not None:
        raise refusal
    return view


# A rank says that its share failed: the checkpoint is aborted at once and names the rank (rule no-failure-after-seal).


def fail_shard(
    context: ServiceContext, caller: Principal, checkpoint_id: str, rank: int, request: FailShard
) -> CheckpointView:
    """Raises `shard_sealed` once the rank has sealed: a lost seal reply must not abort a good checkpoint."""
    with context.database.transaction() as session:
        writing = begin_writing(session, caller, checkpoint_id, request, context.epoch, lock=True)
        checkpoint = writing.checkpoint
        if checkpoint.state != CheckpointState.ABORTED:
            refuse_unless_uploading(checkpoint)
            shard = locked_shard(session, checkpoint, rank)
            if shard.state == ShardState.SEALED:
                raise ProblemError(
                    ProblemCode.SHARD_SEALED,
                    f"Rank {rank} has sealed its shard of step {checkpoint.step} and cannot report failure any more. "
                    "Its share is safe; wait for the checkpoint to commit.",
                    rank=rank,
                )
            shard.state = ShardState.FAILED
            abort(
                checkpoint,
                f"rank {rank} failed: {without_secrets(request.reason)}",
                database_now(session),
                cause=AbortCause.RANK_FAILED,
                rank=rank,
            )
            session.flush()
        view = current_checkpoint_view(session, writing.project.name, writing.run.name, checkpoint)
    context.notifier.notify(checkpoint_id)
    return view
