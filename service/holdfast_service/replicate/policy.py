"""Which checkpoints get a copy in a second store: a row for each committed checkpoint and second store.

The controller makes it after the commit, and judges it anew when the policy or the checkpoint has changed: a pass asks
for what is due, and the lag is a cheap query. What the policy no longer wants keeps the chunks that it has there: only
the checkpoint's end takes them away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import Select, and_, case, delete, exists, func, or_, select, text
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.copies import CopyPolicy
from holdfast_protocol.policies.policy import PolicyError, PolicyKind, read_policy
from holdfast_protocol.states import CheckpointState, Health
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import is_in
from holdfast_service.db.dialect import insert_absent
from holdfast_service.db.tables.core import COPY_DAMAGED, Checkpoint, Chunk, ChunkListEntry, Copy, Run, Shard
from holdfast_service.db.tables.operations import CheckpointCopy, Policy
from holdfast_service.lineage.best_and_proven import best_of
from holdfast_service.policies.policies import StoredPolicy, effective_policy


@dataclass(frozen=True)
class Facts:
    """What a policy can ask about. `metrics` as the catalog keeps them: name -> {"value": …, "nonfinite": …}."""

    checkpoint_id: str
    step: int
    kind: str
    labels: tuple[str, ...]
    metrics: dict[str, Any]
    healthy: bool = True


def wants(policy: CopyPolicy, facts: Facts, best: frozenset[str]) -> bool:
    """Whether a policy asks for a copy of a checkpoint. Pure. `best`: the ids of the checkpoints that are among the
    best now."""
    return (
        policy.wants_everything
        or not set(policy.labels).isdisjoint(facts.labels)
        or facts.kind in policy.kinds
        or (policy.every_steps is not None and facts.step % policy.every_steps == 0)
        or facts.checkpoint_id in best
    )


_ROWS = 500
_OVER = (CheckpointState.DELETING, CheckpointState.DELETED)

_log = structlog.get_logger("holdfast.replicate")


def judge(context: ServiceContext, store_id: int) -> int:
    """Makes and judges the rows that are due, at most so many at once; how many."""
    return context.database.run(lambda session: _judge(session, store_id))


def _judge(session: Session, store_id: int) -> int:
    _forget_what_is_gone(session, store_id)
    due = session.execute(_due(store_id)).all()
    by_run: dict[tuple[str, str], list[Checkpoint]] = defaultdict(list)
    for checkpoint, project_id in due:
        by_run[project_id, checkpoint.run_id].append(checkpoint)
    for (project_id, run_id), found in sorted(by_run.items(), key=lambda item: item[0]):
        policy = effective_policy(session, PolicyKind.COPIES, project_id, run_id)
        _judge_run(session, store_id, run_id, found, policy=policy)
    return len(due)


def reopen_damaged(context: ServiceContext, store_id: int) -> int:
    """What was whole there and lost a chunk since is due again; how many checkpoints."""
    lost = select(Copy.chunk_id).where(
        Copy.store_id == store_id, text(f"({COPY_DAMAGED})"), ~is_in(store_id, Copy.chunk_id)
    )
    lists = select(ChunkListEntry.chunk_list_id).where(ChunkListEntry.chunk_id.in_(lost))
    # What is due already is left out before the limit: else the first portion would keep out all the others for good.
    with context.database.transaction() as session:
        rows = session.scalars(
            select(CheckpointCopy)
            .where(
                CheckpointCopy.store_id == store_id,
                CheckpointCopy.complete_at.is_not(None),
                CheckpointCopy.checkpoint_id.in_(select(Shard.checkpoint_id).where(Shard.chunk_list_id.in_(lists))),
            )
            .order_by(CheckpointCopy.checkpoint_id)
            .limit(_ROWS)
        ).all()
        bytes_of = _bytes_among(session, lost, [row.checkpoint_id for row in rows])
        for row in rows:
            row.complete_at = None
            row.missing_bytes = bytes_of.get(row.checkpoint_id, 0)
        return len(rows)


def _bytes_among(session: Session, chunk_ids: Select[int], checkpoint_ids: Sequence[str]) -> dict[str, int]:
    """By checkpoint, the bytes of its distinct chunks that are among these."""
    found = (
        select(Shard.checkpoint_id, Chunk.id, Chunk.bytes)
        .join(ChunkListEntry, ChunkListEntry.chunk_list_id == Shard.chunk_list_id)
        .join(Chunk, Chunk.id == ChunkListEntry.chunk_id)
        .where(Shard.checkpoint_id.in_(checkpoint_ids), Chunk.id.in_(chunk_ids))
        .distinct()
        .subquery()
    )
    sums = session.execute(select(found.c.checkpoint_id, func.sum(found.c.bytes)).group_by(found.c.checkpoint_id))
    return {checkpoint_id: int(size) for checkpoint_id, size in sums}


def _due(store_id: int) -> Any:
    """Committed checkpoints whose row is absent or was judged by another policy or version than the present ones."""
    of_run, of_project = aliased(Policy), aliased(Policy)
    policy_at = case((of_run.id.is_not(None), of_run.updated_at), else_=of_project.updated_at)
    row = CheckpointCopy
    judged_otherwise = or_(row.policy_at.is_distinct_from(policy_at), row.checkpoint_version != Checkpoint.version)
    return (
        select(Checkpoint, Run.project_id)
        .join(Run, Run.id == Checkpoint.run_id)
        .outerjoin(
            of_run,
            and_(of_run.project_id == Run.project_id, of_run.run_id == Run.id, of_run.kind == PolicyKind.COPIES),
        )
        .outerjoin(
            of_project,
            and_(
                of_project.project_id == Run.project_id,
                of_project.run_id == "",
                of_project.kind == PolicyKind.COPIES,
            ),
        )
        .outerjoin(row, and_(row.checkpoint_id == Checkpoint.id, row.store_id == store_id))
        .where(
            Checkpoint.state == CheckpointState.COMMITTED,
            or_(
                and_(policy_at.is_not(None), or_(row.checkpoint_id.is_(None), judged_otherwise)),
                and_(policy_at.is_(None), row.policy_at.is_not(None)),
            ),
        )
        .order_by(Checkpoint.committed_at.desc(), Checkpoint.id)
        .limit(_ROWS)
    )


def _judge_run(
    session: Session, store_id: int, run_id: str, checkpoints: Sequence[Checkpoint], *, policy: StoredPolicy | None
) -> None:
    document = _document(policy)
    best: frozenset[str] = frozenset()
    if document is not None and document.best is not None:
        newest_first = (
            select(Checkpoint)
            .where(Checkpoint.run_id == run_id, Checkpoint.state == CheckpointState.COMMITTED)
            .order_by(Checkpoint.step.desc(), Checkpoint.attempt_number.desc(), Checkpoint.id)
        )
        found = best_of((_facts(each) for each in session.scalars(newest_first)), document.best, document.best.n)
        best = frozenset(each.checkpoint_id for each in found)
        checkpoints = [*checkpoints, *_best_since(session, store_id, best - {each.id for each in checkpoints})]
    insert_absent(
        session,
        CheckpointCopy,
        [
            {
                "checkpoint_id": each.id,
                "store_id": store_id,
                "wanted": False,
                "checkpoint_version": 0,
                # What it lacks is counted when its turn comes. It is at most all of it.
                "missing_bytes": each.chunk_bytes,
            }
            for each in sorted(checkpoints, key=lambda each: each.id)
        ],
    )
    rows = {
        row.checkpoint_id: row
        for row in session.scalars(
            select(CheckpointCopy)
            .where(
                CheckpointCopy.store_id == store_id,
                CheckpointCopy.checkpoint_id.in_([each.id for each in checkpoints]),
            )
            .order_by(CheckpointCopy.checkpoint_id)
            .with_for_update(),
            execution_options={"populate_existing": True},
        )
    }
    for each in checkpoints:
        row = rows[each.id]
        row.wanted = document is not None and wants(document, _facts(each), best)
        row.policy_at = None if policy is None else policy.updated_at
        row.checkpoint_version = each.version
        row.retry_at = None


def _best_since(session: Session, store_id: int, checkpoint_ids: frozenset[str]) -> Sequence[Checkpoint]:
    """Those of them that were not among the best when they were judged: another one's metric was changed."""
    unwanted = exists().where(
        CheckpointCopy.checkpoint_id == Checkpoint.id,
        CheckpointCopy.store_id == store_id,
        CheckpointCopy.wanted.is_(False),
    )
    return session.scalars(select(Checkpoint).where(Checkpoint.id.in_(checkpoint_ids), unwanted)).all()


