"""How much of a run's time went into steps that it still has. Pure: attempts in, seconds and steps out.

The lineage says which steps a run still has: those up to the checkpoint that was resumed from, of each attempt from the
newest back to the first. What an attempt ran beyond, and all of one beside the line, is lost.

    opened ── restoring, starting ── first step ── steps, saves ── last step ── draining ── end ── gap ── opened
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from holdfast_protocol.runs import AttemptGoodput, Goodput
from holdfast_protocol.states import AttemptOutcome
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Attempt, Checkpoint, Run
from holdfast_service.runs.views import run_named


@dataclass(frozen=True, kw_only=True)
class AttemptHistory:
    """What the catalog knows of an attempt. `resumed_from`: attempt and step of the checkpoint that its ranks loaded;
    `resumed_from_forgotten`: the catalog does not know that checkpoint any more. `last_step`: the last one that it is
    known to have reached, by a heartbeat or by a save (`training/fencing.py`)."""

    number: int
    opened_at: datetime
    outcome: AttemptOutcome | None = None
    ended_at: datetime | None = None
    called_later: bool = False
    heartbeat_at: datetime | None = None
    first_step: int | None = None
    first_step_at: datetime | None = None
    last_step: int | None = None
    progressed_at: datetime | None = None
    steps_run: int | None = None
    steps_per_second: float | None = None
    restore_seconds: float = 0.0
    save_blocked_seconds: float = 0.0
    resumed_from: tuple[int, int] | None = None
    resumed_from_forgotten: bool = False


def goodput_of(history: Sequence[AttemptHistory], now: datetime) -> Goodput:
    """The goodput of one run, by the attempts' numbers."""
    lives = _lives(history, now)
    since = lives[0].attempt.opened_at if lives else None
    return _total([life.spent for life in lives], since, lives[-1].end if lives else None)


@dataclass(frozen=True)
class SeenAttempt:
    """The productive seconds that an attempt had at an earlier moment."""

    number: int
    at: datetime
    productive_seconds: float


def spent_between(
    history: Sequence[AttemptHistory],
    since: datetime,
    until: datetime,
    now: datetime,
    seen: SeenAttempt | None = None,
) -> tuple[float, float] | None:
    """Productive and wall seconds of one run between two moments, as far as is known now; None while no step's time is
    known. What an attempt told is spread evenly over its life, and the time since the attempt before over that time, as
    in the view goodput_by_day: so the parts of a run add up to its goodput. Of an attempt that was `seen` it is what
    it told after that, spread evenly over the time after that: an hour in which it hung has none of what was before."""
    productive = wall = 0.0
    lives = _lives(history, now)
    for life in lives:
        opened = life.attempt.opened_at
        here, lived = _overlap(opened, life.end, since, until), (life.end - opened).total_seconds()
        wall += here + _overlap(life.ended_before, opened, since, until)
        told = life.spent.productive_seconds
        if seen is not None and seen.number == life.attempt.number and seen.at < life.end:
            # Less than it was, because steps are lost meanwhile: the hours before keep what they had.
            lived, told = (life.end - seen.at).total_seconds(), max(0.0, told - seen.productive_seconds)
        productive += min(1.0, told / lived) * here if lived else 0.0
    return (productive, wall) if any(life.spent.step_seconds is not None for life in lives) else None


def _overlap(began: datetime, ended: datetime, since: datetime, until: datetime) -> float:
    return max(0.0, (min(ended, until) - max(began, since)).total_seconds())


@dataclass(frozen=True)
class _Life:
    """`ended_before`: when the attempt before ended; of the first one when it was opened itself."""

    attempt: AttemptHistory
    ended_before: datetime
    end: datetime
    spent: AttemptGoodput


def _lives(history: Sequence[AttemptHistory], now: datetime) -> list[_Life]:
    """By the attempts' numbers."""
    attempts = sorted(history, key=lambda attempt: attempt.number)
    ends = _ends(attempts, now)
    usual = _usual_step_seconds(attempts)
    limits = _limits(attempts)
    lives = []
    for at, attempt in enumerate(attempts):
        ended_before, outcome_before = (ends[at - 1], attempts[at - 1].outcome) if at else (attempt.opened_at, None)
        spent = _spent(attempt, ends[at], (ended_before, outcome_before), limits, usual)
        lives.append(_Life(attempt, ended_before, ends[at], spent))
    return lives


def _ends(attempts: Sequence[AttemptHistory], now: datetime) -> list[datetime]:
    """When each was last known to live. None lasts into the next one."""
    ends = [max(attempt.opened_at, _end(attempt, now)) for attempt in attempts]
    for at, (_, later) in enumerate(pairwise(attempts)):
        ends[at] = max(attempts[at].opened_at, min(ends[at], later.opened_at))
    return ends


