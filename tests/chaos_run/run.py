"""A whole chaos run: the servers, the jobs, the faults, the end, and the judgement."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos_run.chaos import Happened, let_things_fail
from tests.chaos_run.faults import ALL, Arena
from tests.chaos_run.job import Job
from tests.chaos_run.judge import Verdict, judge_catalog, judge_job, undisturbed
from tests.chaos_run.place import new_place
from tests.chaos_run.trainer import SAVE_EVERY

_STEPS_TO_THE_END = 2 * SAVE_EVERY
_END_SECONDS = 240
_SMALL_DISK_BYTES = 96 * 1024 * 1024


@dataclass(frozen=True)
class Plan:
    seconds: float
    seed: int
    least_faults: int = 0
    kinds: Iterable[str] = tuple(ALL)
    jobs: int = 2


@dataclass(frozen=True)
class Outcome:
    happened: list[Happened]
    verdict: Verdict


def run_chaos(folder: Path, plan: Plan) -> Outcome:
    with new_place(folder) as place, small_disk(folder / "disk") as disk, contextlib.ExitStack() as stack:
        jobs = [Job(place, "plain", seed=11)]
        if plan.jobs > 1:
            jobs.append(Job(place, "spooling", seed=12, local=(disk or folder) / "local"))
        arena = Arena(place, jobs, random.Random(plan.seed), small_disk=disk)
        for job in jobs:
            stack.callback(job.stop)
            job.start()
        happened = let_things_fail(arena, seconds=plan.seconds, kinds=plan.kinds, least=plan.least_faults)
        verdict = Verdict(hangs=[f"{one.kind}: {name} did not come back" for one in happened for name in one.hung])
        if not verdict.hangs:
            _end(jobs, verdict)
            for job in jobs:
                reference = undisturbed(job, job.last_step() + 1, folder / f"{job.name}-undisturbed")
                judge_job(arena, job, happened, reference, verdict)
                judge_catalog(arena, job, reference, verdict)
        return Outcome(happened, verdict)


def _end(jobs: list[Job], verdict: Verdict) -> None:
    for job in jobs:
        job.finish_at(job.last_step() + _STEPS_TO_THE_END)
    deadline = time.monotonic() + _END_SECONDS
    for job in jobs:
        if not job.wait_finished(max(1.0, deadline - time.monotonic())):
            verdict.hangs.append(f"{job.name} did not come to its end:\n{job.dump_stacks()}")
            job.stop()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A filesystem in memory of a size of its own; None where this user may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SMALL_DISK_BYTES}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
