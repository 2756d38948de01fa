"""What would move when, and how many bytes: a dry run, net of sharing. Nothing is written.

A chunk moves when the last of the checkpoints that need it wants to: its bytes stand at that one, in this run or in
another. A copy that is there already is not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState, CopyState
from holdfast_protocol.tiers import ClassTerms, TierPlan, TierPlanRow, TierPlanTotal, TierPolicy, coldness
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import PROVEN
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, ChunkListEntry, Copy, Run, Shard
from holdfast_service.runs.views import run_named
from holdfast_service.stores.base import ClassedStore
from holdfast_service.tiers.rules import Subject, Wish, moves_at, next_move, policy_of, subjects_of, wishes

_NEVER = datetime.max.replace(tzinfo=UTC)
_GIB = 1024**3


@dataclass
class _Run:
    policy: TierPolicy | None
    subjects: dict[str, Subject]
    wishes: dict[str, Wish]


@dataclass
class _Moving:
    """By checkpoint of this run: the bytes that move with it."""

    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    kept_by_others: int = 0


def plan_run(context: ServiceContext, caller: Principal, project: str, run: str) -> TierPlan:
    """Raises `forbidden`, `project_not_found` and `run_not_found`."""
    with context.database.read() as session:
        owner, found = run_named(session, caller, project, run)
        now = database_now(session)
        stored, _ = policy_of(session, owner.id, found.id)
        runs = _runs(session, owner.id, now)
        mine = runs[found.id]
        rows: list[TierPlanRow] = []
        moves = {
            subject.id: None if mine.policy is None else next_move(mine.policy, subject, mine.wishes[subject.id])
            for subject in mine.subjects.values()
        }
        wanted = {each: move[0].target for each, move in moves.items() if move is not None}
        moving = _moving(session, context, owner.id, found.id, runs=runs, wanted=wanted)
        for subject in mine.subjects.values():
            move = moves[subject.id]
            rows.append(
                TierPlanRow(
                    checkpoint_id=subject.id,
                    step=subject.step,
                    attempt=subject.attempt,
                    tier=subject.tier,
                    committed_at=subject.committed_at,
                    target=None if move is None else move[0].target,
                    moves_at=None if move is None else move[1],
                    stays=mine.wishes[subject.id].stays,
                    moves_bytes=moving.bytes.get(subject.id, 0),
                )
            )
    return TierPlan(
        project=project,
        run=run,
        policy_level=None if stored is None else stored.level,
        policy_version=None if stored is None else stored.version,
        rows=rows,
        totals=_totals(rows, now, _terms(context)),
        kept_hot_by_others_bytes=moving.kept_by_others,
    )


def _runs(session: Session, project_id: str, now: datetime) -> dict[str, _Run]:
    """Chunks are shared within a project, so all its runs are looked at."""
    found = {}
    for run_id in session.scalars(select(Run.id).where(Run.project_id == project_id).order_by(Run.id)).all():
        _, policy = policy_of(session, project_id, run_id)
        subjects = subjects_of(session, run_id, now)
        found[run_id] = _Run(policy, {subject.id: subject for subject in subjects}, wishes(policy, subjects, now))
    return found


def _leaves_at(run: _Run, checkpoint_id: str, target: str) -> datetime:
    """From when on this checkpoint does not want its chunks to be hotter than the target."""
    subject = run.subjects.get(checkpoint_id)
    if subject is None or run.policy is None or run.wishes[checkpoint_id].stays is not None:
        return _NEVER
    for rule in run.policy.rules:
        if coldness(rule.target) >= coldness(target):
            return moves_at(rule, subject.committed_at)
    return _NEVER


def _moving(
    session: Session,
    context: ServiceContext,
    project_id: str,
    run_id: str,
    *,
    runs: dict[str, _Run],
    wanted: dict[str, str],
) -> _Moving:
    users = _users_by_list(session, project_id)
    own_lists = {list_id for list_id, found in users.items() if any(each[0] == run_id for each in found)}
    chunks = _lists_by_chunk(session, own_lists, set(users))
    sizes = _hot_sizes(session, context, own_lists)
    moving = _Moving()
    for chunk_id, lists in chunks.items():
        if chunk_id not in sizes:
            continue
        stored_bytes, storage_class = sizes[chunk_id]
        everybody = {user for list_id in lists for user in users[list_id]}
        mine = [checkpoint_id for user_run, checkpoint_id in everybody if user_run == run_id]
        targets = [wanted[each] for each in mine if each in wanted]
        # Where it goes next: as far as the mildest of those of this run that move at all.
        target = min(targets, key=coldness, default=None)
        if target is None or coldness(target) <= coldness(storage_class):
            continue
        last = max(everybody, key=lambda user: (_leaves_at(runs[user[0]], user[1], target), user[0] != run_id, user[1]))
        if last[0] == run_id:
            if _leaves_at(runs[run_id], last[1], target) < _NEVER:
                moving.bytes[last[1]] += stored_bytes
        elif _leaves_at(runs[last[0]], last[1], target) == _NEVER:
            moving.kept_by_others += stored_bytes
    return moving


def _users_by_list(session: Session, project_id: str) -> dict[int, set[tuple[str, str]]]:
    """(run, checkpoint) of what is committed or uploading, by chunk list."""
    users: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for list_id, run_id, checkpoint_id in session.execute(
        select(Shard.chunk_list_id, Checkpoint.run_id, Checkpoint.id)
        .join(Checkpoint, Checkpoint.id == Shard.checkpoint_id)
        .join(Run, Run.id == Checkpoint.run_id)
        .where(
            Run.project_id == project_id,
            Checkpoint.state.in_((CheckpointState.COMMITTED, CheckpointState.UPLOADING)),
        )
    ):
        if list_id is not None:
            users[list_id].add((run_id, checkpoint_id))
    return users


def _lists_by_chunk(session: Session, own: set[int], all_lists: set[int]) -> dict[int, set[int]]:
    """Every list that has the chunks of these lists."""
    lists: dict[int, set[int]] = defaultdict(set)
    for portion in _portions(sorted(own)):
        for chunk_id, list_id in session.execute(
            select(ChunkListEntry.chunk_id, ChunkListEntry.chunk_list_id).where(
                ChunkListEntry.chunk_list_id.in_(portion)
            )
        ):
            lists[chunk_id].add(list_id)
    for portion in _portions(sorted(all_lists - own)):
        for chunk_id, list_id in session.execute(
            select(ChunkListEntry.chunk_id, ChunkListEntry.chunk_list_id).where(
                ChunkListEntry.chunk_list_id.in_(portion)
            )
        ):
            if chunk_id in lists:
                lists[chunk_id].add(list_id)
    return lists


def _hot_sizes(session: Session, context: ServiceContext, own: set[int]) -> dict[int, tuple[int, str | None]]:
    """By chunk: stored bytes and class of the hottest copy in the primary store."""
    sizes: dict[int, tuple[int, str | None]] = {}
    for portion in _portions(sorted(own)):
        for chunk_id, stored_bytes, storage_class in session.execute(
            select(Copy.chunk_id, Copy.stored_bytes, Copy.storage_class)
            .join(ChunkListEntry, ChunkListEntry.chunk_id == Copy.chunk_id)
            .where(
                ChunkListEntry.chunk_list_id.in_(portion),
                Copy.store_id == context.store_id,
                Copy.state == CopyState.VERIFIED,
                Copy.proof.in_(PROVEN),
            )
        ):
            known = sizes.get(chunk_id)
            if known is None or coldness(storage_class) < coldness(known[1]):
                sizes[chunk_id] = (stored_bytes, storage_class)
    return sizes


def _portions(ids: list[int]) -> Iterable[list[int]]:
    return (ids[first : first + 500] for first in range(0, len(ids), 500))


def _terms(context: ServiceContext) -> Mapping[str, ClassTerms]:
    """What the primary store documents of its classes, by their names."""
    store: object = context.store
    return {each.value: terms for each, terms in store.class_terms.items()} if isinstance(store, ClassedStore) else {}


def _totals(rows: list[TierPlanRow], now: datetime, known: Mapping[str, ClassTerms]) -> list[TierPlanTotal]:
    totals = []
    for target in sorted({row.target for row in rows if row.target is not None}, key=coldness):
        moving = [row for row in rows if row.target == target]
        due = sum(row.moves_bytes for row in moving if row.moves_at is not None and row.moves_at <= now)
        everything = sum(row.moves_bytes for row in moving)
        terms = known.get(target)
        cheapest = min(terms.retrieval_dollars.values()) if terms is not None else 0.0
        totals.append(
            TierPlanTotal(
                target=target,
                due_bytes=due,
                later_bytes=everything - due,
                minimum_days=None if terms is None else terms.minimum_days,
                takes_seconds={} if terms is None else terms.thaw_seconds,
                retrieval_dollars=round(cheapest * everything / _GIB, 4),
            )
        )
    return totals
