"""Whose new connections are turned away, and until when. That they are is in service/test_held_refusals.py."""

from __future__ import annotations

import pytest

from holdfast_service.web.fair_queue import (
    LONGEST_SHUT_SECONDS,
    MOST_WRONG,
    SECONDS_PER_WRONG,
    SERVED_SECONDS,
    WrongTokens,
)

pytestmark = pytest.mark.rule("limits-before-work")
FLOODS, QUIET = "192.0.2.1", "192.0.2.2"
BEGAN = 1000.0


def flooded() -> WrongTokens:
    tokens = WrongTokens()
    for _ in range(MOST_WRONG):
        assert not tokens.turns_away(FLOODS, BEGAN)
        tokens.was_refused(FLOODS, BEGAN)
    assert tokens.turns_away(FLOODS, BEGAN)
    return tokens


def test_so_many_a_second_come_in_from_an_address_that_goes_on() -> None:
    tokens = flooded()
    assert not tokens.turns_away(QUIET, BEGAN)
    admitted = 0
    for milliseconds in range(10_000):
        now = BEGAN + milliseconds / 1000
        if not tokens.turns_away(FLOODS, now):
            admitted += 1
            tokens.was_refused(FLOODS, now)
    assert admitted == pytest.approx(10 / SECONDS_PER_WRONG, abs=2)


def test_those_that_come_at_once_are_made_up_for_but_not_for_long() -> None:
    tokens = flooded()
    now = BEGAN + 1.5 * SECONDS_PER_WRONG
    assert not any(tokens.turns_away(FLOODS, now) for _ in range(1000)), "they are let in before one of them is refused"
    for _ in range(1000):
        tokens.was_refused(FLOODS, now)
    assert tokens.turns_away(FLOODS, now + LONGEST_SHUT_SECONDS - 1)
    assert not tokens.turns_away(FLOODS, now + LONGEST_SHUT_SECONDS + 1)


def test_an_address_that_was_served_within_the_hour_is_not_turned_away() -> None:
    tokens = flooded()
    tokens.was_served(FLOODS, BEGAN)
    for now in (BEGAN, BEGAN + SERVED_SECONDS - 1):
        for _ in range(2 * MOST_WRONG):
            tokens.was_refused(FLOODS, now)
        assert not tokens.turns_away(FLOODS, now)
    assert tokens.turns_away(FLOODS, BEGAN + SERVED_SECONDS)


def test_addresses_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast_service.auth.principal._MOST_KEPT", 3)
    tokens = flooded()
    for number in range(3):
        tokens.was_refused(f"198.51.100.{number}", BEGAN)
    assert not tokens.turns_away(FLOODS, BEGAN), "it is the oldest of four"
