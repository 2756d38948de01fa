"""Judges a job by its journals: every step has the bits of the undisturbed run, each launch went on where it should,
and nobody ended without a reason."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.chaos_run.chaos import Happened
from tests.chaos_run.faults import FILLS_DISK, KILLS_A_JOB, KILLS_A_RANK, KILLS_AN_AGENT, SPOILS
from tests.chaos_run.findings import Recovery, Verdict, Wrong
from tests.chaos_run.job import Job
from tests.chaos_run.journal import JournalReader, LaunchRecord
from tests.chaos_run.trainer import SAVE_EVERY

_REPOSITORY = Path(__file__).parents[2]
_REFERENCE_SECONDS = 900
_AFTERMATH_SECONDS = 120
"""A job may end by itself while something is down, or when it has lost its patience afterwards."""
_PARTS_RANK_AND_AGENT = (KILLS_AN_AGENT, FILLS_DISK)
"""For longer than the fault lasts."""


def undisturbed(job: Job, steps: int, folder: Path) -> dict[int, str]:
    """The digest of the state after each step of a run that nothing happens to, in processes of its own."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"),
        *("-m", "tests.chaos_run.trainer", job.run, str(folder), "1", f"--seed={job.seed}", f"--undisturbed={steps}"),
    ]
    done = subprocess.run(
        command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=_REFERENCE_SECONDS, check=False
    )
    states = {step.step: step.state for each in JournalReader(folder).launches() for step in each.steps}
    # Its exit status says nothing: gloo aborts now and then while the ranks leave, after the last step.
    if states.keys() != set(range(steps)):
        raise RuntimeError(f"the undisturbed run failed:\n{done.stderr[-4000:]}")
    return states


def judge_job(job: Job, happened: list[Happened], reference: dict[int, str], verdict: Verdict) -> None:
    mine = [one for one in happened if job.name in one.high_water]
    by = {end.launch: end.by for end in job.ends}
    for rank in range(job.ranks):
        _same_bits(job, job.launches(rank), by, reference, verdict)
    _went_on(job, mine, by, verdict)
    _ended_for_a_reason(job, mine, verdict)


def _same_bits(
    job: Job, launches: list[LaunchRecord], by: dict[int, str], reference: dict[int, str], verdict: Verdict
) -> None:
    for each in launches:
        where = f"{job.name}, launch {each.launch}, rank {each.rank}"
        kind = by.get(each.launch - 1, "")
        if each.begun_at is not None and each.start and each.state != reference[each.start - 1]:
            verdict.found(Wrong.BYTES, kind, f"{where}: what was restored of step {each.start - 1} is not what it was")
        verdict.facts["steps compared with the undisturbed run, bit for bit"] += len(each.steps)
        other = next((step.step for step in each.steps if step.state != reference[step.step]), None)
        if other is not None:
            verdict.found(Wrong.BYTES, kind, f"{where}: step {other} is not that of the undisturbed run")
    trained = {step.step for each in launches for step in each.steps}
    if missing := set(reference) - trained:
        verdict.found(Wrong.BYTES, "", f"{job.name}: step {min(missing)} was never trained")
    if not launches or launches[-1].ended != "finished":
        verdict.found(Wrong.HANG, "", f"{job.name}: its last launch has not finished")


def _went_on(job: Job, happened: list[Happened], by: dict[int, str], verdict: Verdict) -> None:
    """What each launch had to train again. Never a step whose commit the job was told, but where its bytes were made
    wrong; and at most one interval more than what the save in flight held."""
    begun = [each for each in job.launches() if each.begun_at is not None]
    told, spoilt = -1, False
    for before, after in itertools.pairwise(begun):
        kind = by.get(before.launch, "")
        left_with = -1 if before.left_with is None else before.left_with
        told = max([told, left_with, *(one.step for one in before.told)])
        spoilt = spoilt or kind in SPOILS
        last = before.start - 1 if before.last_step is None else before.last_step
        verdict.lost.setdefault(kind, []).append(last + 1 - after.start)
        handed = _newest_saved(job, before)
        lost = (max(0, step + 1 - after.start) for step in (last, handed, told))
        seconds = _seconds_to_first_step(job, kind, before, after, happened)
        verdict.recoveries.append(Recovery(kind, *lost, seconds=seconds, read=_read_by(job, before, after)))
        where = f"{job.name}, launch {after.launch}: training went on at {after.start} after {last}"
        if spoilt:
            # The point before was to be taken. The next commit puts an end to that.
            spoilt = not any(one.step > told for one in after.told)
            continue
        if after.start <= told:
            verdict.found(Wrong.LOST_COMMIT, kind, f"{where}, and step {told} was committed")
        # The last one was in flight; the one before had an interval's time, unless something was down meanwhile.
        # One that was declined, for an earlier one was in flight, is made up for by the next.
        declined = {step for step, why in before.failed if why.startswith("SaveDeclined")}
        saves = [step for step in before.saving if step not in declined]
        in_time = [step for step in saves[:-1] if not _was_broken(happened, job, before, step)]
        if in_time and after.start <= in_time[-1]:
            verdict.found(Wrong.LOST_WORK, kind, f"{where}, and the save of step {in_time[-1]} had the time it needs")
        if after.start <= handed and _agents_had_it(job, kind, before, after, handed, happened):
            verdict.found(Wrong.LOST_WORK, kind, f"{where}, and the agents had step {handed}")


