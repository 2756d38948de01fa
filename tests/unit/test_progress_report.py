"""What the training thread tells of itself: steps by their numbers, and the time in which it stood still."""

from __future__ import annotations

import pytest

import holdfast.progress
from holdfast.progress import ProgressReport


class Watch:
    """The process's clock, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr(holdfast.progress, "time", watch)
    return watch


def test_a_job_that_resumes_trains_saves_and_goes_back(watch: Watch) -> None:
    progress = ProgressReport()
    assert progress.read()["progress_age_seconds"] is None, "nobody knows yet whether it calls step()"
    with progress.restoring():
        watch.now += 4
        assert progress.read()["doing"] == "restoring"
        with progress.saving():  # the restore's time, not twice
            watch.now += 1
    progress.goes_on_from(101)
    for step in (101, 102, 103):
        watch.now += 2
        progress.ran(step)
    watch.now += 1
    with progress.saving():
        watch.now += 3
        progress.reached(103)
        assert progress.read() | {"progress_age_seconds": None} == {
            "step": 103,
            "first_step": 101,
            "steps_run": 3,
            "first_step_age_seconds": 8.0,
            "progress_age_seconds": None,
            "restore_seconds": 5.0,
            "saves_begun": 0,
            "save_blocked_seconds": 3.0,
            "doing": "saving",
        }
    assert progress.steps_per_second() == pytest.approx(3 / 7), "without the restore and the save"
    assert progress.steps_per_second() is None
    watch.now += 10
    progress.ran(113)  # it calls step() every tenth step
    assert progress.steps_per_second() == pytest.approx(1.0)
    assert (progress.step, progress.read()["steps_run"]) == (113, 13)
    # The same job goes back to step 105, in an attempt of its own.
    progress.begin()
    assert progress.step == 113, "should its restore fail, it counts from there once more"
    progress.goes_on_from(106)
    assert (progress.step, progress.read()["step"]) == (105, None), "from here the next rollback(steps=…) counts"
    progress.ran(106)
    told = progress.read()
    assert (told["first_step"], told["step"], told["steps_run"], told["restore_seconds"]) == (106, 106, 1, 0.0)


def test_a_fresh_start_and_a_job_that_only_saves(watch: Watch) -> None:
    progress = ProgressReport()
    progress.goes_on_from(0)
    progress.reached(10)
    progress.reached(20)
    watch.now += 3600
    told = progress.read()
    assert (told["first_step"], told["step"], told["steps_run"]) == (10, 20, 11)
    assert told["progress_age_seconds"] is None, "an hour without save() is no stall"
    progress.ran(15)  # an older number: the script's own affair, and no step that was not there before
    assert progress.read()["steps_run"] == 11
    with pytest.raises(TypeError):
        progress.ran(1.5)  # type: ignore[arg-type]
