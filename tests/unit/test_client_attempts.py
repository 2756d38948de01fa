"""Opening an attempt: the later launch wins, and a late retry fences nobody."""

from __future__ import annotations

import pytest

from holdfast_client import Client, ClientSettings, errors
from holdfast_protocol.base import RunName
from tests.support.scripted_http import DROP, as_json, problem, scripted

RUN = "/v1/projects/demo/runs/gpt"


def attempt_view(number: int) -> dict:
    return {
        "number": number,
        "launch_id": f"launch-{number}",
        "world_size": 1,
        "host": "",
        "environment": {},
        "opened_at": "2025-01-01T00:00:00Z",
        "heartbeat_at": None,
        "last_step": None,
        "ended_at": None,
        "outcome": None,
        "outcome_detail": None,
        "resumed_from": None,
    }


class Run:
    """A run whose newest attempt may move between our reading and our opening."""

    def __init__(self, newest: int = 0) -> None:
        self.newest = newest
        self.by_launch: dict[str, int] = {}
        self.before_open = []

    def __call__(self, seen):
        if seen.method == "GET":
            assert (seen.path, seen.query) == (f"{RUN}/attempts", {"limit": "1"})
            if self.newest == 0:
                return problem("run_not_found")
            return as_json({"items": [attempt_view(self.newest)], "next_cursor": "older"})
        if self.before_open:
            reply = self.before_open.pop(0)(seen.json)
            if reply is not None:
                return reply
        return self.open(seen.json)

    def open(self, body):
        number = self.by_launch.get(body["launch_id"])
        if number is None or number != self.newest:
            if body["after"] != self.newest:
                return problem("attempt_conflict", latest_attempt=self.newest)
            self.newest += 1
            number = self.by_launch[body["launch_id"]] = self.newest
        return as_json(
            {
                "attempt": number,
                "epoch": 1,
                "run_id": "r",
                "restore_point": None,
                "skipped": [],
                "ever_committed": False,
                "save_interval_seconds": 600,
                "heartbeat_interval_seconds": 30,
            }
        )

    def another_opens(self, body) -> None:
        self.newest += 1


def launch(run, launch_id="mine", after=None):
    with scripted(run) as server, Client(ClientSettings(url=server.url, token="t", retry_seconds=60)) as client:
        return client.attempts.open_next(RunName("demo", "gpt"), launch_id, world_size=2, after=after)


@pytest.mark.rule("attempt-compare-and-swap")
@pytest.mark.parametrize("newest", [0, 7])
def test_an_attempt_is_opened_after_the_newest(newest):
    assert launch(Run(newest)).attempt == newest + 1


@pytest.mark.rule("attempt-compare-and-swap")
def test_a_later_launch_wins():
    run = Run(3)
    run.before_open = [run.another_opens]
    assert launch(run).attempt == 5


@pytest.mark.rule("attempt-compare-and-swap")
def test_a_lost_reply_gets_the_same_attempt_back():
    run = Run(3)

    def lost(body):
        run.open(body)
        return DROP

    run.before_open = [lost]
    assert launch(run).attempt == 4
    assert run.newest == 4


@pytest.mark.rule("attempt-compare-and-swap")
def test_a_late_retry_does_not_fence_its_successor():
    run = Run(3)

    def lost_and_overtaken(body):
        run.open(body)
        run.another_opens(body)
        return DROP

    run.before_open = [lost_and_overtaken]
    with pytest.raises(errors.StaleAttempt, match="must not be restarted"):
        launch(run)
    assert run.newest == 5


@pytest.mark.rule("attempt-compare-and-swap")
def test_two_launches_that_chase_each_other_come_to_an_end():
    run = Run(3)
    run.before_open = [run.another_opens] * 50
    with pytest.raises(errors.AttemptConflict):
        launch(run)
    assert len(run.before_open) == 45


@pytest.mark.rule("attempt-compare-and-swap")
def test_an_attempt_that_may_follow_one_alone_fences_no_other():
    run = Run(3)
    run.before_open = [run.another_opens]
    with pytest.raises(errors.AttemptConflict):
        launch(run, after=3)
    assert run.newest == 4
    assert launch(run, after=4).attempt == 5
