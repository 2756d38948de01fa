"""The chaos run for as long as a launch takes and another one, without and with agents: `make chaos` runs it for
minutes, with every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos_run.faults import LOSES_A_NODE, OF_AGENTS
from tests.chaos_run.findings import Wrong
from tests.chaos_run.run import Plan, run_chaos
from tests.chaos_run.table import table

_KINDS = ("network: job | service", "wrong bytes in the store", "clock jump: service")


@pytest.mark.timeout(900)
def test_a_job_comes_back_with_every_byte_as_it_was(tmp_path: Path) -> None:
    plan = Plan(seconds=0, seed=4, least_faults=len(_KINDS), kinds=_KINDS, jobs=1, resized=False)
    outcome = run_chaos(tmp_path, plan)
    told = "\n".join(table(outcome))
    assert not outcome.verdict.findings, told
    assert {one.kind for one in outcome.happened} == set(_KINDS), told
    assert all(one.is_mended for one in outcome.happened), told
    assert outcome.verdict.facts["attempts compared with REST"] == 2, told
    assert outcome.verdict.count(Wrong.BYTES) == 0, told


@pytest.mark.timeout(900)
def test_a_node_is_lost_with_its_agent_and_its_replacement_reads_in_the_memory_of_others(tmp_path: Path) -> None:
    plan = Plan(
        seconds=0, seed=4, least_faults=len(OF_AGENTS), kinds=tuple(OF_AGENTS), jobs=1, resized=False, agents=True
    )
    outcome = run_chaos(tmp_path, plan)
    told = "\n".join(table(outcome))
    assert not outcome.verdict.findings, told
    assert {one.kind for one in outcome.happened} == set(OF_AGENTS), told
    assert all(one.is_mended for one in outcome.happened), told
    [replaced] = [one for one in outcome.verdict.recoveries if one.kind == LOSES_A_NODE]
    assert replaced.committed_lost == 0, told
    assert replaced.read["own agent"] == 0, told
    assert replaced.read["other agents"] > 0, told
