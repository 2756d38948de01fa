"""The Jepsen trial with two jobs and a fault of a few kinds: `make jepsen` runs it for minutes, with every kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.jepsen.table import table
from tests.jepsen.trial import Outcome, Plan, run_trial

_KINDS = ("SIGKILL: a service", "a second launch", "lost replies: jobs | services", "terminated backends")
_OF_AGENTS = ("SIGKILL: the agent and its jobs", "paused: the agent")


@pytest.mark.timeout(1200)
def test_no_commit_that_a_job_was_told_of_is_lost_mixed_or_wrong_and_nothing_leaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")  # the trial's own, put back afterwards
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    outcome = run_trial(tmp_path, Plan(seconds=0, seed=7, kinds=_KINDS, least_faults=len(_KINDS), jobs=2))
    assert_unharmed(outcome, _KINDS)


@pytest.mark.timeout(1200)
def test_of_a_job_with_an_agent_that_fails_too_no_commit_is_lost_mixed_or_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    outcome = run_trial(
        tmp_path, Plan(seconds=0, seed=7, kinds=_OF_AGENTS, least_faults=len(_OF_AGENTS), jobs=2, agents=True)
    )
    assert_unharmed(outcome, _OF_AGENTS)
    assert outcome.verdict.facts["shards sealed by the agent"] > 0, "\n".join(table(outcome))


def assert_unharmed(outcome: Outcome, kinds: Sequence[str]) -> None:
    told = "\n".join(table(outcome))
    assert not outcome.verdict.findings, told
    assert {one.kind for one in outcome.happened} == set(kinds), told
    assert outcome.verdict.facts["commits told, and restored at the end"] > 0, told
