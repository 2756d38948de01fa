"""The agents of nodes, for jobs that have them: an agent is killed, and a node is lost with all that it has."""

from __future__ import annotations

import shutil

from tests.chaos_run.faults.base import Arena, Fault, Strike
from tests.chaos_run.trainer import node_name

_AWAY_SECONDS = (0.0, 3.0)


def kill_agent(arena: Arena, kind: str) -> Strike | None:
    """Its rank lives, and goes on by itself. The next agent there knows nothing."""
    job = arena.a_job()
    if job.nodes is None:
        return None
    node, away = arena.numbers.randrange(job.ranks), arena.numbers.uniform(*_AWAY_SECONDS)
    job.nodes.kill_agent(node)
    arena.over.wait(away)
    job.nodes.start_agent(node)
    return Strike([job], f"{node_name(node)} of {job.name}, away for {away:.1f} s and its start")


def lose_node(arena: Arena, kind: str) -> Strike | None:
    """Rank and agent at once, and what is on its disk. Its replacement is there before the job is launched again."""
    job = arena.a_job()
    if job.nodes is None:
        return None
    node = arena.numbers.randrange(job.ranks)
    with job.not_launched():
        if not job.kill_rank(node, kind):
            return None
        job.nodes.kill_agent(node)
        if job.local is not None:
            shutil.rmtree(job.local / node_name(node), ignore_errors=True)
        job.nodes.start_agent(node)
    return Strike([job], f"{node_name(node)} of {job.name}")


KILLS_AN_AGENT, LOSES_A_NODE = "SIGKILL of a node's agent", "loss of a node"

FAULTS: dict[str, Fault] = {
    KILLS_AN_AGENT: kill_agent,
    LOSES_A_NODE: lose_node,
}
