"""When a step is saved: what policies mean, and the schedule's decisions, with ranks that answer as they would."""

from __future__ import annotations

import logging
import threading
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.distributed.ranks import Question
from holdfast.errors import ConfigurationError, SaveDeclined, SaveFailed
from holdfast.save.job import SaveHandle
from holdfast.schedule.save_policy import Policy, ends_a_round, policy_of
from holdfast.schedule.schedule import Due, Schedule


class Ranks:
    """Rank 0's side of a world; counts what it asks the others."""

    is_first = True

    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size
        self.asked: list[int] = []

    def store(self, purpose: str) -> None:
        """Nobody stays away."""

    def first_says(self, step: int, question: Question, *, yes: bool, error: Exception | None) -> bool:
        assert question is Question.IS_BEST
        self.asked.append(step)
        if error is not None:
            raise error
        return yes


class Job:
    def __init__(self, policy: Policy, world_size: int = 1, *, known: float | None = None) -> None:
        self.ranks = Ranks(world_size)
        self.busy = False
        self.others_are_busy = False
        self.interval = 3600.0
        self.known_asked = 0
        self.asked_on: threading.Thread | None = None
        self.known = known
        self.schedule = Schedule(
            policy,
            self.ranks,  # type: ignore[arg-type]
            busy=lambda: self.busy,
            recommended_seconds=lambda: self.interval,
            known_best=self._known_best,
        )

    def _known_best(self, policy: Any) -> float | None:
        self.asked_on = threading.current_thread()
        self.known_asked += 1
        return self.known

    def step(
        self, step: int, *, agreed: bool = False, diverged: str | None = None, **metrics: Any
    ) -> tuple[Due | None, SaveHandle | None]:
        """As Checkpointer.step does it: saves if it is due, and is declined where a save is in flight."""
        due = self.schedule.due(step, metrics or None, agreed=agreed)
        if due is None:
            return None, None
        handle = SaveHandle(step, diverged)
        if (self.busy or self.others_are_busy) and due is Due.BY_INTERVAL:
            handle.fail(SaveDeclined(f"step {step}"))
        self.schedule.saved(metrics or None, handle, due)
        self.schedule.restart()
        return due, handle

    def saves(self, steps: range, **metrics: Any) -> list[int]:
        return [step for step in steps if self.step(step, **metrics)[0] is not None]


def test_policies_are_joined_in_any_nesting_and_each_of_them_counts() -> None:
    nested = (holdfast.Every(steps=4) | holdfast.OnPreemption()) | (holdfast.Every(steps=6) | holdfast.Best("loss"))
    assert len(nested.parts) == 4
    assert Job(nested).saves(range(13)) == [3, 5, 7, 11]
    assert Job(holdfast.OnPreemption()).saves(range(100)) == []
    assert not Job(holdfast.OnPreemption()).schedule.wants()
    with pytest.raises(TypeError):
        _ = holdfast.Every(steps=4) | 5  # type: ignore[operator]


def test_a_round_whose_last_step_never_comes_ends_with_the_first_one_behind_it() -> None:
    even = range(2, 502, 2)
    due = [step for last, step in pairwise(even) if ends_a_round(100, step, last)]
    assert due == [100, 200, 300, 400, 500]
    assert ends_a_round(100, 250, 30)
    assert not ends_a_round(100, 250, None)  # a job's first step may have any number
    assert not ends_a_round(100, 0, 150)


@pytest.mark.parametrize("wrong", [500, "best", [holdfast.Auto()]])
def test_what_is_no_policy_is_refused_with_what_to_write(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Every\(steps=500\)"):
        policy_of(wrong)


@pytest.mark.parametrize("wrong", [{"metric": ""}, {"metric": "a:b"}, {"metric": 3}, {"metric": "a", "mode": "low"}])
def test_a_best_that_no_selector_could_name_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="Best"):
        holdfast.Best(**wrong)


def test_without_a_policy_the_service_says_how_often() -> None:
    job = Job(policy_of(None))
    assert not job.schedule.wants()
    job.interval = 0.0
    assert job.schedule.wants()
    both = Job(holdfast.Auto() | holdfast.Every(minutes=1e-9))
    time.sleep(0.001)
    assert both.schedule.wants()  # the shorter of the two


