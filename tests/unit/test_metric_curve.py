"""Thinning, and what the training thread takes for the next heartbeat."""

from __future__ import annotations

import logging
import math
import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from holdfast.session.curve import MetricCurve
from holdfast_protocol.attempts import Heartbeat
from holdfast_protocol.base import body_for
from holdfast_protocol.runs import MOST_CURVES, MOST_POINTS_TOLD, Measured, thinned


def told(curve: MetricCurve, name: str = "loss") -> list[Any]:
    return list(curve.unsent().get(name, []))


@pytest.mark.parametrize("seed", range(5))
def test_thinning_keeps_every_extreme_and_is_the_same_in_parts(seed: int) -> None:
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(10**9), 3000))
    points = [Measured(1 + step // 4 * 10**8, step, chance.gauss(0, 1)) for step in steps]
    points[700] = points[700]._replace(value=50.0)
    points[1500] = points[1500]._replace(value=-math.inf)
    points[2900] = points[2900]._replace(value=-50.0)
    for most in (4, 100, 1024):
        kept = thinned(points, most)
        assert len(kept) <= most
        assert set(kept) <= set(points), "each was measured"
        assert {points[700], points[1500], points[2900], points[-1]} <= set(kept) or most == 4
        assert {point.value for point in kept} >= {50.0, -50.0}
        assert thinned(kept, most) == kept
    assert thinned(reversed(points), len(points)) == points


def test_thinning_ends_for_more_attempts_than_points_may_stay() -> None:
    points = [Measured(attempt, attempt * 10 + step, float(attempt)) for attempt in range(1, 900) for step in range(3)]
    kept = thinned(points, 64)
    assert 4 <= len(kept) <= 64
    assert (kept[0].value, kept[-1].value) == (1.0, 899.0)
    assert len(thinned([Measured(attempt, 2**62, 0.0) for attempt in range(2**31 - 50, 2**31)], 4)) <= 4


@pytest.mark.parametrize("most", [312, 500, 700])
def test_many_short_attempts_leave_the_longest_one_its_shape(most: int) -> None:
    """A job that crashed 180 times, and then ran."""
    short = [Measured(attempt, attempt + step, 0.0) for attempt in range(1, 181) for step in range(5)]
    long = [Measured(181, 181 + step, math.sin(step / 50)) for step in range(1000)]
    kept = [point for point in thinned(short + long, most) if point.attempt == 181]
    assert len(kept) >= 100
    assert max(later.step - earlier.step for earlier, later in pairwise(kept)) <= 64


def test_what_was_measured_is_told_until_it_was_answered() -> None:
    curve = MetricCurve(takes=True)
    curve.take(1, {"loss": 2.0, "lr": torch.tensor(0.5, requires_grad=True)})
    curve.take(2, None)
    first = curve.unsent()
    assert first == {"loss": [(1, 2.0)], "lr": [(1, 0.5)]}
    curve.take(2, {"loss": math.nan})
    assert curve.unsent() == {"loss": [(1, 2.0), (2, "nan")], "lr": [(1, 0.5)]}, "the first report was lost"
    curve.sent(first, generation=curve.generation)
    assert curve.unsent() == {"loss": [(2, "nan")]}
    curve.begin()
    assert curve.unsent() == {}, "another attempt's"


def test_a_tensor_that_its_owner_writes_again_keeps_its_value() -> None:
    curve = MetricCurve(takes=True)
    loss = torch.zeros(1)
    for step in range(3):
        loss += 1
        curve.take(step, {"loss": loss})
    assert told(curve) == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_other_ranks_take_nothing() -> None:
    curve = MetricCurve(takes=False)
    curve.take(1, {"loss": 2.0})
    assert curve.unsent() == {}


def test_while_no_report_is_answered_little_is_kept_and_no_spike_is_lost() -> None:
    curve = MetricCurve(takes=True)
    for step in range(100_000):
        curve.take(step, {"loss": 1e6 if step == 54_321 else 1.0, "lr": 0.1})
    report = curve.unsent()
    assert sum(map(len, report.values())) <= MOST_POINTS_TOLD
    assert (54_321, 1e6) in report["loss"]
    assert report["loss"][-1] == (99_999, 1.0)
    Heartbeat(epoch=1, attempt=1, metrics=report)


def test_what_a_short_curve_leaves_of_its_share_goes_to_the_longer_ones() -> None:
    curve = MetricCurve(takes=True)
    curve.take(0, {f"measured_once_{number}": 1.0 for number in range(20)})
    for step in range(1200):
        curve.take(step, {"loss": float(step), "lr": float(step)})
    report = curve.unsent()
    assert len(report) == 22
    assert MOST_POINTS_TOLD / 2 < sum(map(len, report.values())) <= MOST_POINTS_TOLD
    assert len(report["loss"]) > MOST_POINTS_TOLD / 4


def test_a_late_answer_to_the_attempt_before_forgets_nothing_of_the_new_one() -> None:
    """A rollback while a heartbeat is on its way: the new attempt runs the same steps again."""
    curve = MetricCurve(takes=True)
    curve.take(5, {"loss": 9.0})
    report, generation = curve.unsent(), curve.generation
    curve.begin()
    curve.take(5, {"loss": 1.0})
    curve.sent(report, generation=generation)
    assert told(curve) == [(5, 1.0)]


def test_names_without_end_are_not_all_remembered_or_named(caplog: pytest.LogCaptureFixture) -> None:
    curve = MetricCurve(takes=True)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for step in range(1000):
            curve.take(step, {"loss": float(step), f"loss of step {step}": 1.0, f"text of step {step}": "high"})
    assert len(caplog.records) == 201
    assert "from now on no new name gets one" in caplog.text
    assert len(told(curve)) > 400


def test_a_log_handler_that_raises_ends_nothing() -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the disk is full")

    handler = Raises()
    logging.getLogger("holdfast").addHandler(handler)
    try:
        curve = MetricCurve(takes=True)
        curve.take(1, {"text": "high", "loss": 1.0})
        assert told(curve) == [(1, 1.0)]
    finally:
        logging.getLogger("holdfast").removeHandler(handler)


def test_what_is_no_number_is_named_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    curve = MetricCurve(takes=True)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for step in range(3):
            odd: dict[Any, Any] = {"text": "high", "pair": torch.zeros(2), "big": 10**400, 7: 1.0, "a\nb": 1.0, "": 2.0}
            curve.take(step, odd | {"loss": 1, "weight": torch.nn.Parameter(torch.ones(1))})
            curve.unsent()
    assert sorted(curve.unsent()) == ["loss"]
    assert len(caplog.records) == 7
    assert "the metric 'text' is not in the run's curves" in caplog.text


def test_a_metric_that_is_measured_now_and_then_is_taken_then() -> None:
    curve = MetricCurve(takes=True)
    for step, value in enumerate([None, "soon", 1.5, None, 1.0]):
        curve.take(step, {"val_loss": value})
    assert told(curve, "val_loss") == [(2, 1.5), (4, 1.0)]


def test_metrics_that_the_run_has_no_room_for_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    curve = MetricCurve(takes=True)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        curve.take(1, {f"m{number}": 1.0 for number in range(MOST_CURVES + 6)})
        report = curve.unsent()
        assert len(report) == MOST_CURVES
        for _ in range(2):
            curve.sent(report, ["m3"], generation=curve.generation)
    assert caplog.text.count("m3") == 1
    curve.take(2, {"m3": 1.0, "m4": 1.0})
    assert sorted(curve.unsent()) == ["m4"]


def test_an_older_service_is_told_no_metrics() -> None:
    beat = Heartbeat(epoch=1, attempt=1, step=3, metrics={"loss": [(3, 1.0)]})
    assert b"loss" not in body_for(8, beat)
    assert b'"metrics":{"loss":[[3,1.0]]}' in body_for(9, beat)
