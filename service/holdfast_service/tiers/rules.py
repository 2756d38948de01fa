"""Where each checkpoint belongs by its policy, and why it stays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import exists, or_, select, text, update
from sqlalchemy.orm import Session

from holdfast_protocol.policies.policy import PolicyError, PolicyKind, read_policy
from holdfast_protocol.policies.retention import parse_span
from holdfast_protocol.states import CheckpointKind, CheckpointState, Health, Tier
from holdfast_protocol.tiers import TierPolicy, TierRule
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import TO_COOL, Attempt, Checkpoint, Run
from holdfast_service.db.tables.operations import Policy
from holdfast_service.holds.held import pin_in_force
from holdfast_service.lineage.restore_choice import line_of_run
from holdfast_service.policies.policies import StoredPolicy, effective_policy

NEWEST_HOT = 2


@dataclass(frozen=True, slots=True)
class Subject:
    """A committed checkpoint. `pinned` and `resumed_by` (attempts that have not ended) are what is in force now."""

    id: str
    step: int
    attempt: int
    kind: CheckpointKind
    labels: Sequence[str]
    committed_at: datetime
    health: Health
    on_line: bool
    tier: Tier = Tier.HOT
    wanted: str | None = None
    settled: bool = False
    pinned: bool = False
    resumed_by: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Wish:
    """`target`: where it belongs now; None: hot. `stays`: why no rule moves it."""

    target: str | None
    stays: str | None = None


def wishes(policy: TierPolicy | None, subjects: Sequence[Subject], now: datetime) -> dict[str, Wish]:
    """By id, what the policy wants of a checkpoint: where it belongs by its age, or why it stays hot. Pure."""
    newest = {subject.id for subject in newest_healthy(subjects)}
    found = {}
    for subject in subjects:
        stays = _stays(policy, subject, newest)
        found[subject.id] = Wish(None, stays) if stays else Wish(_by_age(policy, subject, now))
    return found


def newest_healthy(subjects: Sequence[Subject]) -> list[Subject]:
    """The points that a relaunch would take: the newest on the lineage, and the one before it."""
    healthy = [subject for subject in subjects if subject.health is Health.OK and subject.on_line]
    return sorted(healthy, key=lambda subject: (subject.step, subject.attempt), reverse=True)[:NEWEST_HOT]


def moves_at(rule: TierRule, committed_at: datetime) -> datetime:
    """The first moment at which the rule's span has passed. The span's months are counted back, as `before` does it."""
    span = parse_span(rule.after)
    latest = committed_at + timedelta(days=31 * span.months + span.days + 1, hours=span.hours)
    earliest = committed_at + timedelta(days=28 * span.months + span.days, hours=span.hours)
    if not span.months:
        return earliest
    # The calendar has no inverse where months differ in length: the first hour at which it is true, by halving.
    hours = int((latest - earliest) / timedelta(hours=1))
    low, high = 0, hours
    while low < high:
        middle = (low + high) // 2
        if span.before(earliest + timedelta(hours=middle)) >= committed_at:
            high = middle
        else:
            low = middle + 1
    return earliest + timedelta(hours=low)


def next_move(policy: TierPolicy, subject: Subject, wish: Wish) -> tuple[TierRule, datetime] | None:
    """The rule that moves it next, and when: a rule that is due and not carried out comes first. None: it stays."""
    if wish.stays is not None:
        return None
    targets = list(policy.targets())
    position = 0 if wish.target is None else targets.index(wish.target)
    if wish.target is not None and subject.settled and subject.wanted == wish.target:
        position += 1
    if position == len(targets):
        return None
    rule = policy.rules[position]
    return rule, moves_at(rule, subject.committed_at)


def _by_age(policy: TierPolicy | None, subject: Subject, now: datetime) -> str | None:
    target = None
    for rule in policy.rules if policy is not None else ():
        if parse_span(rule.after).before(now) < subject.committed_at:
            break
        target = rule.target
    return target


def _stays(policy: TierPolicy | None, subject: Subject, newest: set[str]) -> str | None:
    if policy is None:
        return "there is no tiers policy"
    hot = policy.stay_hot
    kept = sorted(set(hot.labels) & set(subject.labels))
    if kept:
        return f"labelled {', '.join(kept)}"
    if subject.kind in hot.kinds:
        return f"its kind is {subject.kind}"
    if hot.pinned and subject.pinned:
        return "pinned"
    if subject.id in newest:
        return "one of the two newest healthy points"
    if subject.resumed_by:
        return f"attempt {', '.join(map(str, subject.resumed_by))} resumed from it"
    if subject.health is Health.CORRUPT:
        return "corrupt: what is left of it is not moved"
    return None


def policy_of(session: Session, project_id: str, run_id: str) -> tuple[StoredPolicy | None, TierPolicy | None]:
    """The stored one, and as its model; a document that is none (of another version) moves nothing."""
    stored = effective_policy(session, PolicyKind.TIERS, project_id, run_id)
    if stored is None:
        return None, None
    try:
        policy = read_policy(PolicyKind.TIERS, stored.document)
    except PolicyError:
        return stored, None
    assert isinstance(policy, TierPolicy)
    return stored, policy


def subjects_of(session: Session, run_id: str, now: datetime) -> list[Subject]:
    """The newest step first."""
    line = line_of_run(session, run_id)
    resumed: dict[str, list[int]] = defaultdict(list)
    for checkpoint_id, number in session.execute(
        select(Attempt.resumed_from_id, Attempt.number)
        .where(Attempt.run_id == run_id, Attempt.ended_at.is_(None))
        .order_by(Attempt.number)
    ):
        if checkpoint_id is not None:
            resumed[checkpoint_id].append(number)
    rows = session.execute(
        select(
            Checkpoint.id,
            Checkpoint.step,
            Checkpoint.attempt_number,
            Checkpoint.kind,
            Checkpoint.labels,
            Checkpoint.committed_at,
            Checkpoint.health,
            Checkpoint.detached,
            Checkpoint.tier,
            Checkpoint.tier_wanted,
            Checkpoint.tier_checked_at,
            pin_in_force(now).label("pinned"),
        )
        .where(Checkpoint.run_id == run_id, Checkpoint.state == CheckpointState.COMMITTED)
        .order_by(Checkpoint.step.desc(), Checkpoint.attempt_number.desc(), Checkpoint.id)
    )
    return [
        Subject(
            id=row.id,
            step=row.step,
            attempt=row.attempt_number,
            kind=CheckpointKind(row.kind),
            labels=row.labels,
            committed_at=row.committed_at,
            health=Health(row.health),
            on_line=line.has(row.id, row.attempt_number, row.step, detached=row.detached),
            tier=Tier(row.tier),
            wanted=row.tier_wanted,
            settled=row.tier_checked_at is not None,
            pinned=bool(row.pinned),
            resumed_by=resumed.get(row.id, ()),
        )
        for row in rows
    ]


def decide(context: ServiceContext) -> int:
    """Writes down where each checkpoint belongs (`tier_wanted`), run by run, if that has changed; how many.

    If a policy is gone or has become milder, nothing is brought back: that costs money and time, and a person asks for
    it (thaw). The checkpoint only no longer gets colder.
    """
    with context.database.read() as session:
        runs = session.execute(
            select(Run.project_id, Run.id)
            .where(
                or_(
                    exists().where(Policy.project_id == Run.project_id, Policy.kind == PolicyKind.TIERS),
                    exists().where(Checkpoint.run_id == Run.id, text(TO_COOL)),
                )
            )
            .order_by(Run.id)
        ).all()
    changed = 0
    for project_id, run_id in runs:
        with context.database.read() as session:
            wanted = _changed(session, project_id, run_id)
        if wanted:
            with context.database.transaction() as session:
                _write(session, wanted)
            changed += len(wanted)
    return changed


def _changed(session: Session, project_id: str, run_id: str) -> dict[str, str | None]:
    now = database_now(session)
    _, policy = policy_of(session, project_id, run_id)
    subjects = subjects_of(session, run_id, now)
    found = wishes(policy, subjects, now)
    return {subject.id: found[subject.id].target for subject in subjects if subject.wanted != found[subject.id].target}


def _write(session: Session, wanted: dict[str, str | None]) -> None:
    for checkpoint_id, target in sorted(wanted.items()):
        session.execute(
            update(Checkpoint)
            .where(Checkpoint.id == checkpoint_id, Checkpoint.state == CheckpointState.COMMITTED)
            .values(tier_wanted=target, tier_checked_at=None),
            execution_options={"synchronize_session": False},
        )
