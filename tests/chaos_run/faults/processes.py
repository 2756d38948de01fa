"""SIGKILL and SIGTERM to what the job, the service, the database and the store consist of."""

from __future__ import annotations

from tests.chaos_run.faults.base import Arena, Fault, Strike
from tests.chaos_run.job import GRACE_SECONDS

_AWAY_SECONDS = (0.0, 3.0)


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
    job.terminate(kind)
    return Strike([job], f"{job.name}, {GRACE_SECONDS} s until SIGKILL")


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


KILLS_A_RANK, KILLS_A_JOB, PREEMPTS = "SIGKILL of a rank", "SIGKILL of a whole job", "SIGTERM with a deadline"

FAULTS: dict[str, Fault] = {
    KILLS_A_RANK: kill_rank,
    KILLS_A_JOB: kill_job,
    PREEMPTS: preempt,
    "SIGKILL of the service": kill_service,
    "SIGKILL of the database": kill_database,
    "SIGKILL of the store": kill_store,
}
