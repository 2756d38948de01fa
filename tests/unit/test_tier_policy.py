"""What a tiers policy may say, and what it wants of each checkpoint of a run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast_protocol.policies.policy import PolicyError, PolicyKind, read_policy
from holdfast_protocol.states import CheckpointKind, Health
from holdfast_protocol.tiers import StorageClass, TierPolicy, TierRule
from holdfast_service.copies.cold import takes_words
from holdfast_service.stores.s3.classes import TERMS
from holdfast_service.tiers.rules import Subject, moves_at, next_move, wishes

NOW = datetime(2026, 3, 31, 12, tzinfo=UTC)
POLICY = TierPolicy.model_validate(
    {
        "rules": [{"after": "7d", "storage_class": "rare"}, {"after": "3m", "storage_class": "deep_archive"}],
        "stay_hot": {"labels": ["milestone"], "kinds": ["final"]},
    }
)


def subject(step: int, days: float, **changes: Any) -> Subject:
    facts: dict[str, Any] = {
        "id": f"ck_{step}",
        "step": step,
        "attempt": 1,
        "kind": CheckpointKind.PERIODIC,
        "labels": (),
        "committed_at": NOW - timedelta(days=days),
        "health": Health.OK,
        "on_line": True,
    }
    return Subject(**(facts | changes))


def old(step: int, days: float, **changes: Any) -> dict[str, Any]:
    """What is wanted of it in a run with two newer points."""
    found = wishes(POLICY, [subject(901, 0), subject(900, 0), subject(step, days, **changes)], NOW)
    return {"target": found[f"ck_{step}"].target, "stays": found[f"ck_{step}"].stays}


@pytest.mark.parametrize(
    ("days", "target"),
    [(0, None), (6.99, None), (7, "rare"), (80, "rare"), (91, "deep_archive"), (4000, "deep_archive")],
)
def test_age_says_where_a_checkpoint_belongs(days: float, target: str | None) -> None:
    assert old(1, days) == {"target": target, "stays": None}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"labels": ("a", "milestone")}, "labelled milestone"),
        ({"kind": CheckpointKind.FINAL}, "its kind is final"),
        ({"pinned": True}, "pinned"),
        ({"resumed_by": (4, 5)}, "attempt 4, 5 resumed from it"),
        ({"health": Health.CORRUPT}, "corrupt: what is left of it is not moved"),
    ],
)
def test_what_stays_hot_says_why(changes: dict[str, Any], why: str) -> None:
    assert old(1, 100, **changes) == {"target": None, "stays": why}


def test_the_two_newest_healthy_points_on_the_line_stay_hot() -> None:
    run = [
        subject(6, 30, health=Health.DIVERGED),
        subject(5, 30, on_line=False),
        subject(4, 30),
        subject(3, 30),
        subject(2, 30),
    ]
    found = wishes(POLICY, run, NOW)
    assert {each: wish.target for each, wish in found.items()} == {
        "ck_6": "rare",
        "ck_5": "rare",
        "ck_4": None,
        "ck_3": None,
        "ck_2": "rare",
    }


def test_without_a_policy_all_stay_hot() -> None:
    assert wishes(None, [subject(1, 9000)], NOW)["ck_1"].stays is not None


@pytest.mark.parametrize("span", ["6h", "7d", "2w", "1m", "3m", "1y", "1y6m3d"])
@pytest.mark.parametrize("day", [1, 28, 29, 30, 31])
def test_when_a_rule_moves_is_when_its_span_has_passed(span: str, day: int) -> None:
    rule = TierRule.model_validate({"after": span, "to": "cold"})
    policy = TierPolicy(rules=[rule])
    one = subject(1, 0, committed_at=datetime(2026, 1, day, 5, tzinfo=UTC))
    newer = [subject(901, 0), subject(900, 0)]
    at = moves_at(rule, one.committed_at)
    assert wishes(policy, [*newer, one], at)["ck_1"].target == "cold"
    assert wishes(policy, [*newer, one], at - timedelta(hours=1))["ck_1"].target is None


def test_the_next_move_is_the_one_that_is_due_and_not_done() -> None:
    newer = [subject(901, 0), subject(900, 0)]

    def told(one: Subject) -> str | None:
        move = next_move(POLICY, one, wishes(POLICY, [*newer, one], NOW)[one.id])
        return None if move is None else move[0].target

    assert told(subject(1, 1)) == "rare"
    assert told(subject(1, 8)) == "rare"
    assert told(subject(1, 8, wanted="rare", settled=True)) == "deep_archive"
    assert told(subject(1, 400, wanted="deep_archive", settled=True)) is None
    assert told(subject(1, 400, labels=("milestone",))) is None


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ([], "at least 1"),
        ([{"after": "7d"}], "either storage_class"),
        ([{"after": "7d", "to": "cold", "storage_class": "archive"}], "either storage_class"),
        ([{"after": "a week", "to": "cold"}], "not a span"),
        ([{"after": "7d", "storage_class": "ICE"}], "infrequent"),
        (
            [{"after": "7d", "storage_class": "archive"}, {"after": "30d", "storage_class": "deep_archive"}],
            "Nothing moves on from archive",
        ),
        (
            [{"after": "7d", "storage_class": "rare"}, {"after": "30d", "storage_class": "infrequent"}],
            "not colder",
        ),
        (
            [{"after": "30d", "storage_class": "infrequent"}, {"after": "7d", "storage_class": "archive"}],
            "must come later",
        ),
        ([{"after": "7d", "to": "cold"}, {"after": "30d", "storage_class": "archive"}], "stands alone"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(rules: list[dict[str, str]], says: str) -> None:
    with pytest.raises(PolicyError) as found:
        read_policy(PolicyKind.TIERS, {"rules": rules})
    assert says in str(found.value)


def test_what_a_thaw_takes_is_told_in_words() -> None:
    assert takes_words(TERMS[StorageClass.ARCHIVE]) == "5 hours (standard), 12 hours (bulk) or 5 minutes (expedited)"
    assert takes_words(TERMS[StorageClass.DEEP_ARCHIVE]) == "12 hours (standard) or 48 hours (bulk)"
    assert takes_words(TERMS[StorageClass.RARE]) == ""
