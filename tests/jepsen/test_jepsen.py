"""The Jepsen trial with two jobs, one of them with an agent, and a fault of a few kinds: `make jepsen` runs it for
minutes, with every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jepsen.table import table
from tests.jepsen.trial import Plan, run_trial

_KINDS = (
    "SIGKILL: a service",
    "a second launch",
    "lost replies: jobs | services",
    "terminated backends",
    "SIGKILL: the agent and its jobs",
    "paused: the agent",
)


@pytest.mark.timeout(1200)
def test_no_commit_that_a_job_was_told_of_is_lost_mixed_or_wrong_and_nothing_leaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")  # the trial's own, put back afterwards
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    plan = Plan(seconds=0, seed=7, kinds=_KINDS, least_faults=len(_KINDS), jobs=2, agents=True)
    outcome = run_trial(tmp_path, plan)
    told = "\n".join(table(outcome))
    assert not outcome.verdict.findings, told
    assert {one.kind for one in outcome.happened} == set(_KINDS), told
    assert outcome.verdict.facts["commits told, and restored at the end"] > 0, told
    assert outcome.verdict.facts["shards sealed by the agent"] > 0, told
