"""What is kept of a run that goes on as it has, once the policies have long been at work. Pure.

The run is thought on, save after save; the retention policy is applied every so often and at the end, and then the
tiers policy says where each kept one is. The rules are the verbs' own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

from holdfast_protocol.retention import RetentionPolicy
from holdfast_protocol.states import Health
from holdfast_protocol.tiers import TierPolicy
from holdfast_service.forecast.rhythm import Rhythm
from holdfast_service.retention.facts import Fact, RunFacts
from holdfast_service.retention.plan import make_plan
from holdfast_service.tiers.wanted import Subject, wishes

LONGEST_DAYS = 365.0
MOST_SAVES = 50_000
_APPLIED_EVERY = 500
_DAYS_OF_A_MONTH = 30.0
# Calendar periods begin and end: a checkpoint more or less is no growth.
_WOBBLE = 3


@dataclass(frozen=True)
class Standing:
    """`by_target`: how many of the kept checkpoints are where; None is hot."""

    after_days: float
    kept: int
    by_target: dict[str | None, int]
    grows_per_month: float


def standing(rhythm: Rhythm, retention: RetentionPolicy | None, tiers: TierPolicy | None) -> Standing:
    saves = min(MOST_SAVES, max(1, int(LONGEST_DAYS * 86400 / rhythm.interval_seconds)))
    earlier_saves = saves * 3 // 4
    after_days = saves * rhythm.interval_seconds / 86400
    kept: list[Fact] = []
    kept_earlier = apply_at = 0
    for number in range(1, saves + 1):
        kept.append(_save(rhythm, number))
        if len(kept) > apply_at or number in (earlier_saves, saves):
            kept = _applied(retention, kept)
            # The more stay, the seldomer: else a policy that keeps all would be asked about all again and again.
            apply_at = 2 * len(kept) + _APPLIED_EVERY
        if number == earlier_saves:
            kept_earlier = len(kept)
    more = len(kept) - kept_earlier
    quarter_months = (saves - earlier_saves) * rhythm.interval_seconds / 86400 / _DAYS_OF_A_MONTH
    grows = more / quarter_months if more > _WOBBLE and quarter_months > 0 else 0.0
    return Standing(after_days, len(kept), _places(rhythm, tiers, kept), grows)


def _save(rhythm: Rhythm, number: int) -> Fact:
    like = rhythm.saves[(number - 1) % len(rhythm.saves)]
    return Fact(
        id=str(number),
        step=rhythm.newest_step + number * rhythm.steps_between,
        attempt=1,
        at=rhythm.newest_at + timedelta(seconds=number * rhythm.interval_seconds),
        labels=like.labels,
        metrics=like.metrics,
    )


def _applied(retention: RetentionPolicy | None, facts: list[Fact]) -> list[Fact]:
    if retention is None:
        return facts
    plan = make_plan(retention, RunFacts(facts, restore_point=facts[-1].id, running=True))
    return [decision.fact for decision in reversed(plan) if decision.keep]


def _places(rhythm: Rhythm, tiers: TierPolicy | None, kept: list[Fact]) -> dict[str | None, int]:
    subjects = [
        Subject(
            id=fact.id,
            step=fact.step,
            attempt=1,
            kind=rhythm.saves[(int(fact.id) - 1) % len(rhythm.saves)].kind,
            labels=fact.labels,
            committed_at=fact.at,
            health=Health.OK,
            on_line=True,
        )
        for fact in kept
    ]
    return dict(Counter(wish.target for wish in wishes(tiers, subjects, kept[-1].at).values()))
