"""kill -9 of a job that measures, between two heartbeats: its curve has gaps at most, and never a point twice."""

from __future__ import annotations

import time

import pytest

from tests.support.ranks import launched, read_until

TRAINER = "tests.chaos.measuring_trainer"


@pytest.fixture
def service_settings() -> dict[str, str]:
    """A heartbeat each half second."""
    return {"HOLDFAST_LOST_AFTER_SECONDS": "5"}


def points(client, **asked):
    found = client.runs.metrics_history("tests", "measured", names=["loss"], points=2000, **asked)
    return [(point.attempt, point.step, point.value) for each in found.metrics for point in each.points]


def until_told(client, attempt, more_than):
    while len(told := points(client, attempt=attempt)) <= more_than:
        time.sleep(0.05)
    return told


def test_a_job_killed_while_it_measures_goes_on_with_its_curve(client):
    with launched(TRAINER, "tests/measured") as [job]:
        read_until(job, "saved 9")
        told = until_told(client, 1, 20)
        job.kill()
        job.wait()
    with launched(TRAINER, "tests/measured") as [job]:
        resumed = int(read_until(job, "start")[-1].split()[1]) - 1
        assert resumed >= 9
        # Only now nothing more comes of the first: the service may carry out a call after its caller was killed.
        first = points(client, attempt=1)
        until_told(client, 2, 5)
        job.kill()
        job.wait()
    assert first[: len(told)] == told
    assert [step for _, step, _ in first] == list(range(len(first))), "no point twice, and none out of the middle"
    line = points(client)
    kept = [point for point in line if point[0] == 1]
    assert kept == [point for point in first if point[1] <= resumed]
    second = [step for attempt, step, _ in line if attempt == 2]
    assert second == list(range(resumed + 1, resumed + 1 + len(second)))
    assert all(value == 1000 * attempt + step for attempt, step, value in line), "of the attempt that measured it"
