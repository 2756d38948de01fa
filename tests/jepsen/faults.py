"""What can happen, a kind each. A fault is over when its function returns: whatever was taken away is back by then, and
everything must fix itself. Each says what it did, for people."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tests.chaos_run.clock import set_clock
from tests.jepsen.failover import copied_over, promoted
from tests.jepsen.journal import Journal
from tests.jepsen.place import SERVICES, Place
from tests.soak.fleet import Member
from tests.support.fault_proxy import CutReply, CutRequest, DropReply, FaultProxy
from tests.support.fault_proxy import Fault as ProxyFault

_DROPS: tuple[ProxyFault, ...] = (DropReply(), DropReply(), CutReply(), CutRequest())
_AWAY_SECONDS = (1.0, 5.0)
_PAUSED_SECONDS = (2.0, 9.0)
"""Longer than a lease, at times: who goes on afterwards must find that it has lost it."""
_JUMPS_SECONDS = (20.0, 600.0, 90_000.0)


@dataclass
class Arena:
    place: Place
    journal: Journal
    numbers: random.Random

    def sleep(self, seconds: tuple[float, float]) -> float:
        chosen = self.numbers.uniform(*seconds)
        time.sleep(chosen)
        return chosen


Fault: TypeAlias = Callable[[Arena], str]


def kill_job(arena: Arena) -> str:
    runner = arena.numbers.choice(arena.place.runners)
    runner.kill9()
    return runner.name


def kill_service(arena: Arena) -> str:
    """Its jobs go to the other one meanwhile, and ask there for what they had no reply to."""
    number = arena.numbers.randrange(SERVICES)
    arena.place.turn_jobs_to(1 - number)
    arena.place.restart(arena.place.services[number])
    arena.place.spread_jobs()
    return f"service {number + 1}"


def kill_everything(arena: Arena) -> str:
    """Both services and the worker at once."""
    arena.place.restart(*arena.place.members)
    return "services and worker"


def kill_worker(arena: Arena) -> str:
    arena.place.restart(arena.place.worker)
    return "the worker"


def kill_agent(arena: Arena) -> str:
    """Its jobs go on by themselves until they find the next one."""
    arena.place.restart(_agent(arena))
    return _jobs_of_agent(arena)


def kill_node(arena: Arena) -> str:
    """The agent and its jobs at once: nobody is left to finish what they had under way."""
    agent = _agent(arena)
    agent.kill9()
    for runner in arena.place.with_agent:
        runner.kill9()
    agent.process = agent.start()
    return _jobs_of_agent(arena)


def pause_agent(arena: Arena) -> str:
    """Its jobs may take it for gone, and save by themselves. It goes on with what it has read."""
    return _pause_member(arena, _agent(arena))


def _agent(arena: Arena) -> Member:
    assert arena.place.agent is not None
    return arena.place.agent


def _jobs_of_agent(arena: Arena) -> str:
    return f"that of {', '.join(runner.name for runner in arena.place.with_agent)}"


def kill_database(arena: Arena) -> str:
    server = arena.place.postgres.server
    server.kill9()
    away = arena.sleep(_AWAY_SECONDS)
    server.restart()
    return f"away for {away:.1f} s and its start"


def kill_store(arena: Arena) -> str:
    """Both stores are of this one server."""
    arena.place.weed.kill9()
    away = arena.sleep(_AWAY_SECONDS)
    arena.place.weed.start()
    return f"away for {away:.1f} s and its start"


def terminate_backends(arena: Arena) -> str:
    ended = 0
    for _ in range(10):
        ended += arena.place.postgres.terminate_backends(arena.place.database, 0.4)
        time.sleep(arena.numbers.uniform(0.05, 0.4))
    return f"{ended} backends"


def launch_beside(arena: Arena) -> str:
    runner = arena.numbers.choice(arena.place.runners)
    runner.launch_beside()
    return runner.name


def pause_job(arena: Arena) -> str:
    """It is launched again meanwhile, elsewhere, and the first one goes on as if nothing had been."""
    runner = arena.numbers.choice(arena.place.runners)
    runner.pause()
    first = arena.sleep(_PAUSED_SECONDS)
    runner.launch_beside()
    then = arena.sleep(_PAUSED_SECONDS)
    runner.go_on()
    return f"{runner.name}, {first:.1f} s until the next launch and {then:.1f} s beside it"


def pause_service(arena: Arena) -> str:
    return _pause_member(arena, arena.numbers.choice(arena.place.services))


def pause_worker(arena: Arena) -> str:
    return _pause_member(arena, arena.place.worker)


def _pause_member(arena: Arena, member: Member) -> str:
    member.process.signal(signal.SIGSTOP)
    paused = arena.sleep(_PAUSED_SECONDS)
    member.process.signal(signal.SIGCONT)
    return f"{member.name} for {paused:.1f} s"


def pause_database(arena: Arena) -> str:
    arena.place.postgres.pause()
    paused = arena.sleep(_PAUSED_SECONDS)
    arena.place.postgres.go_on()
    return f"{paused:.1f} s"


def drop_service_replies(arena: Arena) -> str:
    return _drop(arena, arena.place.ways)


def drop_store_replies(arena: Arena) -> str:
    return _drop(arena, list(arena.place.to_stores.values()))


def _drop(arena: Arena, ways: Sequence[FaultProxy]) -> str:
    share = arena.numbers.choice((0.05, 0.2, 0.5))
    for way in ways:
        way.storm(arena.numbers.randrange(2**32), share, _DROPS)
    seconds = arena.sleep((3.0, 8.0))
    struck = sum(len(way.struck()) for way in ways)
    for way in ways:
        way.heal()
    return f"{struck} of {share:.0%} in {seconds:.1f} s"


def first_store_unavailable(arena: Arena) -> str:
    return _unavailable(arena, "first")


def second_store_unavailable(arena: Arena) -> str:
    return _unavailable(arena, "second")


def _unavailable(arena: Arena, role: str) -> str:
    way = arena.place.to_stores[role]
    way.refuse()
    away = arena.sleep((2.0, 10.0))
    way.accept()
    return f"for {away:.1f} s"


def jump_database(arena: Arena) -> str:
    """What leases and deadlines are compared with."""
    jump = _jump(arena)
    arena.place.clock.set(jump)
    arena.sleep(_AWAY_SECONDS)
    arena.place.clock.set(0)
    return f"{jump:+.0f} s and back"


def jump_service(arena: Arena) -> str:
    """What URLs are signed with; of one service, so that the two differ."""
    jump = _jump(arena)
    name = arena.numbers.choice(sorted(arena.place.clocks))
    set_clock(arena.place.clocks[name], jump)
    arena.sleep(_AWAY_SECONDS)
    set_clock(arena.place.clocks[name], 0)
    return f"{name}, {jump:+.0f} s and back"


def _jump(arena: Arena) -> float:
    return arena.numbers.choice(_JUMPS_SECONDS) * arena.numbers.choice((1, -1))


def older_copy(arena: Arena) -> str:
    return copied_over(arena.place, arena.journal, arena.numbers)


def standby(arena: Arena) -> str:
    return promoted(arena.place, arena.journal, arena.numbers)


OF_AGENTS = ("SIGKILL: the agent", "SIGKILL: the agent and its jobs", "paused: the agent")
FAILS_OVER = ("failover: an older copy", "failover: an asynchronous standby")
ALL: dict[str, Fault] = {
    "SIGKILL: a job": kill_job,
    "SIGKILL: a service": kill_service,
    "SIGKILL: services and worker": kill_everything,
    "SIGKILL: the worker": kill_worker,
    "SIGKILL: the database": kill_database,
    "SIGKILL: the stores": kill_store,
    "terminated backends": terminate_backends,
    "a second launch": launch_beside,
    "paused: a job, launched again": pause_job,
    "paused: a service": pause_service,
    "paused: the worker": pause_worker,
    "paused: the database": pause_database,
    "lost replies: jobs | services": drop_service_replies,
    "lost replies: stores": drop_store_replies,
    "away: the first store": first_store_unavailable,
    "away: the second store": second_store_unavailable,
    "clock jump: the database": jump_database,
    "clock jump: a service": jump_service,
    OF_AGENTS[0]: kill_agent,
    OF_AGENTS[1]: kill_node,
    OF_AGENTS[2]: pause_agent,
    FAILS_OVER[0]: older_copy,
    FAILS_OVER[1]: standby,
}
WITHOUT_AGENTS = tuple(kind for kind in ALL if kind not in OF_AGENTS)