def _end(attempt: AttemptHistory, now: datetime) -> datetime:
    if attempt.outcome is None or attempt.ended_at is None:
        return now
    silent = attempt.outcome is AttemptOutcome.LOST or (
        attempt.outcome is AttemptOutcome.FENCED and not attempt.called_later
    )
    if not silent:
        return attempt.ended_at
    signs = (attempt.opened_at, attempt.heartbeat_at, attempt.progressed_at)
    return min(attempt.ended_at, max(sign for sign in signs if sign is not None))


def _base(attempt: AttemptHistory) -> int | None:
    """The step whose state it went on from; None if that is not known. One that resumed from nothing and has not told
    its first step began at 1, or at 0: its saves prove no more."""
    if attempt.resumed_from is not None:
        return attempt.resumed_from[1]
    if attempt.first_step is not None:
        return attempt.first_step - 1
    return None if attempt.resumed_from_forgotten else 0


def _steps_run(attempt: AttemptHistory) -> int:
    """At least those up to its last step: a save may have told of more than the last heartbeat."""
    base, last = _base(attempt), attempt.last_step
    between = 0 if base is None or last is None else last - base
    return max(0, attempt.steps_run or 0, between)


def _limits(attempts: Sequence[AttemptHistory]) -> dict[int, int | None]:
    """The last step that is kept of each attempt on the line, None for all. Others are not in it."""
    by_number = {attempt.number: attempt for attempt in attempts}
    newest = next(
        (each for each in reversed(attempts) if each.resumed_from is not None or each.last_step is not None), None
    )
    limits: dict[int, int | None] = {}
    limit: int | None = None
    while newest is not None:
        limits[newest.number] = limit
        if newest.resumed_from is None or newest.resumed_from[0] >= newest.number:
            break
        parent, limit = newest.resumed_from
        newest = by_number.get(parent)
    return limits


def _steps_kept(attempt: AttemptHistory, limits: dict[int, int | None]) -> int:
    base, last = _base(attempt), attempt.last_step
    if attempt.number not in limits or base is None or last is None:
        return 0
    limit = limits[attempt.number]
    return max(0, (last if limit is None else min(last, limit)) - base)


def _step_seconds(attempt: AttemptHistory) -> float | None:
    """From its first step to its last sign of progress, without saves."""
    if attempt.first_step_at is None or attempt.progressed_at is None or attempt.steps_run is None:
        return None
    if attempt.steps_run > 1:
        between = (attempt.progressed_at - attempt.first_step_at).total_seconds() - attempt.save_blocked_seconds
        return max(0.0, between) / (attempt.steps_run - 1)
    return 1 / attempt.steps_per_second if attempt.steps_per_second else None


def _usual_step_seconds(attempts: Sequence[AttemptHistory]) -> float | None:
    """The usual step of the whole run, for an attempt that tells too little of itself."""
    known = [
        (seconds, attempt.steps_run or 0)
        for attempt in attempts
        if attempt.steps_run and (seconds := _step_seconds(attempt)) is not None
    ]
    steps = sum(count for _, count in known)
    return sum(seconds * count for seconds, count in known) / steps if steps else None


def _spent(
    attempt: AttemptHistory,
    end: datetime,
    before: tuple[datetime, AttemptOutcome | None],
    limits: dict[int, int | None],
    usual_step_seconds: float | None,
) -> AttemptGoodput:
    ended_before, outcome_before = before
    gap = max(0.0, (attempt.opened_at - ended_before).total_seconds())
    lived = (end - attempt.opened_at).total_seconds()
    steps_run = _steps_run(attempt)
    steps_kept = min(steps_run, _steps_kept(attempt, limits))
    step_seconds = _step_seconds(attempt) if attempt.steps_run else None
    if step_seconds is None and steps_run:
        step_seconds = usual_step_seconds
    share = _Share(lived)
    restoring = share.take(attempt.restore_seconds)
    saving = share.take(attempt.save_blocked_seconds)
    in_steps = share.take(steps_run * (step_seconds or 0.0))
    productive = in_steps * steps_kept / steps_run if steps_run else 0.0
    starts_until = attempt.first_step_at or (end if not steps_run else attempt.opened_at)
    starting = share.take(
        (starts_until - attempt.opened_at).total_seconds()
        - restoring
        - (step_seconds or 0.0 if attempt.first_step_at else 0.0)
    )
    idle_gap = gap if outcome_before is AttemptOutcome.FINISHED else 0.0
    return AttemptGoodput(
        attempt=attempt.number,
        outcome=attempt.outcome,
        resumed_from_step=None if attempt.resumed_from is None else attempt.resumed_from[1],
        last_step=attempt.last_step,
        step_seconds=step_seconds,
        wall_seconds=gap + lived,
        productive_seconds=productive,
        lost_seconds=in_steps - productive,
        saving_seconds=saving,
        restoring_seconds=restoring,
        restarting_seconds=starting + gap - idle_gap,
        idle_seconds=share.left + idle_gap,
        steps_run=steps_run,
        steps_kept=steps_kept,
        steps_lost=steps_run - steps_kept,
    )


