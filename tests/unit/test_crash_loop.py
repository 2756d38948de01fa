"""The decision of the crash-loop breaker: which ends count, what ends the count, and what bounds it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast_protocol.states import AttemptOutcome
from holdfast_service.attempts.crash_loop import FEW_STEPS, Tried, crash_loop

FAILED, LOST, FENCED = AttemptOutcome.FAILED, AttemptOutcome.LOST, AttemptOutcome.FENCED
OPENED = datetime(2026, 1, 1, tzinfo=UTC)


def tried(*ends: Any) -> list[Tried]:
    """From the oldest to the newest: an outcome, or the changes of a failed attempt. Returned newest first."""
    found = []
    for number, end in enumerate(ends, 1):
        facts: dict[str, Any] = {"outcome": FAILED} | (end if isinstance(end, dict) else {"outcome": end})
        opened_at = OPENED + timedelta(hours=number)
        found.append(Tried(number, opened_at, **({"point": "ck_x", "point_step": 100} | facts)))
    return found[::-1]


@pytest.mark.parametrize(
    ("ends", "crashed"),
    [
        ([FAILED, FAILED, FAILED], (1, 2, 3)),
        ([FAILED, FAILED], None),
        ([FAILED, LOST, FAILED], None),
        ([LOST, FENCED, FAILED], (1, 2, 3)),
        ([FAILED, FAILED, AttemptOutcome.PREEMPTED, FAILED], (1, 2, 4)),
        ([FAILED, FAILED, {"rolled_back": True, "outcome": FENCED}, FAILED], (1, 2, 4)),
        ([FAILED, FAILED, {"called_later": True, "outcome": FENCED}, LOST], None),
        ([FAILED, FAILED, AttemptOutcome.FINISHED, FAILED], None),
        ([FAILED, FAILED, {"committed": True}, FAILED], None),
        ([FAILED, FAILED, {"last_step": 100 + FEW_STEPS}], (1, 2, 3)),
        ([FAILED, FAILED, {"last_step": 101 + FEW_STEPS}], None),
        ([FAILED, FAILED, {"error_type": "holdfast.state.errors.StateMismatchError"}], None),
        ([FAILED, FAILED, {"error_type": "torch.OutOfMemoryError"}], (1, 2, 3)),
        ([FAILED, FAILED, {"point": "ck_w"}, FAILED], (1, 2, 4)),
        ([FAILED, FAILED, {"outcome": None}], None),
    ],
)
def test_which_ends_count(ends: list[Any], crashed: tuple[int, ...] | None) -> None:
    loop = crash_loop(tried(*ends), "ck_x", attempts=3)
    assert (None if loop is None else loop.attempts) == crashed


def test_a_release_counts_anew() -> None:
    three = tried(FAILED, FAILED, FAILED)
    assert crash_loop(three, "ck_x", attempts=3, released_at=OPENED + timedelta(hours=2)) is None
    assert crash_loop(three, "ck_x", attempts=3, released_at=OPENED) is not None


def test_the_other_points_are_those_since_the_last_progress() -> None:
    older = {"point": "ck_old", "committed": True}
    loop = crash_loop(tried(older, {"point": "ck_y"}, *[FAILED] * 3), "ck_x", attempts=3)
    assert loop is not None
    assert loop.others == {"ck_y"}
