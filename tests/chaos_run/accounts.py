"""What REST says of the run, beside what the run itself has recorded: how each attempt ended, where it went on, which
steps it trained and which of them were lost, and how much of the time was training."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter

from holdfast_protocol.runs import AttemptGoodput, Goodput
from holdfast_protocol.states import AttemptOutcome
from tests.chaos_run.chaos import Happened
from tests.chaos_run.faults import JUMPS_DATABASE, KILLS_A_RANK, LOSES_A_NODE, PREEMPTS, Arena
from tests.chaos_run.findings import Verdict, Wrong
from tests.chaos_run.job import Job
from tests.chaos_run.journal import LaunchRecord
from tests.chaos_run.place import HEARTBEAT_SECONDS, PROJECT

_SETTLED_SECONDS = 60
_UNTOLD_SECONDS = 3 * HEARTBEAT_SECONDS
"""What was trained so shortly before SIGKILL may not have been told: a heartbeat's interval, and a busy machine."""

_ENOUGH_STEPS = 20
_SECONDS_APART, _SHARE_APART = 2.0, 0.1
"""A heartbeat tells how many steps there were, and is itself some moments late on a busy machine."""


def judge_account(arena: Arena, job: Job, happened: list[Happened], verdict: Verdict) -> None:
    mine = [one for one in happened if job.name in one.high_water]
    by = {end.launch: end for end in job.ends}
    begun = [each for each in job.launches() if each.begun_at is not None]
    account = _settled_account(arena, job)
    told = {each.attempt: each for each in account.attempts}
    unknown = [number for number in told if number not in {each.attempt for each in begun}]
    if len(unknown) > len(job.ends) - len(begun):
        verdict.found(Wrong.ACCOUNT, "", f"{job.name}: REST has the attempts {unknown}, which no launch has begun")
    for number in unknown:
        if told[number].steps_run:
            verdict.found(Wrong.ACCOUNT, "", f"{job.name}: attempt {number} trained {told[number].steps_run} steps")
    for each, after in itertools.zip_longest(begun, begun[1:]):
        if each.attempt not in told:
            verdict.found(Wrong.ACCOUNT, "", f"{job.name}: REST has no attempt {each.attempt}")
            continue
        end = by[each.launch]
        verdict.facts["attempts compared with REST"] += 1
        found = _differences(each, after, end.by, end.at, told[each.attempt], mine, job)
        if not _was_put_out_of_time(each, end.at, happened):
            verdict.facts["of them with their seconds of training"] += 1
            found += _other_seconds(each, told[each.attempt])
        for what in found:
            verdict.found(Wrong.ACCOUNT, end.by, f"{job.name}, attempt {each.attempt}: {what}")
    if account.steps_kept != job.last_step() + 1:
        what = f"{job.name}: REST says that {account.steps_kept} steps are kept, and {job.last_step() + 1} were trained"
        verdict.found(Wrong.ACCOUNT, "", what)
    lost = sum(max(0, _last(a) + 1 - b.start) for a, b in itertools.pairwise(begun))
    verdict.facts["steps trained again, by the journals"] += lost
    verdict.facts["steps lost, by REST"] += account.steps_lost
    outcomes = Counter(str(each.outcome) for each in told.values())
    verdict.notes.append(
        f"{job.name}: goodput {account.goodput or 0:.1%} by REST; attempts ended "
        + ", ".join(f"{outcome} {count}" for outcome, count in outcomes.items())
    )
    timed = [not _was_put_out_of_time(each, by[each.launch].at, happened) for each in begun]
    _judge_goodput(begun, timed, told, job, verdict)


def _settled_account(arena: Arena, job: Job) -> Goodput:
    """When no attempt is only `fenced` any more: whether one was lost before it was fenced, its silence tells."""
    deadline = time.monotonic() + _SETTLED_SECONDS
    while True:
        account = arena.place.client.insights.goodput(PROJECT, job.name)
        fenced = [each.attempt for each in account.attempts if each.outcome in (AttemptOutcome.FENCED, None)]
        if not fenced or time.monotonic() > deadline:
            return account
        time.sleep(1)


def _differences(
    each: LaunchRecord,
    after: LaunchRecord | None,
    by: str,
    ended_at: float,
    told: AttemptGoodput,
    happened: list[Happened],
    job: Job,
) -> list[str]:
    found = []
    left_alone = by == PREEMPTS and _nothing_else_was_down(ended_at, happened, job)
    if told.outcome not in _outcomes(each, by, left_alone=left_alone):
        found.append(f"it ended as {told.outcome}, and what was done to it is: {by or each.ended or 'nothing'}")
    resumed = None if each.start == 0 else each.start - 1
    if told.resumed_from_step != resumed:
        found.append(f"it went on after {resumed}, and REST says after {told.resumed_from_step}")
    if left_alone and each.ended != "finished" and each.left_with != _last(each):
        found.append(f"it was told to leave and trained step {_last(each)}, and committed is {each.left_with}")
    last, told_last = _last(each), -1 if told.last_step is None else told.last_step
    if told_last > last or told_last < _least_told(each, told.outcome, ended_at, happened, job):
        found.append(f"its last step was {last}, and REST says {told.last_step}")
    kept = last if after is None else min(last, after.start - 1)
    lost = max(0, told_last - max(kept, each.start - 1))
    if told.steps_lost != lost:
        found.append(f"{lost} of its steps that REST knows were lost, and REST says {told.steps_lost}")
    return found