@pytest.mark.rule("local-save-flag")
def test_a_due_save_that_meets_one_in_flight_is_done_at_the_first_free_step(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(holdfast.Every(steps=10))
    assert job.step(9)[0] is Due.BY_INTERVAL
    job.busy = True
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        assert job.step(19)[0] is Due.BY_INTERVAL  # declined
        assert job.saves(range(20, 25)) == []
        assert not job.schedule.wants()
        job.busy = False
        assert job.schedule.wants()
        assert job.saves(range(25, 29)) == [25]
        assert not job.schedule.wants()
        job.busy = True
        job.step(29)
    assert caplog.text.count("the interval stretches") == 1


@pytest.mark.rule("local-save-flag")
def test_of_several_ranks_none_does_by_itself_what_was_put_off() -> None:
    job = Job(holdfast.Every(steps=10), world_size=2)
    job.busy = True
    job.step(9)
    job.busy = False
    # This rank is free, and another may not be: they agree on a step first.
    assert job.saves(range(10, 19)) == []
    assert job.schedule.wants()
    assert job.step(19, agreed=True)[0] is Due.BY_INTERVAL
    assert not job.schedule.wants()


def test_a_save_that_another_rank_defers_is_tried_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr("holdfast.schedule.schedule.time", SimpleNamespace(monotonic=lambda: clock.now))
    job = Job(holdfast.Every(steps=1000), world_size=2)

    def tries(until: int) -> list[int]:
        at = []
        for second in range(clock.now, until):
            clock.now = second
            if job.schedule.wants():
                at.append(second)
                job.step(second, agreed=True)
        return at

    job.others_are_busy = True
    job.step(999)
    assert tries(300) == [2, 6, 14, 30, 62, 122, 182, 242]
    job.others_are_busy = False
    assert tries(400) == [302]
    job.others_are_busy = True
    job.step(1999)
    assert tries(410) == [401, 405]


def test_the_clock_says_nothing_while_a_save_is_in_flight(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(holdfast.Every(minutes=1e-9))
    job.busy = True
    time.sleep(0.001)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        assert [job.schedule.wants() for _ in range(3)] == [False] * 3
    assert caplog.text.count("still in flight") == 1
    job.busy = False
    assert job.schedule.wants()


def test_a_step_is_best_if_it_beats_all_that_was_saved_before() -> None:
    job = Job(holdfast.Best("loss"), known=0.5)
    losses = [0.7, float("nan"), float("-inf"), 0.4, 0.45, torch.tensor(0.3), torch.tensor([0.3])]
    assert [step for step, loss in enumerate(losses) if job.step(step, loss=loss)[0] is Due.BEST] == [3, 5]
    assert job.known_asked == 1
    assert job.saves(range(7, 10), accuracy=1.0) == []
    job.known = None
    job.schedule.restored()  # perhaps from before the best
    assert job.step(11, loss=0.6)[0] is Due.BEST
    highest = Job(holdfast.Best("accuracy", mode="max"), known=0.5)
    assert [highest.step(step, accuracy=value)[0] for step, value in enumerate((0.4, 0.6))] == [None, Due.BEST]


def test_the_service_is_asked_for_the_best_after_a_restore_and_not_on_the_training_thread() -> None:
    job = Job(holdfast.Best("loss"), known=0.5)
    job.schedule.restored()
    until = time.monotonic() + 60
    while not job.known_asked:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert job.asked_on is not threading.current_thread()
    assert [job.step(step, loss=loss)[0] for step, loss in enumerate((0.6, 0.4))] == [None, Due.BEST]
    assert job.known_asked == 1


def test_a_best_that_was_not_committed_is_not_the_best() -> None:
    job = Job(holdfast.Best("loss"))
    _, first = job.step(0, loss=0.5)
    _, failed = job.step(1, loss=0.2)
    assert first is not None
    assert failed is not None
    assert job.step(2, loss=0.3)[0] is None
    failed.fail(SaveFailed("the store is full"))
    _, last = job.step(3, loss=0.3)
    assert last is not None
    # With a local tier several saves are under way; nothing is left when they all fail, in whatever order.
    for under_way in (first, last):
        under_way.fail(SaveFailed("the store is full"))
    assert job.step(4, loss=0.9)[0] is Due.BEST
    assert job.known_asked == 1


def test_a_best_that_has_diverged_is_not_the_best() -> None:
    job = Job(holdfast.Best("loss"))
    steps = [(3.0, None), (0.1, "too good"), (2.0, None), (1.5, None), (2.5, None), (1.0, None)]
    due = [job.step(step, diverged=why, loss=loss)[0] for step, (loss, why) in enumerate(steps)]
    assert [step for step, why in enumerate(due) if why is Due.BEST] == [0, 1, 2, 3, 5]


def test_a_save_that_the_script_asks_for_counts_among_the_best() -> None:
    job = Job(holdfast.Best("loss"))
    job.schedule.saved({"loss": 0.1}, SaveHandle(0), None)
    assert job.step(1, loss=0.2)[0] is None


@pytest.mark.rule("local-save-flag")
def test_a_metric_is_read_only_at_the_steps_that_decide_by_it() -> None:
    class Unread:
        def __float__(self) -> float:
            raise AssertionError("a metric that nothing is decided by was waited for")

    job = Job(holdfast.Best("val_loss") | holdfast.Every(steps=1000), world_size=2)
    assert job.saves(range(100), loss=Unread()) == []
    assert job.ranks.asked == []
    assert job.schedule.due(100, {"loss": Unread(), "val_loss": 1.0}, agreed=False) is Due.BEST
    assert job.ranks.asked == [100]


def test_what_is_no_number_is_named_on_every_rank() -> None:
    with pytest.raises(TypeError, match="val_loss"):
        Job(holdfast.Best("val_loss")).step(0, val_loss="low")
