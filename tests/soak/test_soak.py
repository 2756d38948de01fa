"""The soak for a few seconds with a few kills: `make soak` runs it for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.soak import Plan, run_soak, table


@pytest.mark.timeout(900)
@pytest.mark.rule("mark-before-delete")
@pytest.mark.rule("late-put-window")
def test_everything_at_once_with_kills_leaves_nothing_unreadable_and_nothing_leaked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two writers has an agent."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")  # the fleet's own, put back afterwards
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    plan = Plan(seconds=10, kills=5, least_checkpoints=4, workers=1, writers=2, readers=1, agents=1)
    outcome = run_soak(tmp_path, plan)
    told = "\n".join(table(outcome))
    assert not outcome.faults, told
    assert outcome.did["checkpoints committed"] > 0, told
    killed = {kind for kind, times in outcome.killed.items() if times}
    assert killed >= {"service", "worker", "writer", "reader", "agent"}, told
    assert outcome.did["shards sealed by the agent"] > 0, told
