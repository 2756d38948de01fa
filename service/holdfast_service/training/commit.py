"""The commit: the transaction of seals. The last seal of a world makes the checkpoint a restore point.

`commit_seals` is the whole transaction, `complete_if_whole` what the last seal adds to it. `training/seal.py` comes
before: it has checked the seals and asked the store for what is pending.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import bindparam, delete, exists, func, select, update
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value

from holdfast_protocol.checkpoints import CheckpointView, SealShard, ShardContent
from holdfast_protocol.digests import checkpoint_digest
from holdfast_protocol.events import EventType
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import AbortCause, CheckpointState, Health, ShardState
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import is_usable_by
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import note_change
from holdfast_service.db.tables.core import (
    Attempt,
    Checkpoint,
    Chunk,
    ChunkListEntry,
    Copy,
    Shard,
    ShardChunk,
)
from holdfast_service.errors import ProblemError
from holdfast_service.events.announce import announce
from holdfast_service.runs.views import checkpoint_view, current_checkpoint_view, first_components, ranks_not_sealed
from holdfast_service.training.abort import abort
from holdfast_service.training.fencing import (
    Writing,
    begin_writing,
    keep_alive,
    locked_shards,
    refuse_unless_uploading,
)


class Arrived(NamedTuple):
    """What a shard consists of, as its transaction has written it."""

    list_id: int
    sent_bytes: int
    deduplicated_bytes: int


def commit_seals(
    context: ServiceContext,
    caller: Principal,
    checkpoint_id: str,
    seals: Mapping[int, SealShard],
    *,
    arrive: Callable[[Session, datetime], Mapping[int, Arrived]],
) -> CheckpointView:
    """What the checkpoint is then. `seals`: by rank, under one fence. `arrive` gives what each has, by rank; it is
    called in the transaction, maybe more than once. Raises what `complete_if_whole` does, with the checkpoint
    aborted."""
    fence = next(iter(seals.values()))

    def sealed(session: Session) -> tuple[Callable[[], CheckpointView], ProblemError | None]:
        # Not the checkpoint's row: all ranks' seals would wait for each other from here on.
        writing = begin_writing(session, caller, checkpoint_id, fence, context.epoch)
        shards = locked_shards(session, writing.checkpoint, seals)
        left = not_sealed_before(session, writing, shards, seals)
        if not left:
            view = current_checkpoint_view(session, writing.project.name, writing.run.name, writing.checkpoint)
            return lambda: view, None
        refuse_unless_uploading(writing.checkpoint)
        arrived = arrive(session, writing.now)
        for rank, request in left.items():
            _seal(shards[rank], request, arrived[rank], writing.now)
        session.flush()
        # From here on the chunk lists are the reference.
        session.connection().execute(_DROPPED, {"shards": [shards[rank].id for rank in left]})
        missing = ranks_not_sealed(session, writing.checkpoint)
        refusal: ProblemError | None = None
        try:
            complete_if_whole(session, writing, len(left), context.store_id)
        except ProblemError as problem:
            if problem.code not in _NEVER_COMPLETE:
                raise
            # Another rank's chunk was lost since it sealed, or has another size there: no rank could ever complete it.
            abort(
                session, writing.checkpoint, problem.detail, database_now(session), cause=_NEVER_COMPLETE[problem.code]
            )
            refusal = problem
        session.flush()
        keep_alive(session, writing, context.settings)  # last: the checkpoint's row is locked before the attempt's
        return partial(_view_after_seal, writing, missing), refusal

    made, refusal = context.database.run(sealed)
    view = made()
    if view.state != CheckpointState.UPLOADING:
        context.notifier.notify(checkpoint_id)
    if refusal is not None:
        raise refusal
    return view


def _view_after_seal(writing: Writing, missing: Sequence[int]) -> CheckpointView:
    """Made when the transaction is over: until then all other seals wait for the checkpoint's row. `missing`: the ranks
    that had not sealed when this one did."""
    checkpoint = writing.checkpoint
    if checkpoint.committed_at is not None:
        missing = ()
    return checkpoint_view(writing.project.name, writing.run.name, checkpoint, checkpoint.sealed_ranks, missing)


_NEVER_COMPLETE = {
    ProblemCode.CHUNK_GONE: AbortCause.CHUNK_GONE,
    ProblemCode.INVALID_REQUEST: AbortCause.RANK_FAILED,
}


def _seal(shard: Shard, request: SealShard, arrived: Arrived, now: datetime) -> None:
    shard.uploaded_bytes = arrived.sent_bytes
    shard.state = ShardState.SEALED
    shard.chunk_list_id = arrived.list_id
    shard.sealed_at = now
    shard.deduplicated_bytes = arrived.deduplicated_bytes
    shard.digest = request.digest
    shard.index_ordinal, shard.layout_ordinal = request.index.shard, request.index.layout
    shard.summary = request.summary


_DROPPED = delete(ShardChunk).where(ShardChunk.shard_id.in_(bindparam("shards", expanding=True)))


def not_sealed_before(
    session: Session, writing: Writing, shards: Mapping[int, Shard], seals: Mapping[int, SealShard]
) -> dict[int, SealShard]:
    """`seals`, by rank, without those whose very content was sealed already; also after the commit. Raises
    `manifest_conflict`."""
    sealed = {rank: shard for rank, shard in shards.items() if shard.state == ShardState.SEALED}
    if sealed:
        session.refresh(writing.checkpoint)  # the seal that a shard's lock has waited for may have committed it
    if not sealed or writing.checkpoint.state == CheckpointState.ABORTED:
        return dict(seals)
    for rank, shard in sealed.items():
        _refuse_other_content(shard, seals[rank])
    return {rank: request for rank, request in seals.items() if rank not in sealed}


def _refuse_other_content(shard: Shard, request: SealShard) -> None:
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


# What the ranks said, put together. Pure (rule metrics-from-rank-0).

_SHOWN = 5


def merge_components(shards: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Name -> kind and the bytes of all ranks together. `shards` in rank order: the first rank's kind counts."""
    merged: dict[str, dict[str, Any]] = {}
    for components in shards:
        for name, component in components.items():
            known = merged.setdefault(name, {"kind": component["kind"], "logical_bytes": 0})
            known["logical_bytes"] += component["logical_bytes"]
    return dict(sorted(merged.items()))


