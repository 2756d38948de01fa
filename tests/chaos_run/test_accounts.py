"""The judge of a chaos run finds what is wrong, and only that: a job is told to leave, and goes on with what it had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast_protocol.runs import AttemptGoodput, Goodput
from holdfast_protocol.states import AttemptOutcome
from tests.chaos_run.accounts import judge_account
from tests.chaos_run.chaos import Happened
from tests.chaos_run.faults import PREEMPTS
from tests.chaos_run.findings import Verdict
from tests.chaos_run.job import End
from tests.chaos_run.journal import LaunchRecord, Step

_STEPS, _STEP_SECONDS = 30, 0.2


def _launch(number: int, begun_at: float, **how: Any) -> LaunchRecord:
    start = _STEPS * (number - 1)
    steps = [Step(start + at, begun_at + _STEP_SECONDS * (at + 1), "") for at in range(_STEPS)]
    return LaunchRecord(number, 0, begun_at=begun_at, attempt=number, start=start, steps=steps, **how)


def _told(number: int, outcome: AttemptOutcome, productive_seconds: float, wall_seconds: float) -> AttemptGoodput:
    return AttemptGoodput(
        attempt=number,
        outcome=outcome,
        resumed_from_step=_STEPS - 1 if number > 1 else None,
        last_step=_STEPS * number - 1,
        step_seconds=_STEP_SECONDS,
        wall_seconds=wall_seconds,
        productive_seconds=productive_seconds,
        lost_seconds=0,
        saving_seconds=_STEPS * _STEP_SECONDS - productive_seconds,
        restoring_seconds=0,
        restarting_seconds=0,
        idle_seconds=0,
        steps_run=_STEPS,
        steps_kept=_STEPS,
        steps_lost=0,
    )


@pytest.mark.parametrize(
    ("outcome", "left_with", "down", "productive_seconds", "found"),
    [
        (AttemptOutcome.PREEMPTED, 29, False, 6.0, []),
        (AttemptOutcome.FAILED, 29, False, 6.0, ["it ended as failed"]),
        (AttemptOutcome.LOST, None, False, 6.0, ["it ended as lost", "trained step 29, and committed is None"]),
        (AttemptOutcome.PREEMPTED, 24, False, 6.0, ["trained step 29, and committed is 24"]),
        (AttemptOutcome.FAILED, None, True, 6.0, []),
        (AttemptOutcome.PREEMPTED, 29, False, 1.0, ["goodput 69.0% by the journals, 12.1% by REST, of 2 attempts"]),
    ],
)
def test_what_rest_says_otherwise_and_what_a_job_that_was_told_to_leave_lost_is_found(
    outcome: AttemptOutcome, left_with: int | None, down: bool, productive_seconds: float, found: list[str]
) -> None:
    left = {} if left_with is None else {"left_with": left_with, "ended": "preempted"}
    launches = [_launch(1, 10.0, **left), _launch(2, 20.0, ended="finished", ended_at=26.8)]
    job = SimpleNamespace(
        name="plain",
        ends=[End(1, 75, 16.5, PREEMPTS, []), End(2, 0, 27.0, "", [])],
        launches=lambda: launches,
        last_step=lambda: 2 * _STEPS - 1,
    )
    attempts = [
        _told(1, outcome, productive_seconds, 6.5),
        _told(2, AttemptOutcome.FINISHED, productive_seconds, 10.0),
    ]
    total = _told(0, outcome, 0, 0).model_dump() | {"steps_kept": 2 * _STEPS}
    account = Goodput(**total | {"goodput": 0.0, "since": None, "until": None, "attempts": attempts})
    happened = [Happened(PREEMPTS, "", 16.1, 16.5, {"plain": 28}, {"plain": 21.0})]
    if down:
        happened.insert(0, Happened("SIGKILL of the service", "", 15.0, 17.0, {"plain": 23}, {"plain": 21.0}))
    client = SimpleNamespace(insights=SimpleNamespace(goodput=lambda _project, _run: account))
    verdict = Verdict()
    judge_account(SimpleNamespace(place=SimpleNamespace(client=client)), job, happened, verdict)  # type: ignore[arg-type]
    texts = [one.text for one in verdict.findings]
    assert len(texts) == len(found), texts
    assert all(part in text for part, text in zip(found, texts, strict=True)), texts
