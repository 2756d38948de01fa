"""The lineage, as a table: attempts as (number, resumed from, cut)."""

from __future__ import annotations

import pytest

from holdfast_service.lineage.restore_choice import AttemptNode, Segment, lineage

CASES = {
    "no attempt": ([], []),
    "one that has not cut": ([(1, None, False)], []),
    "one that has": ([(1, None, True)], [(1, None)]),
    "the second resumed and committed": ([(1, None, True), (2, (1, 500), True)], [(2, None), (1, 500)]),
    "the second has not committed": ([(1, None, True), (2, (1, 500), False)], [(1, None)]),
    "the second started afresh": ([(1, None, True), (2, None, True)], [(2, None)]),
    "through one that never committed": (
        [(1, None, True), (2, (1, 500), False), (3, (1, 400), True)],
        [(3, None), (1, 400)],
    ),
    "three generations": (
        [(1, None, True), (2, (1, 500), True), (3, (2, 700), True)],
        [(3, None), (2, 700), (1, 500)],
    ),
    "a sibling is detached": (
        [(1, None, True), (2, (1, 500), True), (3, (1, 300), True)],
        [(3, None), (1, 300)],
    ),
    "a loop ends": ([(1, (2, 5), True), (2, (1, 5), True)], [(2, None), (1, 5)]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_line(name: str) -> None:
    attempts, expected = CASES[name]
    line = lineage(AttemptNode(*attempt) for attempt in attempts)
    assert list(line.segments) == [Segment(*segment) for segment in expected]


def test_a_detached_checkpoint_lies_on_the_line_only_where_an_attempt_of_the_line_resumed_from_it() -> None:
    attempts = [
        AttemptNode(1, None, True),
        AttemptNode(2, (1, 300), True, "ck_left"),
        AttemptNode(3, (1, 400), True, "ck_named"),
        AttemptNode(4, (1, 350), False, "ck_uncut"),
    ]
    line = lineage(attempts)
    assert line.has("ck_named", 1, 400, detached=True)
    assert line.has("ck_other", 1, 400, detached=False)
    for name, step in (("ck_other", 400), ("ck_left", 300), ("ck_uncut", 350)):
        assert not line.has(name, 1, step, detached=True)


def test_a_checkpoint_lies_on_the_line_up_to_where_it_was_left() -> None:
    line = lineage([AttemptNode(1, None, True), AttemptNode(2, (1, 500), True)])
    assert [(point in line) for point in [(1, 500), (1, 501), (2, 1), (2, 10**9), (3, 1)]] == [
        True, False, True, True, False,
    ]  # fmt: skip