def missing_components(declared: Collection[str], has: Collection[str], dropped: Collection[str]) -> list[str]:
    """What the run's first checkpoint has and this one has not, without what was left out on purpose."""
    return sorted(set(declared) - set(has) - set(dropped))


def diverged_reason(
    ranks_not_finite: Sequence[int],
    metrics: Mapping[str, Mapping[str, Any]],
    verdicts: Mapping[int, Mapping[str, Any]],
) -> str | None:
    """Why no job should resume from it; None if it is healthy. `verdicts`: a HealthVerdict for each rank that gave
    one. Where rank 0 gave one, the trainer's rule has looked at the metrics; else none may be other than finite."""
    told = {rank: str(said["reason"]) for rank, said in verdicts.items() if not said["healthy"]}
    silent = [rank for rank in ranks_not_finite if not told.get(rank)]
    reasons = [f"NaN or infinity in the state of {_ranks(silent)}"] if silent else []
    shown = list(dict.fromkeys(told.values()))[:_SHOWN]
    for reason in shown:
        ranks = [rank for rank, same in told.items() if same == reason]
        where = "" if ranks == [0] else f", on {_ranks(ranks)}"
        reasons.append((reason or "the trainer's rule says so") + where)
    if more := sum(reason not in shown for reason in told.values()):
        reasons.append(f"and {more} more rank{'s' if more > 1 else ''}")
    return "; ".join(reasons + ([] if 0 in verdicts else _not_finite(metrics))) or None


