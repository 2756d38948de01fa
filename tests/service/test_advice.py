"""How often to save: the number that attempts are told, that people are shown, and where it comes from."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast_client.cli.runs import advise
from holdfast_protocol.states import Scope
from holdfast_service.insights import save_interval as save_advice
from tests.service.conftest import Clock
from tests.support.rank import Job, answer
from tests.support.service import RunningService

HOUR = 3600.0


def advice(service: RunningService, run: str = "demo/gpt") -> dict[str, Any]:
    project, _, name = run.partition("/")
    found: dict[str, Any] = answer(service.http().get(f"/v1/projects/{project}/runs/{name}/advice"))
    return found


def train(job: Job, clock: Clock, seconds: float, step: int) -> dict[str, Any]:
    """The reply to the heartbeat at the end of it."""
    clock.advance(seconds)
    reply: dict[str, Any] = job.heartbeat(step, steps_run=step + 1, progress_age_seconds=0.0, steps_per_second=2.0)
    return reply


def save(
    job: Job, clock: Clock, step: int, *, blocked: tuple[float, ...], durable: float, kind: str = "periodic"
) -> None:
    begun = job.begin(step, kind=kind)
    chunks = [[f"{job.number} {step} {rank}".encode(), f"index {step} {rank}".encode()] for rank in range(len(blocked))]
    for rank, each in enumerate(chunks):
        begun.upload(rank, each)
    clock.advance(durable)
    for rank, each in enumerate(chunks):
        begun.seal(rank, each, blocked_seconds=blocked[rank])
    assert begun.now()["blocked_seconds"] == max(blocked)


def test_a_run_that_has_saved_nothing_is_told_the_default(service: RunningService) -> None:
    job = Job(service.http())
    found = advice(service)
    assert job.opened["save_interval_seconds"] == found["interval_seconds"] == 600
    assert (found["bound"], found["best_seconds"], found["outlook"]) == ("unmeasured", None, [])
    assert (found["interruptions_source"], found["saves_source"]) == ("default", "default")


def test_what_saves_cost_and_what_ended_the_attempts_make_the_interval(service: RunningService, clock: Clock) -> None:
    first = Job(service.http(), world_size=2)
    save(first, clock, 10, blocked=(1.5, 2.0), durable=20)
    before = advice(service)
    assert (before["saves_source"], before["saves_measured"], before["run_interruptions"]) == ("run", 1, 0)
    assert (before["blocked_seconds"], before["durable_seconds"]) == (2.0, pytest.approx(20, abs=10))
    assert before["best_seconds"] == before["interval_seconds"] > 300
    assert train(first, clock, HOUR, 7000)["save_interval_seconds"] == before["interval_seconds"]
    number = 1
    for _ in range(8):  # nobody hears how they end: the next launch fences them
        job = Job(service.http(), after=number, world_size=2)
        number = job.number
        train(job, clock, HOUR, 7000 + number)
        clock.advance(600)  # which is no time of training: it was dead by then
    last = Job(service.http(), after=number, world_size=2)
    assert last.opened["save_interval_seconds"] == 600  # the default, until a heartbeat asks
    assert last.heartbeat()["save_interval_seconds"] == before["interval_seconds"]  # for a minute it is kept
    found = advice(service)
    assert (found["run_interruptions"], found["interruptions_source"]) == (9, "run")
    assert found["run_uptime_seconds"] == pytest.approx(9 * HOUR + 20, abs=20)
    assert found["restart_seconds"] == pytest.approx(600, abs=20)
    # Daly for two seconds and one to two hours: sqrt(2 * 2 * 6000), and no shorter than the shortest.
    assert 100 < found["interval_seconds"] < 200 < before["interval_seconds"]
    half, here, twice = (each["lost_share"] for each in found["outlook"])
    assert 0 < here < min(half, twice) < 1
    assert train(last, clock, 60, 8000)["save_interval_seconds"] == found["interval_seconds"]
    assert advice(service)["steps"] == round(2.0 * found["interval_seconds"])


def test_after_a_rollback_the_newest_saves_count_and_not_those_with_the_largest_steps(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_advice, "_SAVES", 2)
    job = Job(service.http())
    for step in (100, 200, 300):
        save(job, clock, step, blocked=(9.0,), durable=5)
    job.end("failed")
    back = Job(service.http(), after=1)
    for step in (50, 60):
        save(back, clock, step, blocked=(1.0,), durable=5)
    assert advice(service)["blocked_seconds"] == 1.0


def test_one_long_standstill_does_not_raise_the_interval(service: RunningService, clock: Clock) -> None:
    job = Job(service.http())
    for step in range(5):
        save(job, clock, step, blocked=(2.0,), durable=5)
    before = advice(service)
    save(job, clock, 5, blocked=(3600.0,), durable=5)
    assert advice(service)["blocked_seconds"] == before["blocked_seconds"] == 2.0
    for step in (6, 7):
        save(job, clock, step, blocked=(60.0,), durable=5)
    assert advice(service)["blocked_seconds"] == (5 * 2.0 + 3 * 60.0) / 8, "what comes again is a cost"


def test_an_attempt_that_saved_when_it_was_told_to_go_has_lost_nothing(service: RunningService, clock: Clock) -> None:
    job = Job(service.http())
    train(job, clock, HOUR, 100)
    save(job, clock, 100, blocked=(1.0,), durable=5, kind="emergency")
    job.end("preempted")
    assert advice(service)["run_interruptions"] == 0
    job = Job(service.http(), after=1)
    train(job, clock, HOUR, 200)
    job.end("preempted")
    job = Job(service.http(), after=2)
    train(job, clock, HOUR, 300)
    job.end("finished")
    Job(service.http(), after=3).end("failed")  # it never ran a step, so it had nothing to lose
    assert advice(service)["run_interruptions"] == 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_heartbeat_works_out_nothing_of_others(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Job(service.http(), "demo/first"), Job(service.http(), "demo/second")
    assert advice(service, "demo/first")["interval_seconds"] == 600
    read: list[str | None] = []
    monkeypatch.setattr(save_advice, "read_others", lambda _, project_id=None: read.append(project_id))
    monkeypatch.setattr(save_advice, "_RUN_SECONDS", 0.0)
    assert first.heartbeat(1)["save_interval_seconds"] == second.heartbeat(1)["save_interval_seconds"] == 600
    assert read == []


def test_the_store_is_not_outrun_and_others_saves_are_only_a_guess(service: RunningService, clock: Clock) -> None:
    slow = Job(service.http(), "demo/slow")
    save(slow, clock, 1, blocked=(0.5,), durable=1200)
    found = advice(service, "demo/slow")
    assert (found["bound"], found["interval_seconds"]) == ("store", pytest.approx(1.5 * 1200, rel=0.01))
    assert found["best_seconds"] < found["interval_seconds"]
    cheap = Job(service.http(), "demo/cheap")
    save(cheap, clock, 1, blocked=(0.0,), durable=0.0)
    assert (advice(service, "demo/cheap")["bound"], advice(service, "demo/cheap")["interval_seconds"]) == (
        "shortest",
        60,
    )
    dear = Job(service.http(), "dear/gpt")
    save(dear, clock, 1, blocked=(300.0,), durable=10)
    Job(service.http(), "dear/new")
    found = advice(service, "dear/new")
    assert (found["saves_source"], found["bound"], found["interval_seconds"]) == ("project", "unmeasured", 600)
    assert found["best_seconds"] > 600


def test_advice_is_for_those_who_may_read_the_run(service: RunningService) -> None:
    Job(service.http())
    service.make_project("other")
    for token in (service.token(Scope.READ, project="other"), service.token(Scope.TRAIN)):
        http = service.http(token=token)
        assert http.get("/v1/projects/demo/runs/gpt/advice").status_code in (403, 404)


def test_the_command_explains_its_number(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", service.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", service.token(Scope.READ))
    job = Job(service.http())
    train(job, clock, HOUR, 100)
    save(job, clock, 100, blocked=(2.0,), durable=20)
    advise("demo/gpt")
    said = capsys.readouterr().out
    assert said.startswith("demo/gpt: save every ")
    assert "0 interruptions in 1 h of training" in said
    assert re.search("holds training up for 2 s and is durable 2[0-9] s after its begin, by 1 save of this run", said)
    assert "Lost to saves and to work done again: " in said
    advise("demo/gpt", json=True)
    assert '"saves_source": "run"' in capsys.readouterr().out
