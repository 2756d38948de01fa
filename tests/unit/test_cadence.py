"""When a controller looks again: pauses, changes, and what a person wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast_service.background.cadence import Changes, Pause
from holdfast_service.background.registry import LONGEST_YIELD_SECONDS
from holdfast_service.context import Load
from holdfast_service.liveness.abandoned_uploads import is_downtime
from holdfast_service.liveness.controller import loops
from holdfast_service.retention import controller as retention
from holdfast_service.retention import purge
from holdfast_service.settings import ServiceSettings
from holdfast_service.training.fencing import REAPER

SECONDS = 30.0
FAR = 3600.0


def test_a_pause_doubles_while_nothing_is_found_and_is_short_again_after_work() -> None:
    pause = Pause(5, 60)
    assert [pause.next(idle=True) for _ in range(5)] == [10, 20, 40, 60, 60]
    assert pause.next(idle=False) == 5
    assert pause.next(idle=True) == 10
    assert pause.reset() == 5


def test_a_controller_that_seldom_looks_keeps_its_own_pause() -> None:
    pause = Pause(300, 60)
    assert [pause.next(idle=True) for _ in range(3)] == [300, 300, 300]


class Catalog:
    """Answers the look of a `Changes`: the sum of the marks, and which passes are wanted."""

    def __init__(self) -> None:
        self.marks, self.wanted = 1, ""
        self.looks = 0

    def read(self, **_: Any) -> Catalog:
        return self

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def execute(self, _: object) -> Catalog:
        return self

    def one(self) -> tuple[int, str]:
        self.looks += 1
        return self.marks, self.wanted


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
def context(catalog: Catalog) -> Iterator[Any]:
    made = SimpleNamespace(database=catalog, stopping=threading.Event())
    yield made
    made.stopping.set()


@pytest.fixture
def changes(context: Any, catalog: Catalog) -> Changes:
    changes = Changes(context, 0.01)
    changes.start()
    until(lambda: catalog.looks > 1)
    return changes


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.002)


class Waiting:
    """A thread that waits for the next pass of `reap`, which is an hour away."""

    def __init__(self, changes: Changes, pause: Pause) -> None:
        self.due_at: list[float] = []
        due_at, since = time.monotonic() + FAR, changes.count
        self.thread = threading.Thread(
            target=lambda: self.due_at.append(changes.wait("reap", pause, due_at, since)), daemon=True
        )
        self.thread.start()

    def ends(self) -> float:
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        return self.due_at[0]


def test_without_news_it_waits(changes: Changes, catalog: Catalog) -> None:
    waiting, looks = Waiting(changes, Pause(0.01, FAR)), catalog.looks
    until(lambda: catalog.looks > looks + 5)
    assert waiting.thread.is_alive()


def test_a_change_of_any_process_makes_it_look_after_its_short_pause(changes: Changes, catalog: Catalog) -> None:
    began = time.monotonic()  # first: the thread counts its pause from when it begins to wait
    waiting = Waiting(changes, Pause(0.05, FAR))
    catalog.marks += 1
    assert waiting.ends() <= time.monotonic()
    assert time.monotonic() - began >= 0.04


def test_a_change_during_its_pass_is_not_missed(changes: Changes) -> None:
    since = changes.count
    changes.note()
    assert changes.wait("reap", Pause(0.01, FAR), time.monotonic() + FAR, since) <= time.monotonic()


def test_a_wanted_pass_is_not_due_by_time(changes: Changes, catalog: Catalog) -> None:
    """A person who wants one pass gets one, and the others keep their time."""
    waiting, other = Waiting(changes, Pause(FAR, FAR)), threading.Event()
    threading.Thread(
        target=lambda: (changes.wait("scrub", Pause(FAR, FAR), time.monotonic() + FAR, changes.count), other.set()),
        daemon=True,
    ).start()
    catalog.wanted = "verify,reap"
    assert waiting.ends() > time.monotonic()
    assert not other.is_set()


def test_it_ends_with_its_process(changes: Changes, context: Any) -> None:
    waiting = Waiting(changes, Pause(FAR, FAR))
    context.stopping.set()
    waiting.ends()


def test_a_pass_waits_for_callers_but_not_for_ever_and_not_when_stopped() -> None:
    load, stopping = Load(), threading.Event()
    load.set_busy(busy=True)
    began = time.monotonic()
    load.yield_to_callers(0.1, stopping)
    assert time.monotonic() - began >= 0.1
    threading.Timer(0.05, load.set_busy, kwargs={"busy": False}).start()
    load.yield_to_callers(FAR, stopping)
    load.set_busy(busy=True)
    stopping.set()
    load.yield_to_callers(FAR, stopping)


def test_the_project_of_a_checkpoint_is_remembered_for_the_newest_ones() -> None:
    load = Load()
    for number in range(10_001):
        load.note_checkpoint(f"ck_{number}", "demo")
    assert load.project_of("ck_0") is None
    assert load.project_of("ck_10000") == "demo"


@pytest.mark.parametrize("interval", [0.5, 5.0, 60.0])
def test_the_reapers_longest_pause_is_not_taken_for_downtime(interval: float) -> None:
    """Else every quiet minute would move every deadline, and nothing would ever be given up."""
    settings = ServiceSettings(controller_interval_seconds=interval)
    (reaper,) = (each for each in loops(settings) if each.name == REAPER)
    longest = reaper.longest_pauses * interval + LONGEST_YIELD_SECONDS
    assert not is_downtime(timedelta(seconds=longest), settings)


@pytest.mark.parametrize("interval", [0.5, 5.0, 60.0])
def test_the_longest_pause_of_purge_moves_no_end_in_the_trash(interval: float) -> None:
    settings = ServiceSettings(controller_interval_seconds=interval)
    (purging,) = (each for each in retention.loops(settings) if each.name == purge.NAME)
    longest = purging.longest_pauses * interval + LONGEST_YIELD_SECONDS
    assert not purge.is_gap(timedelta(seconds=longest), settings)
