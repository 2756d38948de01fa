"""Three launches that are told to leave, one of them with an agent: `make preempt` runs a hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preemption.many import preempt_many, table
from tests.preemption.plan import Kind


@pytest.mark.timeout(600)
@pytest.mark.rule("sigterm-thread")
@pytest.mark.rule("finish-or-supersede")
def test_whenever_a_job_is_told_to_leave_its_newest_state_is_there_afterwards(tmp_path: Path) -> None:
    # The gate's own load must not decide which launch is in time, nor which one has something to save.
    kinds = [Kind.FAST, Kind.SLOW, Kind.LONG]
    outcome = preempt_many(tmp_path, len(kinds), seed=7, kinds=kinds, grace_factor=4, begins_with="step", agent_every=2)
    told = "\n".join(table(outcome))
    assert not outcome.faults, told
    assert outcome.resumed == 2, told
    assert outcome.handed > 0, told
