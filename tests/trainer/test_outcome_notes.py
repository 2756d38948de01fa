"""What a job tells the `holdfast launch` around it: which attempt it is, and how that ended."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
from tests.support.training import Job

import holdfast
from holdfast_client.cli.launch import catalog_of, outcome_of_launch
from holdfast_client.errors import ServiceUnavailable
from holdfast_client.outcome_notes import read_notes
from holdfast_protocol.attempts import EndAttempt
from holdfast_protocol.runs import parse_run
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


@pytest.mark.rule("told-outcome")
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
    for code in (0, 3):
        with pytest.raises(SystemExit):
            train_and(lambda code=code: sys.exit(code), run)
    assert [outcome for *_, outcome in words(launch)[1:]] == [
        AttemptOutcome.FAILED,
        AttemptOutcome.FINISHED,
        AttemptOutcome.FAILED,
    ]
    project, name = run.split("/")
    assert {attempt.launch_id.partition(".")[0] for attempt in service.client.attempts.all(project, name)} == {"abc"}


@pytest.mark.rule("told-outcome")
def test_an_attempt_that_learns_only_at_its_end_that_it_is_fenced_tells_so(service, run, launch):
    with pytest.raises(holdfast.errors.StaleAttempt):
        train_and(lambda: service.client.attempts.open_next(parse_run(run), "another-launch", world_size=1), run)
    assert words(launch) == [(1, 0, AttemptOutcome.FENCED)]


@pytest.mark.rule("told-outcome")
@pytest.mark.parametrize("local", [False, True])
def test_a_crash_keeps_what_was_saved_before_it_and_is_not_fenced(run, service, launch, tmp_path, monkeypatch, local):
    """The save's begin comes after the word of the crash, as one does that had to wait its turn."""
    job, told = Job(), threading.Event()
    checkpointer = holdfast.Checkpointer(run, save=NEVER, local=tmp_path / "tier" if local else None)
    session = checkpointer.parts.session
    begin, crashed = session.shard_writer, session.crashed

    def begins_afterwards(*args, **options):
        assert told.wait(60)
        return begin(*args, **options)

    def tells(error):
        crashed(error)
        told.set()

    def crashes():
        with checkpointer:
            checkpointer.restore(job.state)
            checkpointer.save(0, job.state)
            raise ZeroDivisionError

    monkeypatch.setattr(session, "shard_writer", begins_afterwards)
    monkeypatch.setattr(session, "crashed", tells)
    with pytest.raises(ZeroDivisionError):
        crashes()
    project, name = run.split("/")
    assert service.client.attempts.get(project, name, 1).outcome is AttemptOutcome.FAILED
    assert words(launch) == [(1, 0, AttemptOutcome.FAILED)]
    assert service.client.restores.restore_point(project, name).restore_point.step == 0


@pytest.mark.rule("told-outcome")
def test_an_attempt_that_has_been_ended_stops_and_may_be_launched_again(run, service, launch):
    project, name = run.split("/")

    def somebody_ends_it(checkpointer, job):
        word = EndAttempt(**checkpointer.parts.session.fence.model_dump(), outcome=AttemptOutcome.PREEMPTED)
        service.client.attempts.end(project, name, 1, word)
        failure = checkpointer.save(0, job.state).committed.exception(timeout=60)
        assert "must not be restarted" not in str(failure)
        checkpointer.step(1, job.state)

    def trains():
        job = Job()
        with holdfast.Checkpointer(run, save=NEVER) as checkpointer:
            checkpointer.restore(job.state)
            somebody_ends_it(checkpointer, job)

    with pytest.raises(holdfast.errors.StaleAttempt, match="Launch the job again"):
        trains()
    assert words(launch) == [(1, 0, AttemptOutcome.FAILED)]


@pytest.mark.rule("told-outcome")
@pytest.mark.parametrize("tries_again", [False, True])
def test_a_job_whose_rollback_was_not_answered_is_not_fenced_by_itself(run, service, launch, monkeypatch, tries_again):
    job = Job()
    checkpointer = holdfast.Checkpointer(run, save=NEVER)
    session = checkpointer.parts.session
    open_attempt = session.client.attempts.open

    def is_not_heard(*args):
        open_attempt(*args)
        raise ServiceUnavailable("The reply was lost")

    def trains():
        with checkpointer:
            checkpointer.restore(job.state)
            checkpointer.save(0, job.state).committed.result(timeout=60)
            monkeypatch.setattr(session.client.attempts, "open", is_not_heard)
            try:
                checkpointer.rollback(job.state)
            except ServiceUnavailable:
                if not tries_again:
                    raise
            # As by a heartbeat in between.
            with pytest.raises(holdfast.errors.StaleAttempt) as refused:
                session.restored_from("ck_x", rollback=True)
            session.note(refused.value)
            monkeypatch.setattr(session.client.attempts, "open", open_attempt)
            assert checkpointer.rollback(job.state) == 1
            checkpointer.save(1, job.state).committed.result(timeout=60)

    if tries_again:
        trains()
        assert words(launch)[1:] == [(2, 0, AttemptOutcome.FINISHED)]
        return
    with pytest.raises(ServiceUnavailable):
        trains()
    assert words(launch) == [(1, 0, AttemptOutcome.FAILED)]
    elsewhere = [note.model_copy(update={"rank": 1, "outcome": None}) for note in read_notes(launch)]
    known = outcome_of_launch(elsewhere, catalog_of(service.client), 0)
    assert known is not None
    assert known.outcome is AttemptOutcome.FAILED, "and so on a node without rank 0's word"


def test_a_folder_that_is_gone_costs_the_job_nothing(service, run, launch, monkeypatch):
    monkeypatch.setenv("HOLDFAST_OUTCOME_DIR", str(launch / "gone"))
    job = Job()
    with holdfast.Checkpointer(run, save=NEVER) as checkpointer:
        assert checkpointer.restore(job.state) == 0
        assert checkpointer.save(0, job.state).committed.result(timeout=60).step == 0
