"""Rate and time left, with a clock of the test's own."""

from __future__ import annotations

import pytest

from holdfast.progress import Phase, ProgressBoard, ProgressMeter, readable_seconds


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def meter(clock):
    return ProgressMeter(Phase.RESTORING, 7, 1_000, clock=clock)


def test_at_the_beginning_nothing_tells_how_long_it_takes(meter):
    progress = meter.read()
    assert (progress.phase, progress.step) == (Phase.RESTORING, 7)
    assert (progress.bytes_done, progress.bytes_total) == (0, 1_000)
    assert (progress.bytes_per_second, progress.seconds_left) == (0.0, None)


def test_rate_and_time_left_follow_what_arrives(meter, clock):
    clock.now += 2
    meter.advance(200)
    assert meter.read().bytes_per_second == 100
    assert meter.read().seconds_left == 8


def test_the_rate_is_that_of_the_last_while_and_falls_when_nothing_arrives(meter, clock):
    for _ in range(10):
        clock.now += 1
        meter.advance(10)
    for _ in range(40):
        clock.now += 1
        meter.advance(20)
    assert meter.read().bytes_per_second == 20
    clock.now += 10
    assert meter.read().bytes_per_second == pytest.approx(10)
    clock.now += 100
    assert meter.read().bytes_per_second == 0
    assert meter.read().seconds_left is None
    clock.now += 1
    meter.advance(100)
    assert 0 < meter.read().bytes_per_second < 100


def test_at_the_end_nothing_is_left(meter, clock):
    clock.now += 1
    meter.advance(1_000)
    assert meter.read().seconds_left == 0
    assert ProgressMeter(Phase.SAVING, 0, 0, clock=clock).read().seconds_left == 0


def test_a_line_is_due_after_ten_seconds_and_then_every_thirty(meter, clock):
    due = []
    for second in range(1, 101):
        clock.now += 1
        if (progress := meter.advance(1)) is not None:
            due.append((second, progress.bytes_done))
    assert due == [(10, 10), (40, 40), (70, 70), (100, 100)]


def test_the_board_shows_what_is_under_way_and_forgets_it(clock):
    board = ProgressBoard()
    assert board.read() is None
    with board.under_way(Phase.SAVING, 3, 10) as meter:
        meter.advance(4)
        assert board.read().bytes_done == 4
    assert board.read() is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unknown"), (0.4, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_seconds_are_readable(seconds, text):
    assert readable_seconds(seconds) == text
