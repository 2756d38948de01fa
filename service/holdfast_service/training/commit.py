"""The commit: if all ranks have sealed, the checkpoint becomes a restore point; else it can be given up."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import exists, func, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import AbortCheckpoint, CheckpointView
from holdfast_protocol.digests import checkpoint_digest
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import AbortCause, CheckpointState, Health, Scope, ShardState
from holdfast_protocol.text import without_secrets
from holdfast_protocol.webhooks import WebhookEvent
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import is_usable_by
from holdfast_service.db.dialect import database_now
from holdfast_service.db.memory import note_change
from holdfast_service.db.tables.core import Attempt, Checkpoint, Chunk, ChunkListEntry, Copy, Shard
from holdfast_service.errors import ProblemError
from holdfast_service.lineage.lineage import first_components
from holdfast_service.runs.find import checkpoint_by_id
from holdfast_service.runs.views import current_checkpoint_view
from holdfast_service.training.fencing import Writing, begin_writing
from holdfast_service.webhooks.outbox import leave_calls

# Which state of a checkpoint may follow which. Pure; whoever changes one asks here first.

CHECKPOINT: dict[CheckpointState, frozenset[CheckpointState]] = {
    CheckpointState.UPLOADING: frozenset({CheckpointState.COMMITTED, CheckpointState.ABORTED}),
    CheckpointState.COMMITTED: frozenset({CheckpointState.TRASHED}),
    CheckpointState.ABORTED: frozenset(),
    CheckpointState.TRASHED: frozenset({CheckpointState.COMMITTED, CheckpointState.DELETING}),
    CheckpointState.DELETING: frozenset({CheckpointState.DELETED}),
    CheckpointState.DELETED: frozenset(),
}


def may_become(current: CheckpointState, new: CheckpointState) -> bool:
    return new in CHECKPOINT[current]


# Giving a checkpoint up: by its job, by a rank that failed, by a newer attempt, by the reaper.
#
# The row must be locked by the caller; whoever aborts tells the notifier after the commit.


def abort(checkpoint: Checkpoint, reason: str, now: datetime, *, cause: AbortCause, rank: int | None = None) -> None:
    """`rank` is the one to blame, if it is known. The same step can be begun anew afterwards (rule
    one-checkpoint-per-step)."""
    if not may_become(CheckpointState(checkpoint.state), CheckpointState.ABORTED):
        raise ValueError(f"a checkpoint that is {checkpoint.state} cannot be aborted")
    checkpoint.state = CheckpointState.ABORTED
    checkpoint.aborted_at = now
    checkpoint.abort_reason = reason
    checkpoint.abort_rank = rank
    checkpoint.abort_cause = cause
    checkpoint.version += 1


# What the ranks said, put together at the commit. Pure (rule metrics-from-rank-0).

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
    """Why nobody should resume from it; None if it is healthy. `verdicts`: a HealthVerdict for each rank that gave
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


# The commit itself: if all ranks have sealed, the checkpoint becomes a restore point, in the last seal's transaction.
#
# The caller holds the checkpoint's row FOR UPDATE. Counting happens in a later statement than that lock, under READ
# COMMITTED: so the last of two simultaneous seals sees the other's (rule commit-before-reply).

_SHOWN_DIGESTS = 20


def complete_if_whole(session: Session, writing: Writing, store_id: int, now: datetime) -> bool:
    """Whether it committed. Raises `chunk_gone` if a chunk that a rank sealed is not to be relied on any more, and
    `invalid_request` if two ranks give one chunk two sizes."""
    checkpoint = writing.checkpoint
    sealed = session.scalar(
        select(func.count()).where(Shard.checkpoint_id == checkpoint.id, Shard.state == ShardState.SEALED)
    )
    if sealed != checkpoint.world_size:
        return False
    _refuse_lost_chunks(session, checkpoint, store_id)
    shards = session.scalars(
        select(Shard).where(Shard.checkpoint_id == checkpoint.id).order_by(Shard.rank),
        execution_options={"populate_existing": True},
    ).all()
    _fill(checkpoint, shards)
    checkpoint.missing_components = _missing_components(session, checkpoint, shards)
    checkpoint.chunk_bytes = _distinct_chunk_bytes(session, checkpoint)
    checkpoint.state = CheckpointState.COMMITTED
    checkpoint.committed_at = now
    checkpoint.version += 1
    if not checkpoint.detached:
        _cut_the_line(session, writing.attempt, now)
    if checkpoint.health == Health.DIVERGED:
        _tell_diverged(session, writing)
    note_change(session, f"step {checkpoint.step} of {writing.project.name}/{writing.run.name} was committed")
    return True


def _tell_diverged(session: Session, writing: Writing) -> None:
    leave_calls(
        session,
        WebhookEvent.CHECKPOINT_DIVERGED,
        writing.checkpoint.id,
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


# The job gives a checkpoint up. Repeating it is fine; what is committed stays committed.


def abort_checkpoint(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: AbortCheckpoint
) -> CheckpointView:
    """Raises `checkpoint_conflict` if it has committed meanwhile."""
    reason = without_secrets(request.reason)
    with context.database.transaction() as session:
        writing = begin_writing(session, caller, checkpoint_id, request, context.epoch, lock=True)
        checkpoint = writing.checkpoint
        if checkpoint.state == CheckpointState.UPLOADING:
            abort(checkpoint, reason, database_now(session), cause=AbortCause.JOB)
            record_event(
                session,
                Actor.person(caller),
                "checkpoint.abort",
                project_id=writing.project.id,
                run_id=writing.run.id,
                checkpoint_id=checkpoint_id,
                reason=reason,
            )
            session.flush()
        elif checkpoint.state != CheckpointState.ABORTED:
            raise ProblemError(
                ProblemCode.CHECKPOINT_CONFLICT,
                f"Step {checkpoint.step} is {checkpoint.state} and cannot be aborted any more. Delete it, if it is not "
                "wanted.",
                checkpoint_id=checkpoint_id,
                state=checkpoint.state,
            )
        view = current_checkpoint_view(session, writing.project.name, writing.run.name, checkpoint)
    context.notifier.notify(checkpoint_id)
    return view


# One checkpoint, now. With `?wait=` the endpoint waits for the notifier in between.


def read_checkpoint(context: ServiceContext, caller: Principal, checkpoint_id: str) -> CheckpointView:
    """For tokens that read and for those that train: a job waits for its own commit. Raises `checkpoint_not_found`."""
    if Scope.TRAIN not in caller.scopes:
        caller.check_scope(Scope.READ)
    with context.database.read() as session:
        project, run, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
        return current_checkpoint_view(session, project.name, run.name, checkpoint)
