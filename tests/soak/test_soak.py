"""The soak for a few seconds with a few kills: `make soak` runs it for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.soak import Outcome, Plan, run_soak, table


@pytest.mark.timeout(900)
@pytest.mark.rule("mark-before-delete")
@pytest.mark.rule("late-put-window")
def test_everything_at_once_with_kills_leaves_nothing_unreadable_and_nothing_leaked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")  # the fleet's own, put back afterwards
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    plan = Plan(seconds=10, kills=4, least_checkpoints=4, workers=1, writers=2, readers=1)
    assert_unharmed(run_soak(tmp_path, plan), {"service", "worker", "writer", "reader"})


@pytest.mark.timeout(900)
def test_with_agents_that_are_killed_too_nothing_that_they_had_taken_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    plan = Plan(seconds=10, kills=5, least_checkpoints=4, workers=1, writers=2, readers=1, agents=1)
    outcome = run_soak(tmp_path, plan)
    assert_unharmed(outcome, {"service", "worker", "writer", "reader", "agent"})
    assert outcome.did["shards sealed by the agent"] > 0, "\n".join(table(outcome))


def assert_unharmed(outcome: Outcome, killed: set[str]) -> None:
    told = "\n".join(table(outcome))
    assert not outcome.faults, told
    assert outcome.did["checkpoints committed"] > 0, told
    assert {kind for kind, times in outcome.killed.items() if times} >= killed, told
