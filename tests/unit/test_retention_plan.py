"""Keep or expire: each rule as restic's users know it, what never expires, and that the unhealthy take no place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_protocol.policies.policy import PolicyError, PolicyKind, read_policy
from holdfast_protocol.policies.retention import PRESETS, Reason, RetentionPolicy, parse_span
from holdfast_protocol.states import CheckpointState, Health
from holdfast_service.retention import plan as plan_module
from holdfast_service.retention.plan import (
    Decision,
    Fact,
    RunFacts,
    make_plan,
    only_for_want_of_a_metric,
    protected,
)

# A Sunday, so that a week ends between two of the hours below.
START = datetime(2026, 3, 1, 21, 30, tzinfo=UTC)


def hours(count: int, **changes: Any) -> list[Fact]:
    """Steps 0, 1, 2, … an hour apart."""
    return [Fact(id=f"ck_{i}", step=i, attempt=1, at=START + timedelta(hours=i), **changes) for i in range(count)]


def plan(policy: RetentionPolicy | None, facts: Sequence[Fact], restore_point: str | None = None) -> list[Decision]:
    return make_plan(policy, RunFacts(facts, restore_point))


def kept_by(policy: RetentionPolicy, facts: Sequence[Fact], rule: str) -> list[int]:
    """The steps that this rule keeps, whatever else does."""
    return [one.fact.step for one in plan(policy, facts) if rule in {reason.kind for reason in one.reasons}]


@pytest.mark.parametrize(
    ("rules", "rule", "steps"),
    [
        ({"keep_last": 3}, "keep_last", [9, 8, 7]),
        ({"keep_last": "unlimited"}, "keep_last", [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]),
        # Newer than two hours before the newest, and not as old: as restic has it.
        ({"keep_within": "2h"}, "keep_within", [9, 8]),
        # 21:30 and 22:30 and 23:30 of Sunday, then Monday.
        ({"keep_daily": 1}, "keep_daily", [9]),
        ({"keep_daily": 5}, "keep_daily", [9, 2]),
        ({"keep_weekly": 5}, "keep_weekly", [9, 2]),
        ({"keep_monthly": 5}, "keep_monthly", [9]),
        ({"keep_hourly": 2}, "keep_hourly", [9, 8]),
        ({"keep_within_daily": "7h"}, "keep_within_daily", [9]),
        ({"keep_within_daily": "8h"}, "keep_within_daily", [9, 2]),
        ({"keep_every_steps": 4}, "keep_every_steps", [8, 4, 0]),
    ],
)
def test_each_rule_keeps_what_restic_would(rules: dict[str, Any], rule: str, steps: list[int]) -> None:
    assert kept_by(RetentionPolicy(**rules), hours(10), rule) == steps


def test_hours_and_days_are_those_of_utc() -> None:
    east = [replace(fact, at=fact.at.astimezone(datetime.now().astimezone().tzinfo)) for fact in hours(10)]
    assert kept_by(RetentionPolicy(keep_daily=5), east, "keep_daily") == [9, 2]


def test_the_best_are_healthy_and_finite_and_of_equal_ones_the_newest() -> None:
    values = [3.0, 1.0, 2.0, 1.0, 0.5, 9.0]
    facts = [replace(fact, metrics={"loss": {"value": values[fact.step]}}) for fact in hours(6)]
    facts[4] = replace(facts[4], health=Health.DIVERGED)
    assert kept_by(RetentionPolicy(keep_best=[{"metric": "loss", "n": 2}]), facts, "keep_best") == [3, 1]
    assert kept_by(RetentionPolicy(keep_best={"metric": "loss", "mode": "max"}), facts, "keep_best") == [5]


@pytest.mark.rule("finite-metrics")
def test_what_has_no_finite_metric_cannot_be_judged_and_stays() -> None:
    facts = [replace(fact, metrics={"loss": {"value": float(fact.step)}}) for fact in hours(10)]
    facts[3] = replace(facts[3], metrics={"loss": {"value": None, "nonfinite": "nan"}})
    facts[4] = replace(facts[4], metrics={})
    policy = RetentionPolicy(keep_last=2, keep_best=[{"metric": "loss"}])
    found = plan(policy, facts)
    assert {one.fact.step for one in found if one.keep} == {9, 8, 0, 3, 4}
    by_step = {one.fact.step: [reason.detail for reason in one.reasons] for one in found}
    assert by_step[3] == ["loss is nan"]
    assert by_step[4] == ["loss is missing"]
    assert only_for_want_of_a_metric(found) == 2


def test_labels_are_kept_whoever_else_goes() -> None:
    facts = hours(10)
    facts[1] = replace(facts[1], labels=["milestone", "v2"])
    facts[2] = replace(facts[2], labels=["v2"])
    assert kept_by(RetentionPolicy(keep_labels=["milestone"]), facts, "keep_labels") == [1]


def test_what_is_unhealthy_takes_no_healthy_ones_place_and_goes_no_sooner() -> None:
    facts = hours(10)
    facts[9] = replace(facts[9], health=Health.DIVERGED)
    facts[8] = replace(facts[8], health=Health.QUARANTINED)
    facts[2] = replace(facts[2], health=Health.CORRUPT)
    found = plan(RetentionPolicy(keep_last=3), facts)
    assert [one.fact.step for one in found if one.keep] == [9, 8, 7, 6, 5]


@pytest.mark.rule("trash-first")
@pytest.mark.rule("two-verified-points")
@pytest.mark.parametrize(
    ("proven", "kinds"),
    [
        ({1, 2, 3}, {6: "newest_healthy", 5: "newest_healthy", 3: "newest_proven", 2: "newest_proven"}),
        ({5, 2}, {6: "newest_healthy", 5: "newest_healthy", 2: "newest_proven"}),
        ({3}, {6: "newest_healthy", 5: "newest_healthy", 3: "newest_proven"} | dict.fromkeys((0, 1, 2, 4), "unproven")),
        (set(), {6: "newest_healthy", 5: "newest_healthy"} | dict.fromkeys(range(5), "unproven")),
    ],
)
def test_two_proven_points_stay_beside_the_newest_and_until_then_each_healthy_one(
    proven: set[int], kinds: dict[int, str]
) -> None:
    facts = [replace(fact, proven=fact.step in proven) for fact in hours(7)]
    found = {one.fact.step: one.reasons[-1].kind.value for one in plan(RetentionPolicy(keep_last=1), facts) if one.keep}
    assert found == kinds


def test_the_two_newest_healthy_points_on_the_line_stay_and_so_does_the_restore_point() -> None:
    facts = hours(10)
    # The run went back to step 3: what came later is detached, newest as it may be.
    facts = [replace(fact, on_line=fact.step <= 3) for fact in facts]
    facts[3] = replace(facts[3], health=Health.DIVERGED)
    found = plan(RetentionPolicy(keep_last=1), facts, restore_point="ck_2")
    kinds = {one.fact.step: [reason.kind.value for reason in one.reasons] for one in found if one.keep}
    assert kinds == {9: ["keep_last"], 2: ["restore_point", "newest_healthy"], 1: ["newest_healthy"]}


@pytest.mark.rule("trash-first")
def test_where_the_line_has_fewer_than_two_healthy_points_one_beside_it_stays() -> None:
    facts = [replace(fact, on_line=fact.step == 9) for fact in hours(10)]
    facts[8] = replace(facts[8], health=Health.CORRUPT)
    found = plan(RetentionPolicy(keep_labels=["none"]), facts)
    # The corrupt one goes no sooner for its mark: whole again, it would be one of the two.
    assert [one.fact.step for one in found if one.keep] == [9, 8, 7]


@pytest.mark.rule("trash-first")
def test_by_a_mark_that_can_be_taken_back_nothing_expires() -> None:
    facts = [replace(fact, metrics={"loss": {"value": float(fact.step)}}) for fact in hours(10)]
    for lost in (0, 1, 5):
        facts[lost] = replace(facts[lost], health=Health.CORRUPT)
    found = plan(RetentionPolicy(keep_last=2, keep_best=[{"metric": "loss"}]), facts)
    why = {one.fact.step: one.reasons[0].detail for one in found if one.keep}
    # Either of the two may turn out whole and the other lost; step 5 would go, whole or not.
    assert sorted(why) == [0, 1, 2, 8, 9]
    assert why[1] == "number 1 of the best 1 by loss (min): 1, if its bytes turn up whole"
    assert why[2] == "number 1 of the best 1 by loss (min): 2"
    # While all are marked nobody knows anything, and nothing goes.
    everything = plan(RetentionPolicy(keep_last=1), [replace(fact, health=Health.CORRUPT) for fact in facts])
    assert all(one.keep for one in everything)


@given(
    health=st.lists(st.sampled_from([Health.OK, Health.CORRUPT, Health.DIVERGED]), min_size=1, max_size=20),
    loss=st.lists(st.integers(0, 3), min_size=20, max_size=20),
    beside=st.sets(st.integers(0, 19)),
    copied=st.sets(st.integers(0, 19)),
    rules=st.sampled_from(
        [
            {"keep_last": 2},
            {"keep_daily": 2},
            {"keep_within": "3h"},
            {"keep_within_hourly": "4h"},
            {"keep_best": {"metric": "loss", "n": 2}},
            {"keep_every_steps": 7},
        ]
    ),
)
def test_what_is_corrupt_stays_as_it_would_were_it_alone_of_them_whole(
    health: list[Health], loss: list[int], beside: set[int], copied: set[int], rules: dict[str, Any]
) -> None:
    facts = [
        replace(
            fact,
            health=health[fact.step],
            metrics={"loss": {"value": loss[fact.step]}},
            on_line=fact.step not in beside,
            copied_to=[2] if fact.step in copied else [],
        )
        for fact in hours(len(health))
    ]
    policy = RetentionPolicy(**rules)
    for one in plan(policy, facts):
        if one.fact.health is Health.CORRUPT:
            left = [fact for fact in facts if fact.health is Health.OK]
            alone = plan(policy, [*left, replace(one.fact, health=Health.OK)])
            stays = next(each.keep for each in alone if each.fact.id == one.fact.id)
            supposed = any("turn up whole" in reason.detail for reason in one.reasons)
            assert one.keep if stays else not supposed


def test_a_plan_judges_however_many_corrupt_ones_twice_and_not_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []

    def counted(run: RunFacts) -> dict[str, list[Reason]]:
        judged.append(len(run.facts))
        return protected(run)

    monkeypatch.setattr(plan_module, "protected", counted)
    facts = [replace(fact, health=Health.OK if fact.step < 3 else Health.CORRUPT) for fact in hours(300)]
    assert all(one.keep for one in plan(RetentionPolicy(keep_last=3), facts))
    assert judged == [300, 297]


@pytest.mark.rule("trash-first")
def test_the_newest_point_that_is_whole_in_another_store_stays() -> None:
    facts = hours(10)
    facts[3] = replace(facts[3], copied_to=[2])
    facts[4] = replace(facts[4], copied_to=[2])
    facts[5] = replace(facts[5], copied_to=[2], health=Health.DIVERGED)
    facts[6] = replace(facts[6], copied_to=[2], on_line=False)
    facts[2] = replace(facts[2], copied_to=[2, 3])
    found = plan(RetentionPolicy(keep_last=1), facts)
    assert {one.fact.step for one in found if one.keep} == {9, 8, 4, 2}


def test_pins_holds_readers_and_what_an_attempt_stands_on_stay_with_their_words() -> None:
    facts = hours(10)
    facts[0] = replace(facts[0], pin="by ann: paper")
    facts[1] = replace(facts[1], held=["legal: case 7"])
    facts[2] = replace(facts[2], read_until=START)
    facts[3] = replace(facts[3], resumed_by=[4])
    facts.append(replace(facts[9], id="ck_u", step=10, state=CheckpointState.UPLOADING, at=START + timedelta(hours=10)))
    found = plan(RetentionPolicy(keep_last=1), facts)
    words = {one.fact.step: [reason.detail for reason in one.reasons] for one in found if one.keep}
    assert words[0] == ["pinned by ann: paper"]
    assert words[1] == ["held legal: case 7"]
    assert words[2] == ["being read, until 2026-03-01 21:30 UTC at most"]
    assert words[3] == ["attempt 4 resumed from it"]
    assert words[10] == ["it is still uploading"]
    assert sorted(words) == [0, 1, 2, 3, 8, 9, 10]


def kept(policy: RetentionPolicy, facts: Sequence[Fact], read_at: datetime) -> set[int]:
    return {one.fact.step for one in make_plan(policy, RunFacts(facts, None, read_at=read_at)) if one.keep}


@pytest.mark.rule("database-clock")
def test_a_commit_by_a_clock_that_was_ahead_moves_no_span_and_takes_no_place() -> None:
    facts, ahead = hours(10), timedelta(days=40)
    facts[9] = replace(facts[9], at=facts[9].at + ahead)
    now = START + timedelta(hours=10)
    assert kept(RetentionPolicy(keep_within="9h"), facts, now) == set(range(10))
    assert kept(RetentionPolicy(keep_last=3), facts, now) == {9, 8, 7, 6}
    # The run went on: once that day is there, the last commit still says what is newest.
    facts.append(replace(facts[8], id="ck_10", step=10, at=now))
    assert kept(RetentionPolicy(keep_within="11h"), facts, now + 2 * ahead) == set(range(11))
    assert kept(RetentionPolicy(keep_within="3h"), facts, now + 2 * ahead) == {10, 9, 8}


@pytest.mark.rule("database-clock")
@pytest.mark.parametrize("rules", [{"keep_hourly": 10}, {"keep_within": "10h"}, {"keep_last": 10}])
def test_a_clock_that_is_behind_expires_nothing(rules: dict[str, Any]) -> None:
    for hour in range(-1, 10):
        assert kept(RetentionPolicy(**rules), hours(10), START + timedelta(hours=hour)) == set(range(10))


@pytest.mark.rule("database-clock")
def test_what_was_committed_while_the_clock_stood_back_is_the_newest_all_the_same() -> None:
    facts = hours(10)
    facts[8] = replace(facts[8], at=START)
    facts[9] = replace(facts[9], at=START - timedelta(hours=1))
    assert set(kept_by(RetentionPolicy(keep_last=3), facts, "keep_last")) == {9, 8, 7}
    facts = [replace(fact, metrics={"loss": {"value": 1.0}}) for fact in facts]
    assert kept_by(RetentionPolicy(keep_best={"metric": "loss"}), facts, "keep_best") == [9], "of equal ones the newest"
    beside = [replace(fact, on_line=False) for fact in facts]
    run = RunFacts([*beside, Fact(id="ck_n", step=0, attempt=2, at=START + timedelta(hours=10))], None)
    assert set(protected(run)) == {"ck_n", "ck_9"}, "the two newest healthy points"


def test_without_a_policy_nothing_expires() -> None:
    assert all(one.keep for one in plan(None, hours(50)))


@given(
    health=st.lists(st.sampled_from(list(Health)), min_size=1, max_size=40),
    last=st.integers(1, 10),
    daily=st.integers(1, 5),
)
def test_a_plan_says_a_reason_for_everything_and_never_leaves_fewer_than_two_healthy(
    health: list[Health], last: int, daily: int
) -> None:
    facts = [replace(fact, health=health[fact.step]) for fact in hours(len(health))]
    found = plan(RetentionPolicy(keep_last=last, keep_daily=daily), facts)
    assert all(one.reasons for one in found)
    healthy = [one for one in found if one.fact.healthy]
    assert sum(one.keep for one in healthy) >= min(2, len(healthy))
    # What stays is planned again, and all of it stays: applying a plan twice is applying it once.
    again = plan(RetentionPolicy(keep_last=last, keep_daily=daily), [one.fact for one in found if one.keep])
    assert all(one.keep for one in again)


@pytest.mark.parametrize(
    ("text", "moment", "before"),
    [
        ("6h", datetime(2026, 3, 1, 3, tzinfo=UTC), datetime(2026, 2, 28, 21, tzinfo=UTC)),
        ("1m", datetime(2026, 3, 31, tzinfo=UTC), datetime(2026, 2, 28, tzinfo=UTC)),
        ("1y", datetime(2028, 2, 29, tzinfo=UTC), datetime(2027, 2, 28, tzinfo=UTC)),
        ("1y2m1w3d4h", datetime(2026, 6, 20, 10, tzinfo=UTC), datetime(2025, 4, 10, 6, tzinfo=UTC)),
        ("999y", datetime(2026, 1, 1, tzinfo=UTC), datetime(1027, 1, 1, tzinfo=UTC)),
        ("999y9999m9999w999999h", datetime(2026, 1, 1, tzinfo=UTC), datetime.min.replace(tzinfo=UTC)),
    ],
)
def test_spans_are_those_of_the_calendar(text: str, moment: datetime, before: datetime) -> None:
    assert parse_span(text).before(moment) == before


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"keep_dayly": 3}, "did you mean keep_daily?"),
        ({"keep-last": 0}, "keep_last: it must be a number from 1"),
        ({"keep_last": True}, "keep_last: it must be a number from 1"),
        ({"keep_within": "30min"}, "no minutes"),
        ({"keep_within": "0h"}, "no time at all"),
        ({"keep_best": {"metric": "loss", "mode": "least"}}, "keep_best.0.mode"),
        ({}, "needs a rule"),
        ({"keep_labels": ["not a label"]}, "keep_labels.0"),
    ],
)
def test_a_wrong_policy_is_refused_with_what_to_do(document: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said.replace("?", r"\?")):
        read_policy(PolicyKind.RETENTION, document)


def test_presets_and_restics_spelling_are_policies() -> None:
    for preset in PRESETS.values():
        assert read_policy(PolicyKind.RETENTION, preset.rules()) == preset
    assert read_policy(PolicyKind.RETENTION, {"keep-within-daily": "7d"}) == RetentionPolicy(keep_within_daily="7d")