class _Share:
    """What is left of the time that an attempt lived: its parts are told by different clocks, and never exceed it."""

    def __init__(self, seconds: float) -> None:
        self.left = max(0.0, seconds)

    def take(self, seconds: float) -> float:
        taken = min(self.left, max(0.0, seconds))
        self.left -= taken
        return taken


def _total(spent: Sequence[AttemptGoodput], since: datetime | None, until: datetime | None) -> Goodput:
    wall = sum(each.wall_seconds for each in spent)
    productive = sum(each.productive_seconds for each in spent)
    known = any(each.step_seconds is not None for each in spent)
    return Goodput(
        goodput=productive / wall if known and wall else None,
        since=since,
        until=until,
        attempts=list(spent),
        wall_seconds=wall,
        productive_seconds=productive,
        lost_seconds=sum(each.lost_seconds for each in spent),
        saving_seconds=sum(each.saving_seconds for each in spent),
        restoring_seconds=sum(each.restoring_seconds for each in spent),
        restarting_seconds=sum(each.restarting_seconds for each in spent),
        idle_seconds=sum(each.idle_seconds for each in spent),
        steps_run=sum(each.steps_run for each in spent),
        steps_kept=sum(each.steps_kept for each in spent),
        steps_lost=sum(each.steps_lost for each in spent),
    )


_OF_ATTEMPT = (
    Attempt.run_id,
    Attempt.number,
    Attempt.opened_at,
    Attempt.outcome,
    Attempt.ended_at,
    Attempt.refused_at,
    Attempt.rolled_back_at,
    Attempt.heartbeat_at,
    Attempt.first_step,
    Attempt.first_step_at,
    Attempt.last_step,
    Attempt.progressed_at,
    Attempt.steps_run,
    Attempt.steps_per_second,
    Attempt.restore_seconds,
    Attempt.save_blocked_seconds,
    Attempt.resumed_from_id,
)


def attempt_histories(session: Session, run_ids: Collection[str]) -> dict[str, list[AttemptHistory]]:
    """What `goodput_of` asks of attempts, for some runs at once: by run, the oldest attempt first; a run without
    attempts is not in it. Without the one in whose name a fork's first checkpoint stands: it ran nothing, and nobody
    waited between it and the first launch."""
    rows = session.execute(
        select(*_OF_ATTEMPT, Checkpoint.attempt_number.label("resumed_attempt"), Checkpoint.step.label("resumed_step"))
        .join(Run, Run.id == Attempt.run_id)
        .outerjoin(Checkpoint, Checkpoint.id == Attempt.resumed_from_id)
        .where(Attempt.run_id.in_(run_ids), or_(Run.forked_from.is_(None), Attempt.number > 1))
        .order_by(Attempt.run_id, Attempt.number)
    )
    histories: dict[str, list[AttemptHistory]] = defaultdict(list)
    for attempt in rows:
        histories[attempt.run_id].append(
            AttemptHistory(
                number=attempt.number,
                opened_at=attempt.opened_at,
                outcome=None if attempt.outcome is None else AttemptOutcome(attempt.outcome),
                ended_at=attempt.ended_at,
                called_later=attempt.refused_at is not None or attempt.rolled_back_at is not None,
                heartbeat_at=attempt.heartbeat_at,
                first_step=attempt.first_step,
                first_step_at=attempt.first_step_at,
                last_step=attempt.last_step,
                progressed_at=attempt.progressed_at,
                steps_run=attempt.steps_run,
                steps_per_second=attempt.steps_per_second,
                restore_seconds=attempt.restore_seconds or 0.0,
                save_blocked_seconds=attempt.save_blocked_seconds or 0.0,
                resumed_from=None if attempt.resumed_step is None else (attempt.resumed_attempt, attempt.resumed_step),
                resumed_from_forgotten=attempt.resumed_from_id is not None and attempt.resumed_step is None,
            )
        )
    return dict(histories)


def read_goodput(context: ServiceContext, caller: Principal, project: str, run: str) -> Goodput:
    """The goodput of one run, as it is now. For tokens that read. Raises `forbidden`, `project_not_found` and
    `run_not_found`."""
    with context.database.read() as session:
        _, found = run_named(session, caller, project, run)
        history = attempt_histories(session, [found.id]).get(found.id, [])
        return goodput_of(history, database_now(session))