def _not_finite(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    names = sorted(name for name, metric in metrics.items() if metric.get("nonfinite") is not None)
    listed = ", ".join(f"{name} is {metrics[name]['nonfinite']}" for name in names[:_SHOWN])
    return [f"the metric {listed}" + (" and more" if len(names) > _SHOWN else "")] if names else []


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", …" if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


# If all ranks have sealed, the checkpoint becomes a restore point.
#
# Each call adds its seals to the checkpoint's count, as late in its transaction as can be: the others wait for that row
# from there to its commit. Of two last seals at once the second so finds the first counted (rule commit-before-reply).

_SHOWN_DIGESTS = 20


_COUNTED = (
    update(Checkpoint)
    .where(Checkpoint.id == bindparam("checkpoint"), Checkpoint.state == CheckpointState.UPLOADING)
    .values(sealed_ranks=Checkpoint.sealed_ranks + bindparam("seals"))
    .returning(Checkpoint.sealed_ranks)
)


def complete_if_whole(session: Session, writing: Writing, seals: int, store_id: int) -> bool:
    """Counts so many seals. Whether the checkpoint committed. Raises `checkpoint_aborted` if it was given up
    meanwhile, `chunk_gone` if a chunk that a rank sealed is not to be relied on any more, and `invalid_request` if two
    ranks give one chunk two sizes."""
    checkpoint = writing.checkpoint
    sealed = session.connection().execute(_COUNTED, {"checkpoint": checkpoint.id, "seals": seals}).scalar_one_or_none()
    if sealed is not None and sealed < checkpoint.world_size:
        set_committed_value(checkpoint, "sealed_ranks", sealed)
        return False
    session.refresh(checkpoint)  # behind its lock
    refuse_unless_uploading(checkpoint)
    shards = session.scalars(
        select(Shard)
        .where(Shard.checkpoint_id == checkpoint.id, Shard.state == ShardState.SEALED)
        .order_by(Shard.rank),
        execution_options={"populate_existing": True},
    ).all()
    if len(shards) < checkpoint.world_size:  # the count was wrong, and the shards are right
        checkpoint.sealed_ranks = len(shards)
        return False
    now = database_now(session)
    _refuse_lost_chunks(session, checkpoint, store_id)
    checkpoint.chunk_bytes = _distinct_chunk_bytes(session, checkpoint)
    _fill(checkpoint, shards)
    checkpoint.missing_components = _missing_components(session, checkpoint, shards)
    checkpoint.state = CheckpointState.COMMITTED
    checkpoint.committed_at = now
    checkpoint.version += 1
    if not checkpoint.detached:
        _cut_the_line(session, writing.attempt, now)
    _tell(session, writing, EventType.CHECKPOINT_COMMITTED, now)
    if checkpoint.health == Health.DIVERGED:
        _tell(session, writing, EventType.CHECKPOINT_DIVERGED, now)
    note_change(session, f"step {checkpoint.step} of {writing.project.name}/{writing.run.name} was committed")
    return True


def _tell(session: Session, writing: Writing, event: EventType, at: datetime) -> None:
    announce(
        session,
        event,
        writing.checkpoint.id,
        at,
        project_id=writing.project.id,
        run_id=writing.run.id,
        attempt=writing.attempt.number,
        step=writing.checkpoint.step,
        checkpoint_id=writing.checkpoint.id,
        reason=writing.checkpoint.health_reason,
    )


def _refuse_lost_chunks(session: Session, checkpoint: Checkpoint, store_id: int) -> None:
    usable = exists().where(Copy.chunk_id == ChunkListEntry.chunk_id, is_usable_by(store_id, checkpoint.attempt_id))
    lost = session.execute(
        select(Shard.rank, Chunk.digest)
        .join(ChunkListEntry, ChunkListEntry.chunk_list_id == Shard.chunk_list_id)
        .join(Chunk, Chunk.id == ChunkListEntry.chunk_id)
        .where(Shard.checkpoint_id == checkpoint.id, ~usable)
        .order_by(Shard.rank, ChunkListEntry.ordinal)
        .limit(_SHOWN_DIGESTS)
    ).all()
    if lost:
        raise ProblemError(
            ProblemCode.CHUNK_GONE,
            f"The chunk {lost[0].digest} of rank {lost[0].rank} is not readable any more, so step {checkpoint.step} "
            "cannot be committed. Save again.",
            checkpoint_id=checkpoint.id,
            rank=lost[0].rank,
            digests=[row.digest for row in lost],
        )


def _fill(checkpoint: Checkpoint, shards: Sequence[Shard]) -> None:
    metrics: dict[str, Any] = shards[0].metrics or {}
    checkpoint.digest = checkpoint_digest([str(shard.digest) for shard in shards])
    checkpoint.metrics = metrics
    checkpoint.components = merge_components([shard.components for shard in shards])
    checkpoint.logical_bytes = sum(shard.logical_bytes for shard in shards)
    checkpoint.uploaded_bytes = sum(shard.uploaded_bytes for shard in shards)
    checkpoint.deduplicated_bytes = sum(shard.deduplicated_bytes for shard in shards)
    blocked = [shard.blocked_seconds for shard in shards if shard.blocked_seconds is not None]
    checkpoint.blocked_seconds = max(blocked, default=None)
    said = {shard.rank: shard.verdict for shard in shards if shard.verdict is not None}
    reason = diverged_reason([shard.rank for shard in shards if not shard.finite], metrics, said)
    if reason is not None:
        checkpoint.health = Health.DIVERGED
        checkpoint.health_reason = reason


def _missing_components(session: Session, checkpoint: Checkpoint, shards: Sequence[Shard]) -> list[str] | None:
    """Null where there is none; an empty list would only be another word for it."""
    declared = first_components(session, checkpoint.run_id)
    dropped = shards[0].dropped_components or ()
    return missing_components(declared, checkpoint.components, dropped) or None


def _distinct_chunk_bytes(session: Session, checkpoint: Checkpoint) -> int:
    """Raises `invalid_request`: within a checkpoint, readers and records name a chunk by its digest alone."""
    distinct = (
        select(ChunkListEntry.chunk_id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .where(Shard.checkpoint_id == checkpoint.id)
    )
    of_checkpoint = Chunk.id.in_(distinct)
    total, chunks, digests = session.execute(
        select(func.coalesce(func.sum(Chunk.bytes), 0), func.count(), func.count(Chunk.digest.distinct())).where(
            of_checkpoint
        )
    ).one()
    if digests < chunks:
        twice = select(Chunk.digest).where(of_checkpoint).group_by(Chunk.digest).having(func.count() > 1).limit(1)
        digest = session.execute(twice).scalar_one()
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"Two ranks of step {checkpoint.step} give the chunk {digest} two sizes, so the step cannot be committed. "
            "One content has one size: hash and measure the same buffer, and save again.",
            digest=digest,
        )
    return int(total)


def _cut_the_line(session: Session, attempt: Attempt, now: datetime) -> None:
    """The attempt's first commit makes its line the run's (rule latest-follows-lineage)."""
    session.execute(
        update(Attempt).where(Attempt.id == attempt.id, Attempt.cut_at.is_(None)).values(cut_at=now),
        execution_options={"synchronize_session": False},
    )
