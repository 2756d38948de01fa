"""SIGKILL and SIGTERM to what the job, the service, the database and the store consist of."""

from __future__ import annotations

from tests.chaos_run.faults.base import Arena, Fault, Strike

_AWAY_SECONDS = (0.0, 3.0)
_DEADLINE_SECONDS = (4.0, 10.0)


def kill_rank(arena: Arena, kind: str) -> Strike | None:
    job = arena.a_job()
    rank = arena.numbers.randrange(job.ranks)
    return Strike([job], f"rank {rank} of {job.name}") if job.kill_rank(rank, kind) else None


def kill_job(arena: Arena, kind: str) -> Strike:
    job = arena.a_job()
    job.kill(kind)
    return Strike([job], job.name)


def preempt(arena: Arena, kind: str) -> Strike:
    job = arena.a_job()
    deadline = arena.numbers.uniform(*_DEADLINE_SECONDS)
    job.terminate(kind, deadline)
    return Strike([job], f"{job.name}, {deadline:.0f} s until SIGKILL")


def kill_service(arena: Arena, kind: str) -> Strike:
    away = arena.numbers.uniform(*_AWAY_SECONDS)
    arena.place.restart_service(away)
    return Strike(arena.jobs, f"away for {away:.1f} s and its start")


def kill_database(arena: Arena, kind: str) -> Strike:
    away = arena.numbers.uniform(*_AWAY_SECONDS)
    arena.place.restart_database(away)
    return Strike(arena.jobs, f"away for {away:.1f} s and its start")


def kill_store(arena: Arena, kind: str) -> Strike:
    away = arena.numbers.uniform(*_AWAY_SECONDS)
    arena.place.restart_store(away)
    return Strike(arena.jobs, f"away for {away:.1f} s and its start")


FAULTS: dict[str, Fault] = {
    "SIGKILL of a rank": kill_rank,
    "SIGKILL of a whole job": kill_job,
    "SIGTERM with a deadline": preempt,
    "SIGKILL of the service": kill_service,
    "SIGKILL of the database": kill_database,
    "SIGKILL of the store": kill_store,
}