def _document(policy: StoredPolicy | None) -> CopyPolicy | None:
    if policy is None:
        return None
    try:
        document = read_policy(PolicyKind.COPIES, policy.document)
    except PolicyError as error:
        _log.error("policy_refused", project_id=policy.project_id, run_id=policy.run_id, reason=str(error))
        return None
    assert isinstance(document, CopyPolicy)
    return document


def _facts(checkpoint: Checkpoint) -> Facts:
    return Facts(
        checkpoint_id=checkpoint.id,
        step=checkpoint.step,
        kind=checkpoint.kind,
        labels=tuple(checkpoint.labels),
        metrics=checkpoint.metrics,
        healthy=checkpoint.health == Health.OK,
    )


def _forget_what_is_gone(session: Session, store_id: int) -> None:
    gone = (
        select(CheckpointCopy.checkpoint_id)
        .join(Checkpoint, Checkpoint.id == CheckpointCopy.checkpoint_id)
        .where(CheckpointCopy.store_id == store_id, Checkpoint.state.in_(_OVER))
        .limit(_ROWS)
    )
    ids = session.scalars(gone).all()
    if ids:
        session.execute(
            delete(CheckpointCopy).where(CheckpointCopy.store_id == store_id, CheckpointCopy.checkpoint_id.in_(ids)),
            execution_options={"synchronize_session": False},
        )
