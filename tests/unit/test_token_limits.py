"""How often a token may call, and how many of its calls may be under way: tables, with times that are given."""

from __future__ import annotations

import pytest

from holdfast_service.web import fair_queue
from holdfast_service.web.fair_queue import CallClass, Rates, TokenLimit, TokenLimits, TokenRefusal

pytestmark = pytest.mark.rule("limits-before-work")
NOW = 100.0


def test_a_quiet_token_calls_at_once_and_then_at_its_rate() -> None:
    bucket = TokenLimits(burst_seconds=2).bucket_of("one", 4, NOW)
    assert bucket is not None
    assert [bucket.take(NOW) for _ in range(8)] == [None] * 8
    assert bucket.take(NOW) is not None
    assert bucket.take(NOW + 0.25) is None
    assert bucket.take(NOW + 0.25) is not None
    assert [bucket.take(NOW + 60) for _ in range(8)] == [None] * 8, "a long pause gives no more than that"
    assert bucket.take(NOW + 60) is not None


def test_each_call_that_is_refused_is_told_a_later_time() -> None:
    bucket = TokenLimits(burst_seconds=2).bucket_of("one", 1, NOW)
    assert bucket is not None
    assert [bucket.take(NOW) for _ in range(2)] == [None] * 2
    assert [bucket.take(NOW) for _ in range(40)] == [*range(1, 31), *[30] * 10]


def test_the_headers_say_what_is_left_and_when_it_is_full() -> None:
    bucket = TokenLimits(burst_seconds=10).bucket_of("one", 0.5, NOW)
    assert bucket is not None
    bucket.take(NOW)
    assert dict(bucket.headers()) == {b"ratelimit-limit": b"5", b"ratelimit-remaining": b"4", b"ratelimit-reset": b"2"}


def test_begins_and_lists_leave_half_of_a_projects_calls_to_those_that_are_refused_later() -> None:
    bucket = Rates(burst_seconds=2).bucket_of("demo", 4, NOW)
    assert bucket is not None
    taken = dict.fromkeys((CallClass.OTHER, CallClass.BEGIN, CallClass.NEGOTIATE, CallClass.RESTORE), 0)
    for kind in taken:
        while bucket.take(NOW, bucket.kept_from(kind)) is None:
            taken[kind] += 1
    assert list(taken.values()) == [4, 0, 2, 2]
    kept = bucket.kept_from(CallClass.BEGIN)
    told = {b"ratelimit-limit": b"4", b"ratelimit-remaining": b"0", b"ratelimit-reset": b"2"}
    assert dict(bucket.headers(kept)) == told
    assert bucket.take(NOW + 1.2, kept) is not None
    assert bucket.take(NOW + 1.3, kept) is None, "when what is kept has come back, and one more"


def test_a_slow_token_has_one_call_at_least_and_no_rate_is_no_limit() -> None:
    limits = TokenLimits(burst_seconds=1)
    bucket = limits.bucket_of("one", 0.01, NOW)
    assert bucket is not None
    assert [bucket.take(NOW), bucket.take(NOW)] == [None, 30]
    assert limits.bucket_of("two", 0, NOW) is None


def test_another_token_of_an_identity_brings_another_rate_and_no_more_calls() -> None:
    limits = TokenLimits(burst_seconds=2)
    slow = limits.bucket_of("one", 1, NOW)
    assert slow is not None
    assert [slow.take(NOW), slow.take(NOW)] == [None, None]
    fast = limits.bucket_of("one", 10, NOW)
    assert fast is slow
    assert fast.take(NOW) is not None, "another exchange brings no full bucket"
    assert [fast.take(NOW + 0.5) for _ in range(5)] == [None] * 5
    again = limits.bucket_of("one", 1, NOW + 10)
    assert again is slow
    assert [again.take(NOW + 10) for _ in range(3)] == [None, None, 1]


def test_each_token_has_its_own_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "_MOST_KEPT", 2)
    limits = TokenLimits(burst_seconds=1)
    buckets = [limits.bucket_of(name, 1, NOW) for name in ("one", "two", "one", "three")]
    assert buckets[0] is buckets[2] is limits.bucket_of("one", 1, NOW)
    assert buckets[1] is not limits.bucket_of("two", 1, NOW)


def test_begins_are_refused_first_and_each_call_leaves() -> None:
    limits = TokenLimits(burst_seconds=1)
    refused = TokenRefusal(TokenLimit.CONCURRENT, 4, 1)
    begins = [limits.let_in("one", CallClass.BEGIN, 4) for _ in range(3)]
    assert begins == [None, None, refused]
    assert [limits.let_in("one", CallClass.RESTORE, 4) for _ in range(3)] == [None, None, refused]
    assert limits.let_in("two", CallClass.BEGIN, 4) is None
    for _ in range(4):
        limits.leave("one")
    assert limits.let_in("one", CallClass.BEGIN, 4) is None
