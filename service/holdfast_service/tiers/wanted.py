"""What its policy wants of each checkpoint of a run: where it belongs by its age, or why it stays hot. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from holdfast_protocol.spans import parse_span
from holdfast_protocol.states import CheckpointKind, Health, Tier
from holdfast_protocol.tiers import TierPolicy, TierRule

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
    """By id."""
    newest = {subject.id for subject in newest_healthy(subjects)}
    found = {}
    for subject in subjects:
        stays = _stays(policy, subject, newest)
        found[subject.id] = Wish(None, stays) if stays else Wish(_by_age(policy, subject, now))
    return found


def newest_healthy(subjects: Sequence[Subject]) -> list[Subject]:
    """The points that a relaunch would take: the newest on the line of descent, and the one before it."""
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
    """The rule that moves it next, and when: one that is due and not carried out comes first. None: it stays."""
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
