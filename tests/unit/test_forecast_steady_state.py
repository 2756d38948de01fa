"""What stays of a run that goes on for long under a policy, by policies whose answer can be counted by hand."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from holdfast_protocol.policies.retention import PRESETS, RetentionPolicy
from holdfast_protocol.states import CheckpointKind
from holdfast_protocol.tiers import StorageClass, TierPolicy, TierRule
from holdfast_service.usage.cost_forecast import Save, SaveCadence, steady_state

HOUR = 3600.0


def cadence(interval_seconds: float, *, labels: tuple[str, ...] = ()) -> SaveCadence:
    """Every tenth save has the labels."""
    saves = [Save(CheckpointKind.PERIODIC, labels if number == 0 else (), {}) for number in range(10)]
    return SaveCadence(saves, datetime(2026, 1, 1, tzinfo=UTC), 1000, interval_seconds, 100, 10**9, 10**10)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"keep_last": 5}, 5),
        ({"keep_within": "6h"}, 6),
        ({"keep_daily": 7}, 7),
        ({"keep_last": 1}, 2),  # the two newest healthy ones, whatever the policy
        ({"keep_within": "6h", "keep_within_daily": "7d"}, 6 + 7),
    ],
)
def test_a_policy_that_saturates_stands_at_what_its_rules_say(rules: dict[str, object], kept: int) -> None:
    found = steady_state(cadence(HOUR), RetentionPolicy.model_validate(rules), None)
    assert abs(found.kept - kept) <= 1, "a period that has just begun, or is just over"
    assert found.grows_per_month == 0
    assert found.by_target == {None: found.kept}


def test_the_preset_of_a_long_run_has_few_and_its_milestones_grow() -> None:
    saturated = steady_state(cadence(HOUR), PRESETS["tiered"], None)
    assert 6 + 6 + 12 <= saturated.kept <= 6 + 8 + 15
    growing = steady_state(cadence(HOUR, labels=("milestone",)), PRESETS["tiered"], None)
    assert growing.grows_per_month == pytest.approx(30 * 24 / 10, rel=0.05)
    assert growing.kept > 365 * 24 / 10


def test_without_a_policy_every_save_stays() -> None:
    found = steady_state(cadence(HOUR), None, None)
    assert (found.kept, round(found.grows_per_month)) == (365 * 24, 30 * 24)


def test_each_is_where_the_tiers_want_it_and_the_newest_are_hot() -> None:
    tiers = TierPolicy(
        rules=[
            TierRule(after="7d", storage_class=StorageClass.RARE),
            TierRule(after="30d", storage_class=StorageClass.DEEP_ARCHIVE),
        ]
    )
    found = steady_state(cadence(24 * HOUR), RetentionPolicy(keep_daily=60), tiers)
    assert found.by_target == {None: 7, "rare": 23, "deep_archive": 30}
