"""Curves in plain characters."""

from __future__ import annotations

import pytest

from holdfast_client.cli.output import show_plot
from holdfast_protocol.runs import MetricPoint


def point(step: int, value: float | None, attempt: int = 1) -> MetricPoint:
    return MetricPoint(step=step, attempt=attempt, value=value, nonfinite=None if value is not None else "nan")


def plotted(capsys: pytest.CaptureFixture[str], points: list[MetricPoint], *, width: int = 10, height: int = 4) -> str:
    show_plot(points, width=width, height=height)
    return capsys.readouterr().out


def test_a_curve_with_a_spike_a_nan_and_a_second_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    points = [point(step, 3.0 - step / 10) for step in range(10)] + [point(step, 1.0, 2) for step in range(10, 20)]
    points[14] = point(14, 10.0, 2)
    points[17] = point(17, None, 2)
    assert plotted(capsys, points) == (
        "   |        !\n10 |      *\n   |      |\n   |***   |\n 1 |  ********\n   +----+-----\n    0       19\n"
    )


def test_one_point_one_level_and_nothing_finite(capsys: pytest.CaptureFixture[str]) -> None:
    assert plotted(capsys, [point(7, 2.5)]) == "2.5 |*\n    +----------\n     7        7\n"
    assert plotted(capsys, [point(1, 2.0), point(2, 2.0)]) == "2 |*        *\n  +----------\n   1        2\n"
    assert plotted(capsys, [point(1, None)]) == " |!\n |\n +----------\n  1        1\n"


def test_values_whose_difference_is_infinite(capsys: pytest.CaptureFixture[str]) -> None:
    out = plotted(capsys, [point(1, -1.7e308), point(2, 1.7e308)])
    assert [line for line in out.splitlines() if "*" in line] == [" 1.7e+308 |         *", "-1.7e+308 |*"]


def test_large_steps_fit_below_a_narrow_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert plotted(capsys, [point(10**17, 1.0), point(10**18, 2.0)]).splitlines()[-1].split() == [
        f"{10**17}",
        f"{10**18}",
    ]
