"""What can happen in a chaos run, a kind each. A fault is over when its function returns: whatever was taken away is
back by then, and from there on everything must fix itself."""

from __future__ import annotations

from tests.chaos_run.faults.agents import FAULTS as OF_AGENTS
from tests.chaos_run.faults.agents import KILLS_AN_AGENT, LOSES_A_NODE
from tests.chaos_run.faults.base import Arena, Fault, Strike
from tests.chaos_run.faults.clocks import FAULTS as CLOCKS
from tests.chaos_run.faults.clocks import JUMPS_DATABASE
from tests.chaos_run.faults.damage import FAULTS as DAMAGE
from tests.chaos_run.faults.damage import FILLS_DISK, SPOILS, digests_of
from tests.chaos_run.faults.outages import FAULTS as OUTAGES
from tests.chaos_run.faults.processes import FAULTS as PROCESSES
from tests.chaos_run.faults.processes import KILLS_A_JOB, KILLS_A_RANK, PREEMPTS

ALL: dict[str, Fault] = {**PROCESSES, **OUTAGES, **DAMAGE, **CLOCKS}
"""Of every job. OF_AGENTS: of jobs whose nodes have agents."""

__all__ = [
    "ALL",
    "FILLS_DISK",
    "JUMPS_DATABASE",
    "KILLS_AN_AGENT",
    "KILLS_A_JOB",
    "KILLS_A_RANK",
    "LOSES_A_NODE",
    "OF_AGENTS",
    "PREEMPTS",
    "SPOILS",
    "Arena",
    "Fault",
    "Strike",
    "digests_of",
]
