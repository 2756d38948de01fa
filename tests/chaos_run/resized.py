"""The same run on one rank, killed and launched again there, and on two ranks once more. Gradients are other sums
then, so nothing is compared with the undisturbed run: what is restored must be what was saved."""

from __future__ import annotations

import time

from tests.chaos_run.findings import Verdict, Wrong
from tests.chaos_run.job import Job
from tests.chaos_run.trainer import SAVE_EVERY

KIND = "another number of ranks"
_WAIT_SECONDS = 240
_LOOK_EVERY_SECONDS = 0.1


def resize(job: Job, saved: dict[int, str], verdict: Verdict) -> dict[int, str]:
    """The job has finished; by step, the digest of the state that was `saved`. Returns those that were trained here."""
    before = job.number
    ranks = job.ranks
    for world_size, killed in ((1, True), (ranks, False)):
        job.ranks = world_size
        job.finish_at(job.last_step() + 1 + 3 * SAVE_EVERY)
        job.start()
        if killed and _has_committed(job):
            job.kill(KIND)
        if not job.wait_finished(_WAIT_SECONDS):
            verdict.found(Wrong.HANG, KIND, f"{job.name} on {world_size} ranks did not end:\n{job.dump_stacks()}")
            return {}
    trained: dict[int, str] = {}
    for each in job.launches():
        if each.launch > before:
            if each.begun_at is not None:
                verdict.facts["launches on another number of ranks, with equal state"] += 1
                if each.state != (saved | trained)[each.start - 1]:
                    what = f"{job.name}, launch {each.launch} on {each.world_size}: not the state of {each.start - 1}"
                    verdict.found(Wrong.BYTES, KIND, what)
            trained |= {step.step: step.state for step in each.steps}
    return trained


def _has_committed(job: Job) -> bool:
    """The newest launch has; false if it comes to no commit in time."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        newest = job.launches()[-1]
        if newest.launch == job.number and newest.told:
            return True
        time.sleep(_LOOK_EVERY_SECONDS)
    return False
