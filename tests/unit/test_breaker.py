"""When a sweep must not delete."""

from __future__ import annotations

import pytest

from holdfast_service.collect.orphans import Amount, why_stop

GIB = 1024**3


@pytest.mark.rule("late-put-window")
@pytest.mark.parametrize(
    ("there", "due", "stops"),
    [
        (Amount(0, 0), Amount(0, 0), False),
        (Amount(3, 300), Amount(1, 100), False),  # a tiny store: any orphan is a large share
        (Amount(20, 300), Amount(20, 300), False),
        (Amount(21, 300), Amount(21, 300), True),
        (Amount(1000, 1000), Amount(50, 50), False),
        (Amount(1000, 1000), Amount(51, 51), True),
        (Amount(1000, 100 * GIB), Amount(5, 5 * GIB), False),
        (Amount(1000, 100 * GIB), Amount(5, 5 * GIB + 1), True),  # few objects, many bytes
    ],
)
def test_more_than_the_set_share_by_number_or_by_bytes_stops_it(there: Amount, due: Amount, stops: bool) -> None:
    why = why_stop("the store", there, due, 5)
    assert (why is not None) is stops
    if why is not None:
        assert f"{due.objects} of {there.objects}" in why


def test_without_a_share_only_what_is_below_the_floor_goes() -> None:
    assert why_stop("the store", Amount(10**6, 10**6), Amount(21, 21), 0) is not None
    assert why_stop("the store", Amount(10**6, 10**6), Amount(20, 20), 0) is None
