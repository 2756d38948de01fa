"""The end of a chaos run: what must hold, by the journals, by what the client was told, and by restoring everything.
Every sentence that comes out of here is a reason why the run has failed."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import CheckpointState, Health
from tests.chaos_run.chaos import Happened
from tests.chaos_run.faults import Arena
from tests.chaos_run.job import Job
from tests.chaos_run.journal import JournalReader, LaunchRecord
from tests.chaos_run.place import PROJECT
from tests.chaos_run.trainer import SAVE_EVERY

_REPOSITORY = Path(__file__).parents[2]
_REFERENCE_SECONDS = 900


@dataclass
class Verdict:
    """`lost`: by what ended a launch (job.py's `by`), the steps that had to be trained again."""

    facts: Counter[str] = field(default_factory=Counter)
    lost: dict[str, list[int]] = field(default_factory=dict)
    wrong_bytes: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    lost_commits: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        return [*self.wrong_bytes, *self.hangs, *self.lost_commits, *self.others]


def undisturbed(job: Job, steps: int, folder: Path) -> dict[int, str]:
    """The digest of the state after each step of a run that nothing happens to, in processes of its own."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "tests.chaos_run.trainer", job.run, str(folder), "1", f"--seed={job.seed}", f"--undisturbed={steps}"),
    ]
    done = subprocess.run(
        command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=_REFERENCE_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the undisturbed run failed:\n{done.stderr[-4000:]}")
    return {step.step: step.state for each in JournalReader(folder).launches() for step in each.steps}


def judge_job(arena: Arena, job: Job, happened: list[Happened], reference: dict[int, str], verdict: Verdict) -> None:
    for rank in range(2):
        _same_bits(job, job.launches(rank), reference, verdict)
    _went_on(job, happened, verdict)
    _ends_explained(job, happened, verdict)


def _same_bits(job: Job, launches: list[LaunchRecord], reference: dict[int, str], verdict: Verdict) -> None:
    for each in launches:
        where = f"{job.name}, launch {each.launch}, rank {each.rank}"
        if each.begun_at is not None and each.start and each.state != reference[each.start - 1]:
            verdict.wrong_bytes.append(f"{where}: what was restored of step {each.start - 1} is not what was saved")
        for step in each.steps:
            verdict.facts["steps compared with the undisturbed run"] += 1
            if step.state != reference[step.step]:
                verdict.wrong_bytes.append(f"{where}: step {step.step} is not that of the undisturbed run")
                break
    trained = {step.step for each in launches for step in each.steps}
    if missing := set(range(max(trained, default=-1) + 1)) - trained:
        verdict.others.append(f"{job.name}: step {min(missing)} was never trained")
    if not launches or launches[-1].ended != "finished":
        verdict.others.append(f"{job.name}: its last launch has not finished")


def _went_on(job: Job, happened: list[Happened], verdict: Verdict) -> None:
    """What each launch had to train again, and that it was no more than it may be."""
    by = {end.launch: end.by or "ended by itself" for end in job.ends}
    begun = [each for each in job.launches() if each.begun_at is not None]
    for before, after in itertools.pairwise(begun):
        last = before.last_step if before.last_step is not None else before.start - 1
        lost = last + 1 - after.start
        verdict.lost.setdefault(by[before.launch], []).append(lost)
        if "made wrong" in by[before.launch]:
            continue  # the point before, or the one before that, is what it should have taken
        told = max((told.step for each in begun[: begun.index(after)] for told in each.told), default=-1)
        if after.start < told + 1 and not _made_wrong(job, begun[: begun.index(after)], by):
            verdict.lost_commits.append(
                f"{job.name}, launch {after.launch}: step {told} was committed, and training went on at {after.start}"
            )
        due = [step.step for step in before.steps if (step.step + 1) % SAVE_EVERY == 0]
        over = [step for step in due[:-1] if not _was_broken(happened, job, before, step)]
        if over and after.start < over[-1] + 1:
            verdict.others.append(
                f"{job.name}, launch {after.launch}: more than one interval was lost: step {over[-1]} was due and "
                f"training went on at {after.start}, after {last}"
            )


def _made_wrong(job: Job, launches: list[LaunchRecord], by: dict[int, str]) -> bool:
    return any("made wrong" in by.get(each.launch, "") for each in launches[-2:])


def _was_broken(happened: list[Happened], job: Job, launch: LaunchRecord, step: int) -> bool:
    """Something was down between the step's training and the next due save: then a save may come late."""
    at = {each.step: each.at for each in launch.steps}
    begins, ends = at[step], at[min(step + SAVE_EVERY, launch.steps[-1].step)]
    return any(
        one.at <= ends and one.mended_at.get(job.name, float("inf")) >= begins
        for one in happened
        if job.name in one.high_water
    )


def _ends_explained(job: Job, happened: list[Happened], verdict: Verdict) -> None:
    for end in job.ends:
        if end.code and not end.by:
            verdict.facts["launches that ended by themselves"] += 1
            if not any(one.at <= end.at <= one.over_at + 90 for one in happened if job.name in one.high_water):
                words = "\n    ".join(end.last_words)
                verdict.others.append(f"{job.name}, launch {end.launch} ended with {end.code}, unharmed:\n    {words}")
        verdict.facts["launches"] += 1


def judge_catalog(arena: Arena, job: Job, reference: dict[int, str], verdict: Verdict) -> None:
    """Restores every checkpoint in a fresh process, and finds each that the client was told of."""
    client = arena.place.client
    views = {view.id: view for view in client.all_checkpoints(PROJECT, job.name)}
    told = {told.checkpoint_id: told.step for each in job.launches() for told in each.told}
    restored = _read_back(arena, job)
    for checkpoint_id, step in told.items():
        view = views.get(checkpoint_id)
        if view is None or view.state is not CheckpointState.COMMITTED:
            state = "not in the catalog" if view is None else view.state
            verdict.lost_commits.append(f"{job.name}: step {step} was committed and is {state}")
    for view in views.values():
        if view.state is CheckpointState.COMMITTED:
            _judge_read(arena, job, view, restored.get(view.id, "never read"), reference, verdict)


def _judge_read(
    arena: Arena, job: Job, view: CheckpointView, got: str, reference: dict[int, str], verdict: Verdict
) -> None:
    verdict.facts["committed checkpoints restored at the end"] += 1
    if got == reference[view.step]:
        return
    now = arena.place.client.checkpoint(view.id)
    digests = {
        chunk.digest
        for rank in range(view.world_size)
        for chunk in arena.place.client.shard_chunks(view.id, rank).chunks
    }
    if len(got) == 64:
        verdict.wrong_bytes.append(f"{job.name}: step {view.step} ({view.id}) was restored with other bytes")
    elif not digests & arena.damaged:
        verdict.lost_commits.append(f"{job.name}: step {view.step} ({view.id}) cannot be restored: {got}")
    elif now.health is not Health.CORRUPT:
        verdict.others.append(f"{job.name}: step {view.step} ({view.id}) is damaged and not marked: {got}")
    else:
        verdict.facts["of them damaged by the run, found and marked"] += 1


def _read_back(arena: Arena, job: Job) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos_run.readback", job.run, str(job.seed)],
        cwd=_REPOSITORY,
        env=arena.place.environment(job.way),
        capture_output=True,
        text=True,
        timeout=_REFERENCE_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"reading {job.run} back failed:\n{done.stderr[-4000:]}")
    return dict(json.loads(line) for line in done.stdout.splitlines())
