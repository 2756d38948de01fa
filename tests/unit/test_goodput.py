"""Where a run's time went, worked out by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from holdfast_protocol.runs import AttemptGoodput, Goodput, SpentTime
from holdfast_protocol.states import AttemptOutcome
from holdfast_service.insights.goodput import AttemptHistory, SeenAttempt, goodput_of, spent_between

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def attempt(number: int, opened: float, **facts: Any) -> AttemptHistory:
    """Times in seconds since START."""
    moments = {name: at(value) for name, value in facts.items() if name.endswith("_at")}
    return AttemptHistory(number=number, opened_at=at(opened), **(facts | moments))


def parts(spent: SpentTime) -> tuple[float, ...]:
    return tuple(
        round(value, 6)
        for value in (
            spent.productive_seconds,
            spent.lost_seconds,
            spent.saving_seconds,
            spent.restoring_seconds,
            spent.restarting_seconds,
            spent.idle_seconds,
        )
    )


def checked(history: list[AttemptHistory], now: float) -> tuple[Goodput, list[AttemptGoodput]]:
    """Whatever it is, the parts are the whole."""
    found = goodput_of(history, at(now))
    for spent in (found, *found.attempts):
        assert sum(parts(spent)) == pytest.approx(spent.wall_seconds)
        assert min(parts(spent)) >= 0
        assert spent.steps_kept + spent.steps_lost == spent.steps_run
    assert found.wall_seconds == pytest.approx((found.until - found.since).total_seconds() if found.since else 0)
    cuts = [-1000, 7, 13, 99, 100, 111, 350, 601, now + 1000]
    cut = [spent_between(history, at(since), at(until), at(now)) for since, until in pairwise(cuts)]
    if any(spent.step_seconds is not None for spent in found.attempts):
        assert sum(part[0] for part in cut if part) == pytest.approx(found.productive_seconds)
        assert sum(part[1] for part in cut if part) == pytest.approx(found.wall_seconds)
    else:
        assert set(cut) == {None}
    return found, found.attempts


# Steps of 2 seconds. It opens, starts for 10, and its first step ends at 12.
CRASHED = attempt(
    1,
    0,
    first_step=0,
    first_step_at=12,
    last_step=29,
    steps_run=30,
    progressed_at=12 + 29 * 2 + 5,  # two saves that took 5 together
    save_blocked_seconds=5.0,
    outcome=AttemptOutcome.FAILED,
    ended_at=76,
    heartbeat_at=76,
)


def test_a_crash_costs_the_steps_since_the_checkpoint_and_the_way_back() -> None:
    second = attempt(
        2,
        100,
        restore_seconds=4.0,
        resumed_from=(1, 19),
        first_step=20,
        first_step_at=109,  # 3 seconds to start, 4 to restore, 2 for the step
        last_step=39,
        steps_run=20,
        progressed_at=109 + 19 * 2,
        outcome=AttemptOutcome.FINISHED,
        ended_at=150,
        heartbeat_at=150,
    )
    found, (first, last) = checked([second, CRASHED], 1000)
    assert (first.steps_run, first.steps_kept, first.steps_lost) == (30, 20, 10)
    assert parts(first) == (40, 20, 5, 0, 10, 1)
    assert (last.steps_run, last.steps_kept, last.resumed_from_step, last.step_seconds) == (20, 20, 19, 2.0)
    assert parts(last) == (40, 0, 0, 4, 24 + 3, 3)
    assert (found.wall_seconds, found.steps_kept, found.steps_lost) == (150, 40, 10)
    assert found.goodput == pytest.approx(80 / 150)


def test_what_was_killed_ends_with_its_last_sign_and_all_its_steps_are_lost_if_nobody_resumed_from_it() -> None:
    silent = {"first_step": 20, "first_step_at": 104, "last_step": 24, "steps_run": 5, "progressed_at": 112}
    killed = attempt(
        2,
        100,
        **silent,
        resumed_from=(1, 19),
        outcome=AttemptOutcome.LOST,
        heartbeat_at=113,
        ended_at=400,
    )
    taken_over = attempt(
        3, 500, **silent, resumed_from=(1, 19), outcome=AttemptOutcome.FENCED, heartbeat_at=501, ended_at=600
    )
    now_training = attempt(
        4, 600, resumed_from=(1, 19), first_step=20, first_step_at=603, last_step=20, steps_run=1, progressed_at=603
    )
    found, (first, second, third, last) = checked([CRASHED, killed, taken_over, now_training], 605)
    assert (first.steps_lost, second.steps_lost, third.steps_lost, last.steps_lost) == (10, 5, 5, 0)
    assert second.wall_seconds == 24 + 13, "the job was gone at 113, not when somebody noticed"
    assert parts(second) == (0, 10, 0, 0, 24 + 2, 1)
    assert third.wall_seconds == (500 - 113) + 1
    assert last.step_seconds == pytest.approx(2.0), "as usual in this run: one step tells nothing of itself"
    assert found.until == at(605)


def test_an_attempt_that_was_fenced_while_it_lived_ran_until_then() -> None:
    alive = attempt(
        1,
        0,
        first_step=0,
        first_step_at=2,
        last_step=99,
        steps_run=100,
        progressed_at=200,
        outcome=AttemptOutcome.FENCED,
        called_later=True,
        heartbeat_at=195,
        ended_at=201,
    )
    found, (first, _) = checked([alive, attempt(2, 201)], 203)
    assert first.wall_seconds == 201
    assert (first.steps_kept, found.steps_kept) == (100, 100), "nobody has resumed from anywhere yet"


def test_a_spooled_save_that_is_adopted_late_puts_its_steps_on_the_line_again() -> None:
    third = attempt(3, 300, resumed_from=(1, 24), first_step=25, first_step_at=302, last_step=25, steps_run=1)
    second = attempt(2, 200, resumed_from=(1, 19), first_step=20, last_step=22, steps_run=3, ended_at=250,
                     outcome=AttemptOutcome.FAILED)  # fmt: skip
    _, (first, beside, last) = checked([CRASHED, second, third], 310)
    assert (first.steps_kept, first.steps_lost) == (25, 5)
    assert (beside.steps_kept, beside.steps_lost, last.steps_kept) == (0, 3, 1)


def test_a_save_shows_steps_that_no_heartbeat_told_of() -> None:
    killed = attempt(
        1, 0, first_step=0, first_step_at=2, last_step=14, steps_run=10, progressed_at=20, heartbeat_at=20,
        outcome=AttemptOutcome.LOST, ended_at=400,
    )  # fmt: skip
    before_any_heartbeat = attempt(2, 500, resumed_from=(1, 4), last_step=7, outcome=AttemptOutcome.LOST, ended_at=900)
    _, (first, second, _) = checked([killed, before_any_heartbeat, attempt(3, 950, resumed_from=(1, 14))], 960)
    assert (first.steps_run, first.steps_kept, first.steps_lost) == (15, 15, 0)
    assert (second.steps_run, second.steps_lost) == (3, 3)


def test_where_it_began_is_guessed_only_of_what_resumed_from_nothing() -> None:
    _, (from_nothing,) = checked([attempt(1, 0, last_step=20, heartbeat_at=30)], 40)
    assert (from_nothing.steps_run, from_nothing.steps_kept) == (20, 20)
    _, (forgotten,) = checked([attempt(2, 0, last_step=20, heartbeat_at=30, resumed_from_forgotten=True)], 40)
    assert (forgotten.steps_run, forgotten.last_step) == (0, 20), "it may have gone on from 19"


def test_after_a_finished_attempt_nobody_waits() -> None:
    done = attempt(1, 0, first_step=0, first_step_at=1, last_step=9, steps_run=10, progressed_at=10, ended_at=10,
                   outcome=AttemptOutcome.FINISHED)  # fmt: skip
    longer = attempt(2, 1000, resumed_from=(1, 9), first_step=10, first_step_at=1001, last_step=19, steps_run=10,
                     progressed_at=1010, ended_at=1010, outcome=AttemptOutcome.FINISHED)  # fmt: skip
    found, (_, second) = checked([done, longer], 5000)
    assert parts(second) == (10, 0, 0, 0, 0, 990)
    assert found.goodput == pytest.approx(20 / 1010)


@pytest.mark.parametrize(
    "history",
    [
        [],
        [attempt(1, 0)],
        [attempt(1, 0, last_step=500, outcome=AttemptOutcome.FAILED, ended_at=50)],  # of before it was told
        [attempt(1, 0, first_step=0, first_step_at=0, last_step=0, steps_run=1, progressed_at=0)],
        # Words that do not fit: sums that exceed the time, moments before the opening, a rate of nothing.
        [
            attempt(
                1, 50, first_step=3, first_step_at=40, last_step=1, steps_run=9, progressed_at=30, restore_seconds=1e9,
                save_blocked_seconds=1e9, steps_per_second=0.0, ended_at=10, outcome=AttemptOutcome.FAILED,
            )
        ],
        [attempt(1, 0, resumed_from=(7, 3)), attempt(2, 5, resumed_from=(2, 3), last_step=1)],
    ],
)  # fmt: skip
def test_whatever_is_known_the_parts_are_the_whole(history: list[AttemptHistory]) -> None:
    checked(history, 100)


def test_of_an_attempt_that_was_seen_an_hour_has_what_came_after() -> None:
    """It trained for 240 hours, was sampled a minute after the last of them, and hung from then on."""
    hour, trained = 3600.0, 240 * 3600.0
    told = {"first_step": 1, "first_step_at": 1, "last_step": 864_000, "steps_run": 864_000, "progressed_at": trained}
    history = [attempt(1, 0, **told)]

    def of_hour(number: int, seen: SeenAttempt | None) -> tuple[float, float]:
        begin = at(number * hour)
        found = spent_between(history, begin, at((number + 1) * hour), at((number + 1) * hour + 60), seen)
        assert found is not None
        return found

    seen = SeenAttempt(1, at(trained + 60), trained)
    assert of_hour(241, None)[0] > 3500, "else it is spread evenly"
    assert of_hour(240, seen) == (0.0, hour)
    assert of_hour(241, SeenAttempt(2, seen.at, 0.0)) == of_hour(241, None), "of another attempt"
    assert of_hour(240, SeenAttempt(1, seen.at, trained + 500)) == (0.0, hour), "steps were lost meanwhile"
    assert of_hour(240, SeenAttempt(1, seen.at, trained - 1800)) == (pytest.approx(1800), hour)
    assert of_hour(240, SeenAttempt(1, seen.at, 0.0)) == (hour, hour)
