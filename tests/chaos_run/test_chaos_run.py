"""The chaos run with agents for a few faults: `make chaos` runs it for minutes, with every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos_run.faults import LOSES_A_NODE, OF_AGENTS
from tests.chaos_run.findings import Wrong
from tests.chaos_run.run import Plan, run_chaos
from tests.chaos_run.table import table

_KINDS = ("network: job | service", "wrong bytes in the store", "clock jump: service", *OF_AGENTS)


@pytest.mark.timeout(900)
def test_a_job_comes_back_with_every_byte_as_it_was_and_reads_a_lost_nodes_state_in_the_memory_of_others(
    tmp_path: Path,
) -> None:
    outcome = run_chaos(
        tmp_path,
        Plan(seconds=0, seed=4, least_faults=len(_KINDS), kinds=_KINDS, jobs=1, resized=False, agents=True),
    )
    told = "\n".join(table(outcome))
    assert not outcome.verdict.findings, told
    assert {one.kind for one in outcome.happened} == set(_KINDS), told
    assert all(one.is_mended for one in outcome.happened), told
    assert outcome.verdict.facts["attempts compared with REST"] > 1, told
    assert outcome.verdict.count(Wrong.BYTES) == 0, told
    [replaced] = [one for one in outcome.verdict.recoveries if one.kind == LOSES_A_NODE]
    assert replaced.committed_lost == 0, told
    assert replaced.read["own agent"] == 0, told
    assert replaced.read["other agents"] > 0, told
