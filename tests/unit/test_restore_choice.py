"""Which checkpoint is chosen, and why not a newer one: the pure selection, as tables."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from holdfast_protocol.runs import Best, Latest
from holdfast_protocol.states import CheckpointState, Health, Tier
from holdfast_service.lineage.restore_choice import SKIPPED_SHOWN, Candidate, Line, Segment, choose, not_restorable

LINE = Line([Segment(2, None), Segment(1, 500)])


def candidate(step: int, attempt: int = 1, **changes: Any) -> Candidate:
    fields: dict[str, Any] = {
        "checkpoint_id": f"ck-{attempt}-{step}",
        "attempt": attempt,
        "step": step,
        "world_size": 2,
        "state": CheckpointState.COMMITTED,
        "health": Health.OK,
        "tier": Tier.HOT,
        "digest": "0" * 64,
        "logical_bytes": 1,
        "committed_at": datetime.now(UTC),
    }
    return Candidate(**(fields | changes))


def loss(value: float | None, nonfinite: str | None = None) -> dict[str, Any]:
    return {"loss": {"value": value, "nonfinite": nonfinite}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state": CheckpointState.UPLOADING}, "uploading"),
        ({"state": CheckpointState.ABORTED}, "aborted"),
        ({"state": CheckpointState.TRASHED}, "trashed"),
        ({"state": CheckpointState.DELETING}, "trashed"),
        ({"health": Health.CORRUPT}, "corrupt"),
        ({"health": Health.DIVERGED}, "diverged"),
        ({"health": Health.QUARANTINED}, "quarantined"),
        ({"tier": Tier.COLD}, "cold"),
        ({"tier": Tier.THAWING}, "cold"),
        ({"attempt": 3}, "detached"),
        ({"step": 501}, "detached"),
    ],
)
def test_what_cannot_be_restored_is_skipped_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    newer = candidate(**({"step": 450} | changes))
    chosen, skipped = choose([newer, candidate(400)], LINE, Latest())
    assert chosen is not None
    assert chosen.step == 400
    assert [(each.checkpoint_id, each.reason) for each in skipped] == [(newer.checkpoint_id, reason)]
    assert skipped[0].detail.endswith(".")
    assert f"Step {newer.step} of attempt {newer.attempt}" in skipped[0].detail


def test_a_first_try_of_the_same_step_is_not_newer() -> None:
    aborted = candidate(400, state=CheckpointState.ABORTED)
    chosen, skipped = choose([aborted, candidate(400)], LINE, Latest())
    assert chosen is not None
    assert skipped == []


def test_older_checkpoints_are_not_even_read() -> None:
    def newest_first() -> Any:
        yield candidate(400)
        raise AssertionError("read on")

    assert choose(newest_first(), LINE, Latest())[0] is not None


def test_at_most_so_many_are_told() -> None:
    many = [candidate(step, state=CheckpointState.ABORTED) for step in range(400, 300, -1)]
    chosen, skipped = choose(many, LINE, Latest())
    assert chosen is None
    assert [each.step for each in skipped] == list(range(400, 400 - SKIPPED_SHOWN, -1))


@pytest.mark.rule("finite-metrics")
def test_best_ignores_what_is_missing_and_what_is_not_finite() -> None:
    points = [
        candidate(500, metrics=loss(None, "-inf")),
        candidate(400, metrics={}),
        candidate(300, metrics=loss(0.5)),
        candidate(200, metrics=loss(0.5)),
        candidate(100, metrics=loss(0.9)),
    ]
    assert choose(points, LINE, Best("loss"))[0] is points[2]
    assert choose(points, LINE, Best("loss", "max"))[0] is points[4]
    assert choose(points, LINE, Best("accuracy")) == (None, [])


def test_best_tells_what_would_have_been_better() -> None:
    points = [
        candidate(500, metrics=loss(0.1), health=Health.DIVERGED),
        candidate(400, metrics=loss(0.5)),
        candidate(300, metrics=loss(0.9), health=Health.CORRUPT),
    ]
    chosen, skipped = choose(points, LINE, Best("loss"))
    assert chosen is points[1]
    assert [each.step for each in skipped] == [500]


def test_a_named_attempt_may_lie_off_the_line() -> None:
    assert not_restorable(candidate(900), LINE) is not None
    assert not_restorable(candidate(900), None) is None
