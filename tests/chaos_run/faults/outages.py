"""The network between a job and the service, or between the jobs and the store, is parted for a while."""

from __future__ import annotations

from tests.chaos_run.faults.base import Arena, Fault, Strike
from tests.support.fault_proxy import BlackHole, FaultProxy

_PARTED_SECONDS = (1.0, 6.0)


def part_from_service(arena: Arena, kind: str) -> Strike:
    job = arena.a_job()
    return Strike([job], f"{job.name}: {_part(arena, job.way)}")


def part_from_store(arena: Arena, kind: str) -> Strike:
    return Strike(arena.jobs, _part(arena, arena.place.to_store))


def _part(arena: Arena, way: FaultProxy) -> str:
    """Either connections are refused, or what is sent never arrives and nobody says so."""
    seconds = arena.numbers.uniform(*_PARTED_SECONDS)
    silent = arena.numbers.random() < 0.5
    if silent:
        way.script(BlackHole(seconds), on=lambda seen: True, times=None)
    else:
        way.refuse()
    arena.over.wait(seconds)
    arena.place.heal_network()
    return f"{'silent' if silent else 'refused'} for {seconds:.1f} s"


FAULTS: dict[str, Fault] = {
    "network: job | service": part_from_service,
    "network: jobs | store": part_from_store,
}
