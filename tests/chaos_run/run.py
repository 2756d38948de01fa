"""A whole chaos run: the servers, the jobs, the faults, the end, and the judgement."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast_protocol.policies.policy import PolicyKind
from holdfast_protocol.runs import EditProject
from holdfast_service.service import close_service, open_service
from tests.chaos_run.accounts import judge_account
from tests.chaos_run.catalog import judge_catalog, read_back
from tests.chaos_run.chaos import Happened, let_things_fail
from tests.chaos_run.faults import ALL, Arena
from tests.chaos_run.findings import Verdict, Wrong
from tests.chaos_run.job import Job
from tests.chaos_run.judge import judge_job, undisturbed
from tests.chaos_run.nodes import Nodes
from tests.chaos_run.place import PROJECT, new_place
from tests.chaos_run.resized import resize
from tests.chaos_run.trainer import SAVE_EVERY
from tests.support.tallies import drifted_at_last

_END_SECONDS = 240
_KEPT_CHECKPOINTS = 30
"""Of each run; so retention, purge and collection go on beside everything, as they do anywhere."""
_NODES = 4
"""Of the first job, if they have agents."""
_SMALL_DISK_BYTES = 96 * 1024 * 1024


@dataclass(frozen=True)
class Plan:
    """Things fail for `seconds`, and until there were `least_faults`. `resized`: with a part on one rank at the end.
    `agents`: each rank is on a node of its own, with an agent; the first job has more of them."""

    seconds: float
    seed: int
    least_faults: int = 0
    kinds: Iterable[str] = tuple(ALL)
    jobs: int = 2
    resized: bool = True
    agents: bool = False


@dataclass(frozen=True)
class Outcome:
    happened: list[Happened]
    verdict: Verdict


def run_chaos(folder: Path, plan: Plan) -> Outcome:
    verdict = Verdict()
    with new_place(folder) as place, small_disk(folder / "disk") as disk, contextlib.ExitStack() as stack:
        place.client.projects.edit(PROJECT, EditProject())
        place.client.policies.put(PolicyKind.RETENTION, PROJECT, None, {"keep_last": _KEPT_CHECKPOINTS})

        def nodes(name: str, count: int) -> Nodes | None:
            return stack.enter_context(Nodes(folder / f"{name}-agents", count)) if plan.agents else None

        ranks = _NODES if plan.agents else 2
        jobs = [Job(place, "plain", seed=11, ranks=ranks, nodes=nodes("plain", ranks))]
        if plan.jobs > 1:
            local = (disk or folder) / "local"
            jobs.append(Job(place, "spooling", seed=12, local=local, nodes=nodes("spooling", 2)))
        arena = Arena(place, jobs, random.Random(plan.seed), small_disk=disk)
        for job in jobs:
            stack.callback(job.stop)
            job.start()
        happened = let_things_fail(arena, seconds=plan.seconds, kinds=plan.kinds, least=plan.least_faults)
        for one in happened:
            for name in one.hung:
                verdict.found(Wrong.HANG, one.kind, f"{name} did not come back; its log has the stacks")
        if not verdict.findings and _all_end(jobs, verdict):
            _judge(arena, happened, plan, verdict)
    return Outcome(happened, verdict)


def _all_end(jobs: list[Job], verdict: Verdict) -> bool:
    for job in jobs:
        job.finish_at(job.last_step() + 1 + 2 * SAVE_EVERY)
    deadline = time.monotonic() + _END_SECONDS
    for job in jobs:
        if not job.wait_finished(max(1.0, deadline - time.monotonic())):
            verdict.found(Wrong.HANG, "", f"{job.name} did not come to its end:\n{job.dump_stacks()}")
    return not verdict.findings


def _judge(arena: Arena, happened: list[Happened], plan: Plan, verdict: Verdict) -> None:
    jobs = arena.jobs
    with ThreadPoolExecutor(len(jobs)) as threads:
        # What a job has done is judged before anything else opens attempts of its run.
        undisturbed_runs = [
            threads.submit(undisturbed, job, job.last_step() + 1, arena.place.folder / f"{job.name}-undisturbed")
            for job in jobs
        ]
        print("  the jobs have ended; the same runs undisturbed", flush=True)
        references = {job.name: run.result() for job, run in zip(jobs, undisturbed_runs, strict=True)}
        print("  what each job has done, and what REST says of it", flush=True)
        for job in jobs:
            judge_job(job, happened, references[job.name], verdict)
            judge_account(arena, job, happened, verdict)
        if plan.resized:
            print(f"  {jobs[0].name} on one rank, and on two again", flush=True)
            references[jobs[0].name] |= resize(jobs[0], references[jobs[0].name], verdict)
        print(f"  every checkpoint is restored; so far {len(verdict.findings)} findings", flush=True)
        for restored, job in zip(threads.map(partial(read_back, arena), jobs), jobs, strict=True):
            judge_catalog(arena, job, happened, references[job.name], restored, verdict)
    context = open_service(arena.place.service_settings())
    try:
        for drift in drifted_at_last(context):
            verdict.found(Wrong.SUMS, "", drift)
    finally:
        close_service(context)


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
