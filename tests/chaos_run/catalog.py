"""Judges what the catalog has: each checkpoint that a client was told of is there, and each that is there is restored
in a fresh process and compared. What the run has damaged must be marked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import CheckpointState, Health
from tests.chaos_run.chaos import Happened
from tests.chaos_run.faults import Arena, digests_of
from tests.chaos_run.findings import Verdict, Wrong
from tests.chaos_run.job import Job
from tests.chaos_run.journal import Told
from tests.chaos_run.place import PROJECT

_REPOSITORY = Path(__file__).parents[2]
_READ_SECONDS = 900
_EXPIRED = (CheckpointState.TRASHED, CheckpointState.DELETING, CheckpointState.DELETED)


def judge_catalog(
    arena: Arena,
    job: Job,
    happened: list[Happened],
    reference: dict[int, str],
    restored: dict[str, str],
    verdict: Verdict,
) -> None:
    """`reference`: by step, the digest that its checkpoint must have; `restored`: what `read_back` gave."""
    views = {view.id: view for view in arena.place.client.checkpoints.all(PROJECT, job.name)}
    for told in (told for each in job.launches() for told in each.told):
        state = views[told.checkpoint_id].state if told.checkpoint_id in views else None
        if state in _EXPIRED:
            verdict.facts["commits that the retention policy let expire"] += 1
        elif state is not CheckpointState.COMMITTED:
            what = f"{job.name}: step {told.step} was committed and is {state or 'not in the catalog'}"
            verdict.found(Wrong.LOST_COMMIT, _behind(happened, job, told), what)
    for view in views.values():
        if view.state is CheckpointState.COMMITTED:
            _judge_checkpoint(arena, job, view, restored.get(view.id, "it was not read"), reference, verdict)


def _judge_checkpoint(
    arena: Arena, job: Job, view: CheckpointView, got: str, reference: dict[int, str], verdict: Verdict
) -> None:
    verdict.facts["committed checkpoints restored at the end, bit for bit"] += 1
    if got == reference[view.step]:
        return
    what = f"{job.name}: step {view.step} ({view.id}), attempt {view.attempt}"
    if len(got) == len(reference[view.step]):
        verdict.found(Wrong.BYTES, "", f"{what} was restored with other bytes")
    elif not digests_of(arena, view) & arena.damaged:
        verdict.found(Wrong.LOST_COMMIT, "", f"{what} cannot be restored: {got}")
    elif arena.place.client.checkpoints.get(view.id).health is not Health.CORRUPT:
        verdict.found(Wrong.LOST_COMMIT, "", f"{what} is damaged, and not marked: {got}")
    else:
        verdict.facts["damaged by the run, and marked instead"] += 1


def _behind(happened: list[Happened], job: Job, told: Told) -> str:
    """The fault that came next after this commit."""
    return next((one.kind for one in happened if job.name in one.high_water and one.over_at >= told.at), "")


def read_back(arena: Arena, job: Job) -> dict[str, str]:
    """By checkpoint, the digest of what a fresh job has restored of it, or why it has not."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos_run.readback", job.run, str(job.seed)],
        cwd=_REPOSITORY,
        env=arena.place.environment(job.way),
        capture_output=True,
        text=True,
        timeout=_READ_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"reading {job.run} back failed:\n{done.stderr[-4000:]}")
    return dict(json.loads(line) for line in done.stdout.splitlines())
