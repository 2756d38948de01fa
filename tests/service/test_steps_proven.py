"""How far an attempt came, where it was killed before its first heartbeat: its saves prove it, and all say the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.conftest import Clock
from tests.support.rank import Job, answer
from tests.support.service import RunningService


def goodput(job: Job) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer(job.http.get(f"{job.base}/goodput"))["attempts"]
    return found


def advice(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = answer(job.http.get(f"{job.base}/advice"))
    return found


def run_view(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = answer(job.http.get(job.base))
    return found


def steps(spent: dict[str, Any]) -> tuple[int, int, int | None]:
    return spent["steps_run"], spent["steps_kept"], spent["last_step"]


def test_a_commit_proves_the_steps_of_an_attempt_that_no_heartbeat_told_of(
    service: RunningService, clock: Clock
) -> None:
    killed = Job(service.http())
    clock.advance(50)
    saved = killed.save(20)
    Job(service.http(), after=1).resumed_from(saved["id"])
    assert steps(goodput(killed)[0]) == (20, 20, 20)
    assert killed.view()["last_step"] == 20
    told = advice(killed)
    assert told["run_interruptions"] == 1
    assert told["run_uptime_seconds"] == pytest.approx(50, abs=10), "it lived until its last call"


def test_without_a_save_nothing_is_proven_and_nothing_is_claimed(service: RunningService) -> None:
    killed = Job(service.http())
    Job(service.http(), after=1)
    assert steps(goodput(killed)[0]) == (0, 0, None)
    assert killed.view()["last_step"] is None
    assert advice(killed)["run_interruptions"] == 0, "it had nothing to lose"


def test_a_heartbeat_that_tells_of_more_than_the_commit_counts(service: RunningService) -> None:
    job = Job(service.http())
    job.save(20)
    job.heartbeat(25, first_step=0, steps_run=26)
    assert steps(goodput(job)[0]) == (26, 26, 25)
    assert job.view()["last_step"] == run_view(job)["last_step"] == 25


def test_a_commit_that_is_newer_than_the_last_heartbeat_counts(service: RunningService) -> None:
    job = Job(service.http())
    job.heartbeat(15, first_step=0, steps_run=16)
    job.save(20)
    assert steps(goodput(job)[0]) == (21, 21, 20)
    assert job.view()["last_step"] == run_view(job)["last_step"] == 20


def test_a_save_that_was_begun_and_never_committed_is_proof_for_all_alike(service: RunningService) -> None:
    killed = Job(service.http())
    saved = killed.save(20)
    killed.begin(30)
    Job(service.http(), after=1).resumed_from(saved["id"])
    assert steps(goodput(killed)[0]) == (30, 20, 30)
    assert killed.view()["last_step"] == 30
    only_begun = Job(service.http(), "demo/begun", create=True)
    only_begun.begin(5)
    Job(service.http(), "demo/begun", after=1)
    assert (steps(goodput(only_begun)[0])[0], only_begun.view()["last_step"]) == (5, 5)
    assert advice(only_begun)["run_interruptions"] == 1


def test_an_attempt_that_resumed_counts_only_what_it_did_itself(service: RunningService) -> None:
    saved = Job(service.http()).save(20)
    second = Job(service.http(), after=1)
    second.resumed_from(saved["id"])
    second.save(30)
    assert [steps(each) for each in goodput(second)] == [(20, 20, 20), (10, 10, 30)]
    assert second.view()["last_step"] == 30


def test_a_late_save_proves_what_the_attempt_did_that_staged_it(service: RunningService) -> None:
    first = Job(service.http())
    first.save(20)
    late = Job(service.http(), after=1).begin(40, origin_attempt=1)
    assert late.view["attempt"] == 1
    assert [each["last_step"] for each in goodput(first)] == [40, None]


def test_runs_and_attempts_tell_when_the_job_was_last_heard_of(service: RunningService, clock: Clock) -> None:
    job = Job(service.http())
    opened = run_view(job)["last_heard_at"]
    assert opened == job.view()["opened_at"]
    clock.advance(3600)
    save = job.begin(20)
    heard = run_view(job)["last_heard_at"]
    assert heard > opened, "a call of a save is a sign of life"
    clock.advance(3600)
    answer(job.http.get(f"/v1/checkpoints/{save.id}"))
    assert run_view(job)["last_heard_at"] == heard == job.view()["heartbeat_at"], "who reads is not the job"
    job.heartbeat(21)
    assert run_view(job)["last_heard_at"] > heard
    assert answer(job.http.put("/v1/projects/demo/runs/empty"))["last_heard_at"] is None
