"""Wall clocks jump, forth and back: the database's, the service's or the jobs'."""

from __future__ import annotations

from tests.chaos_run.clock import set_clock
from tests.chaos_run.faults.base import Arena, Fault, Strike

_AWRY_SECONDS = (1.0, 5.0)
_JUMPS_SECONDS = (45.0, 600.0, 90_000.0)


def jump_database(arena: Arena, kind: str) -> Strike:
    """What all leases and deadlines are compared with."""
    jump = _jump(arena)
    arena.place.database_clock.set(jump)
    arena.pause(*_AWRY_SECONDS)
    arena.place.database_clock.set(0)
    return Strike(arena.jobs, f"{jump:+.0f} s and back")


def jump_service(arena: Arena, kind: str) -> Strike:
    """What URLs are signed with."""
    jump = _jump(arena)
    set_clock(arena.place.service_clock, jump)
    arena.pause(*_AWRY_SECONDS)
    set_clock(arena.place.service_clock, 0)
    return Strike(arena.jobs, f"{jump:+.0f} s and back")


def jump_jobs(arena: Arena, kind: str) -> Strike:
    """Of all ranks at once, and it stays: a trainer's clock may be anything."""
    jump = _jump(arena)
    set_clock(arena.place.job_clock, jump)
    return Strike(arena.jobs, f"{jump:+.0f} s, for good")


def _jump(arena: Arena) -> float:
    return arena.numbers.choice(_JUMPS_SECONDS) * arena.numbers.choice((1, -1))


JUMPS_DATABASE = "clock jump: database"

FAULTS: dict[str, Fault] = {
    JUMPS_DATABASE: jump_database,
    "clock jump: service": jump_service,
    "clock jump: jobs": jump_jobs,
}