def _newest_saved(job: Job, launch: LaunchRecord) -> int:
    """The newest step whose save() has returned on all ranks; -1 if there is none."""
    ranks = [one for rank in range(job.ranks) for one in job.launches(rank) if one.launch == launch.launch]
    declined = {step for one in ranks for step, why in one.failed if why.startswith("SaveDeclined")}
    on_all = set.intersection(*(set(one.saving) for one in ranks)) if len(ranks) == job.ranks else set()
    return max(on_all - declined, default=-1)


def _seconds_to_first_step(
    job: Job, kind: str, before: LaunchRecord, after: LaunchRecord, happened: list[Happened]
) -> float | None:
    """From the beginning of the fault that has ended `before`."""
    ended_at = next(end.at for end in job.ends if end.launch == before.launch)
    began_at = max((one.at for one in happened if one.kind == kind and one.at <= ended_at), default=None)
    return after.steps[0].at - began_at if began_at is not None and after.steps else None


def _read_by(job: Job, before: LaunchRecord, after: LaunchRecord) -> Counter[str]:
    """Of all ranks, or of the one that was killed alone."""
    read: Counter[str] = Counter()
    for rank in range(job.ranks):
        if job.killed_ranks.get(before.launch, rank) == rank:
            read.update(next((one.read for one in job.launches(rank) if one.launch == after.launch), {}))
    return read


def _agents_had_it(
    job: Job, kind: str, before: LaunchRecord, after: LaunchRecord, step: int, happened: list[Happened]
) -> bool:
    """This step was handed to agents that have outlived the ranks and could commit it: nothing else was down. A rank
    finds an agent that was killed again within a minute, and one whose files were limited may have shared nothing."""
    if job.nodes is None or kind not in (KILLS_A_RANK, KILLS_A_JOB) or after.begun_at is None:
        return False
    saved_at = next(one.at for one in before.steps if one.step == step)
    launched_at = max((end.at for end in job.ends if end.launch < before.launch), default=0.0)
    ended_at = next(end.at for end in job.ends if end.launch == before.launch)
    own_at = max(one.at for one in happened if one.kind == kind and one.at <= ended_at)
    others = [one for one in happened if one.at <= after.begun_at and one.at != own_at]
    was_down = any(one.mended_at.get(job.name, math.inf) >= saved_at for one in others)
    return not (was_down or any(one.kind in _PARTS_RANK_AND_AGENT and one.over_at >= launched_at for one in others))


def _was_broken(happened: list[Happened], job: Job, launch: LaunchRecord, step: int) -> bool:
    """Something was down from this step until the next save: then this one may come late."""
    at = {each.step: each.at for each in launch.steps}
    begins, ends = at[step], at[min(step + SAVE_EVERY, launch.steps[-1].step)]
    return any(one.at <= ends and one.mended_at.get(job.name, math.inf) >= begins for one in happened)


def _ended_for_a_reason(job: Job, happened: list[Happened], verdict: Verdict) -> None:
    for end in job.ends:
        verdict.facts["launches"] += 1
        if end.code == 0 or end.by:
            continue
        verdict.facts["launches that ended by themselves, while something was down"] += 1
        if not any(one.at <= end.at <= one.over_at + _AFTERMATH_SECONDS for one in happened):
            words = "\n    ".join(end.last_words)
            verdict.found(Wrong.END, "", f"{job.name}, launch {end.launch} ended with {end.code}:\n    {words}")
