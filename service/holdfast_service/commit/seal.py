"""Seal a shard: a rank says that its share is complete. The seal that completes the world commits (protocol rule 9).

1. look     the request against itself, the checkpoint, what was negotiated; a repeated seal ends here
2. verify   what nobody has reported as finished is asked of the store, outside of any transaction
3. list     the chunk list gets its row, shared by all shards that have this very list
4. settle   under the checkpoint's lock: the shard is sealed, the seals are counted, the last one commits
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import CheckpointView, SealShard
from holdfast_protocol.counted import counted
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import AbortCause, CheckpointState, CopyState, ShardState
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.aborting import abort
from holdfast_service.catalog.chunk_lists import ensure_chunk_list
from holdfast_service.catalog.copies import object_key, usable_by
from holdfast_service.catalog.shard_rows import locked_shard, shard_of
from holdfast_service.catalog.tables import ChunkList, Shard, ShardChunk
from holdfast_service.catalog.verification import Finding, Upload, Verdict, verify_uploads
from holdfast_service.catalog.views import current_checkpoint_view
from holdfast_service.catalog.writing import Writing, begin_writing, keep_alive, refuse_unless_uploading
from holdfast_service.clock import database_now
from holdfast_service.commit.complete import complete_if_whole
from holdfast_service.commit.negotiated import (
    Negotiated,
    chunks_negotiated,
    deduplicated_bytes,
    sent_bytes,
)
from holdfast_service.commit.seal_content import check_seal, check_sizes, refuse_other_content, shard_content
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError

_SHOWN_DIGESTS = 100
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
    """Every chunk must be in the store as the store itself says (protocol rule 10)."""
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
        digests=list(why)[:_SHOWN_DIGESTS],
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
        for name, value in shard_content(request).items():
            setattr(shard, name, value)
        if request.blocked_seconds is not None:
            blocked = writing.checkpoint.blocked_seconds or 0.0
            writing.checkpoint.blocked_seconds = max(blocked, request.blocked_seconds)
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
