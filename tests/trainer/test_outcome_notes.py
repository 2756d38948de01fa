"""What a job tells the `holdfast run` around it: which attempt it is, and how that ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.training import Job

import holdfast
from holdfast_client.launch import open_attempt
from holdfast_client.outcome_notes import read_notes
from holdfast_protocol.selectors import parse_run
from holdfast_protocol.states import AttemptOutcome

NEVER = holdfast.Every(steps=10**9)


@pytest.fixture
def launch(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_LAUNCH", "abc")
    monkeypatch.setenv("HOLDFAST_OUTCOME_DIR", str(tmp_path))
    return tmp_path


def words(folder) -> list[tuple[int, int, AttemptOutcome | None]]:
    return [(note.attempt, note.rank, note.outcome) for note in read_notes(folder)]


def train_and(happen: Callable[[], object], run: str) -> None:
    with holdfast.Checkpointer(run, save=NEVER) as checkpointer:
        checkpointer.restore(Job().state)
        happen()


@pytest.mark.rule("training-14")
def test_each_attempt_of_a_launch_is_told_when_it_opens_and_when_it_ends(service, run, launch):
    job = Job()
    with holdfast.Checkpointer(run, save=NEVER) as checkpointer:
        assert words(launch) == []
        checkpointer.restore(job.state)
        assert words(launch) == [(1, 0, None)]
        checkpointer.save(0, job.state)
    assert words(launch) == [(1, 0, AttemptOutcome.FINISHED)]
    with pytest.raises(ZeroDivisionError):
        train_and(lambda: 1 / 0, run)
    assert words(launch)[1:] == [(2, 0, AttemptOutcome.FAILED)]
    project, name = run.split("/")
    assert {attempt.launch_id.partition(".")[0] for attempt in service.client.all_attempts(project, name)} == {"abc"}


@pytest.mark.rule("training-14")
def test_an_attempt_that_learns_only_at_its_end_that_it_is_fenced_tells_so(service, run, launch):
    with pytest.raises(holdfast.errors.StaleAttempt):
        train_and(lambda: open_attempt(service.client, parse_run(run), "another-launch", world_size=1), run)
    assert words(launch) == [(1, 0, AttemptOutcome.FENCED)]


def test_a_folder_that_is_gone_costs_the_job_nothing(service, run, launch, monkeypatch):
    monkeypatch.setenv("HOLDFAST_OUTCOME_DIR", str(launch / "gone"))
    job = Job()
    with holdfast.Checkpointer(run, save=NEVER) as checkpointer:
        assert checkpointer.restore(job.state) == 0
        assert checkpointer.save(0, job.state).committed.result(timeout=60).step == 0