def _outcomes(each: LaunchRecord, by: str, *, left_alone: bool) -> set[AttemptOutcome]:
    if each.ended == "finished":
        return {AttemptOutcome.FINISHED}
    if left_alone or (each.ended == "preempted" and by == PREEMPTS):
        return {AttemptOutcome.PREEMPTED}
    if by == PREEMPTS:
        return {AttemptOutcome.PREEMPTED, AttemptOutcome.FAILED, AttemptOutcome.LOST}
    if by in (KILLS_A_RANK, LOSES_A_NODE):
        # Its peers notice, or are ended before they can tell.
        return {AttemptOutcome.FAILED, AttemptOutcome.LOST}
    if by:
        return {AttemptOutcome.LOST}
    return {AttemptOutcome.FAILED, AttemptOutcome.LOST, AttemptOutcome.PREEMPTED}


def _nothing_else_was_down(ended_at: float, happened: list[Happened], job: Job) -> bool:
    """From the SIGTERM that this launch ended by until its end: then it has to leave in good order."""
    told = max((one for one in happened if one.kind == PREEMPTS and one.at <= ended_at), key=lambda one: one.at)
    return not any(
        one is not told and one.at <= ended_at and one.mended_at.get(job.name, math.inf) >= told.at for one in happened
    )


def _least_told(
    each: LaunchRecord, outcome: AttemptOutcome | None, ended_at: float, happened: list[Happened], job: Job
) -> float:
    """The last step that the service must have heard of."""
    if outcome in (AttemptOutcome.FINISHED, AttemptOutcome.PREEMPTED):
        return _last(each)
    if any(
        one.at <= ended_at and one.mended_at.get(job.name, math.inf) >= ended_at - _UNTOLD_SECONDS
        for one in happened
        if one.at < ended_at - 1
    ):
        return -1  # something else was down, and so was the way to the service
    heard = [step.step for step in each.steps if step.at <= ended_at - _UNTOLD_SECONDS]
    return max(heard, default=-1)


def _was_put_out_of_time(each: LaunchRecord, ended_at: float, happened: list[Happened]) -> bool:
    """The database's clock jumped while it ran, and all that the service noted of it has other times."""
    began_at = (each.begun_at or ended_at) - _UNTOLD_SECONDS
    return any(one.kind == JUMPS_DATABASE and began_at <= one.over_at and one.at <= ended_at for one in happened)


def _other_seconds(each: LaunchRecord, told: AttemptGoodput) -> list[str]:
    """Of the steps that REST knows, from the first one's end to the last one's."""
    at = {step.step: step.at for step in each.steps}
    if told.last_step not in at or told.steps_run < _ENOUGH_STEPS:
        return []
    own = at[told.last_step] - each.steps[0].at
    theirs = told.productive_seconds + told.lost_seconds + told.saving_seconds
    theirs *= (told.steps_run - 1) / told.steps_run
    if abs(own - theirs) <= _SECONDS_APART + _SHARE_APART * own:
        return []
    return [f"{told.steps_run} steps took {own:.1f} s, and REST says {theirs:.1f} s"]


def _last(each: LaunchRecord) -> int:
    return each.start - 1 if each.last_step is None else each.last_step


def _judge_goodput(
    begun: list[LaunchRecord], timed: list[bool], told: dict[int, AttemptGoodput], job: Job, verdict: Verdict
) -> None:
    """The time of the steps that were kept, of all the time that the attempts and the ways to them took: of those whose
    times are told by an undisturbed clock (`timed`), and that follow on one which is."""
    ended_at = {end.launch: end.at for end in job.ends}
    own_kept = own_wall = their_kept = their_wall = unsure = 0.0
    compared = 0
    for at, each in enumerate(begun):
        before = begun[at - 1] if at else None
        follows = before is None or (timed[at - 1] and each.attempt == before.attempt + 1)
        if not timed[at] or not follows or each.attempt not in told:
            continue
        kept_until = min((later.start for later in begun[at + 1 :]), default=math.inf)
        pairs = itertools.pairwise(each.steps)
        own_kept += sum(step.at - earlier.at for earlier, step in pairs if step.step < kept_until)
        since = (each.begun_at or 0.0) if before is None else ended_at[before.launch]
        own_wall += (each.ended_at or ended_at[each.launch]) - since
        their_kept += told[each.attempt].productive_seconds
        their_wall += told[each.attempt].wall_seconds
        compared += 1
        after = begun[at + 1] if at + 1 < len(begun) else None
        if after is not None and not (timed[at + 1] and after.attempt == each.attempt + 1) and each.steps:
            # It may have told its end and lived on: REST counts that as the way to the next attempt.
            unsure += ended_at[each.launch] - each.steps[-1].at
    if not own_wall or not their_wall:
        return
    own, theirs = own_kept / own_wall, their_kept / their_wall
    what = f"goodput {own:.1%} by the journals, {theirs:.1%} by REST, of {compared} attempts"
    verdict.notes.append(f"{job.name}: {what}")
    verdict.facts["attempts whose goodput was compared with REST"] += compared
    if abs(own - theirs) > _SHARE_APART + (_SECONDS_APART * compared + unsure) / own_wall:
        verdict.found(Wrong.ACCOUNT, "", f"{job.name}: {what}")
