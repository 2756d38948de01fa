"""How often a run should save: what was measured, what each interval would have cost, what is recommended."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from sqlalchemy import Row, Select, select
from sqlalchemy.orm import Session

from holdfast_protocol.runs import AdviceBound, AdviceSource
from holdfast_protocol.states import AttemptOutcome, CheckpointKind, CheckpointState
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Attempt, Checkpoint, Run
from holdfast_service.settings import ServiceSettings

SPREAD = 0.4
"""An uptime that was seen stands for all between 0.6 and 1.4 times it: that a save was just done when it ended is luck,
and would be learned as if it were not."""
EXPONENTIAL_UPTIMES = 10
"""So many uptimes are taken as seen with the mean at hand, exponential: the distribution while little was seen."""
EXCEPTIONS = 0.1
"""The share of the saves whose blocked time is taken for an exception: one long standstill is no cost of each save."""
_TRIES = 20
"""Intervals that are compared, evenly by their ratio; then as many again around the best of them."""


@dataclass(frozen=True)
class Uptime:
    """One attempt's time of training. Not `interrupted`: it still runs, or it ended without losing anything."""

    seconds: float
    interrupted: bool


@dataclass(frozen=True)
class SaveCost:
    blocked_seconds: float
    """Training stands still: C."""
    durable_seconds: float
    """From staged to committed; what comes after the staged step is lost, and so is this save until then: L."""


def lost_share(interval: float, uptimes: Sequence[Uptime], mean_seconds: float, cost: SaveCost) -> float:
    """The share of the uptime that goes into saves and into repeated work, 0 to 1: history replayed with the interval.
    Pure. `mean_seconds`: between two interruptions, by which the rest of an uptime that was not interrupted is guessed.

    A save is begun each `interval` of work, blocks training for C and is durable L later. An attempt that is
    interrupted after an uptime u keeps the work of the saves that were durable by then, floor((u - L) / (interval + C))
    of them, and loses all else. For exponential uptimes the expected sum over k of P(u > k(interval + C) + L) is that
    of Daly's exact model, and its best interval is Daly's. But it asks for no distribution, and bursts count as what
    they were: if failures come one upon another, most of them hit an attempt that had little to lose.
    """
    total = EXPONENTIAL_UPTIMES * mean_seconds
    total += sum(each.seconds + (0.0 if each.interrupted else mean_seconds) for each in uptimes)
    return 1.0 - _Replay(uptimes, mean_seconds, cost).kept_seconds(interval) / total


def best_interval(
    uptimes: Sequence[Uptime], mean_seconds: float, cost: SaveCost, *, shortest: float, longest: float
) -> float:
    """The interval in seconds, between the two bounds, that keeps the most work."""
    replay = _Replay(uptimes, mean_seconds, cost)
    low, high = shortest, longest
    best = low
    for _ in range(2):
        ratio = (high / low) ** (1 / (_TRIES - 1))
        best = max((low * ratio**number for number in range(_TRIES)), key=replay.kept_seconds)
        low, high = max(shortest, best / ratio), min(longest, best * ratio)
    return best


class _Replay:
    def __init__(self, uptimes: Sequence[Uptime], mean_seconds: float, cost: SaveCost) -> None:
        self._mean = mean_seconds
        self._blocked = cost.blocked_seconds
        durable = cost.durable_seconds
        # An attempt that has just begun stands for a whole uptime, of which nothing is known but the mean.
        self._running = [
            *((each.seconds - durable, 1.0) for each in uptimes if not each.interrupted),
            (-durable, EXPONENTIAL_UPTIMES),
        ]
        self._ended = [
            (max(0.0, low), high, 1.0 / (high - low))
            for each in uptimes
            if each.interrupted
            and (high := each.seconds * (1 + SPREAD) - durable) > 0
            and (low := each.seconds * (1 - SPREAD) - durable) < high
        ]

    def kept_seconds(self, interval: float) -> float:
        period = interval + self._blocked
        saves = 0.0
        for low, high, weight in self._ended:
            # The mean of floor(u / period) between them: the integral of floor(x / p) to x is n (x - p (n + 1) / 2).
            more, less = high // period, low // period
            saves += weight * (more * (high - period * (more + 1) / 2) - less * (low - period * (less + 1) / 2))
        again = 1.0 / -math.expm1(-period / self._mean)
        for gone, weight in self._running:
            past = max(0.0, gone // period)
            next_in = (past + 1) * period - gone
            saves += weight * (past + again * math.exp(-next_in / self._mean))
        return interval * saves


GUESSED_MEAN_SECONDS = 86400.0
"""Between two interruptions, while nothing has run anywhere: short for one host, long for a thousand. A mean that is
wrong by two costs 6% of what is lost anyway, and one day of running says more than it."""
GUESS_COUNTS = 1.0
"""The guess weighs as much as one interruption that was seen. What is known of the others weighs as two."""
OTHERS_COUNT = 2.0
STORE_TIMES = 1.5
"""The interval is never shorter than so many times a save's way to durable: a third of the time is left for saves that
take longer, and for what else uses the store. With less, saves meet each other and are deferred."""


@dataclass(frozen=True)
class Pool:
    """What a group of attempts went through together."""

    uptime_seconds: float = 0.0
    interruptions: int = 0


@dataclass(frozen=True)
class Measured:
    """`cost` of saves of `cost_source`, `saves` of them; None if nothing was ever saved."""

    uptimes: Sequence[Uptime]
    project: Pool
    fleet: Pool
    cost: SaveCost | None
    cost_source: AdviceSource
    saves: int
    steps_per_second: float | None = None
    restart_seconds: float | None = None


@dataclass(frozen=True)
class Bounds:
    default_seconds: float
    shortest_seconds: float
    longest_seconds: float


@dataclass(frozen=True)
class Recommendation:
    interval_seconds: float
    unbounded_seconds: float | None
    """What would lose the least, were there no bounds; None while no save was measured."""
    bound: AdviceBound | None
    mean_seconds: float
    mean_source: AdviceSource
    lost_shares: tuple[float, float, float] | None
    """At half of the interval, at it, at twice it."""


def recommend(measured: Measured, bounds: Bounds) -> Recommendation:
    """The recommended time between two saves, and why: pure, from what was measured (`read_measured`).

    1. the mean time between two interruptions: the run's own, drawn towards the project's, the fleet's and a guess
    2. the interval that would have lost the least so far (`lost_share`)
    3. the bounds: what the store bears, the shortest, the longest; the default until the run itself has saved
    """
    mean, source = _mean_seconds(measured)
    if measured.cost is None:
        return Recommendation(bounds.default_seconds, None, AdviceBound.UNMEASURED, mean, source, None)
    cost = measured.cost
    # Wide enough that a bound which binds is seen to bind.
    best = best_interval(measured.uptimes, mean, cost, shortest=1.0, longest=10 * bounds.longest_seconds)
    interval, bound = _bounded(best, cost, measured.cost_source, bounds)
    shares = tuple(lost_share(interval * times, measured.uptimes, mean, cost) for times in (0.5, 1.0, 2.0))
    return Recommendation(interval, best, bound, mean, source, (shares[0], shares[1], shares[2]))


def _bounded(best: float, cost: SaveCost, source: AdviceSource, bounds: Bounds) -> tuple[float, AdviceBound | None]:
    interval, bound = best, None
    if interval > bounds.longest_seconds:
        interval, bound = bounds.longest_seconds, AdviceBound.LONGEST
    if source is not AdviceSource.RUN and interval > bounds.default_seconds:
        # Others' saves may be dearer or cheaper than this run's; the first one of its own is measured soon.
        interval, bound = bounds.default_seconds, AdviceBound.UNMEASURED
    if interval < bounds.shortest_seconds:
        interval, bound = bounds.shortest_seconds, AdviceBound.SHORTEST
    # Last: whatever else is wanted, the store cannot give more. But what the jobs of others tell of their saves keeps
    # no run from saving at all.
    borne = STORE_TIMES * (cost.blocked_seconds + cost.durable_seconds)
    if source is not AdviceSource.RUN:
        borne = min(borne, bounds.longest_seconds)
    if interval < borne:
        interval, bound = borne, AdviceBound.STORE
    return interval, bound


def _mean_seconds(measured: Measured) -> tuple[float, AdviceSource]:
    """Between two interruptions, and who has told the most about it."""
    run = Pool(sum(each.seconds for each in measured.uptimes), sum(1 for each in measured.uptimes if each.interrupted))
    fleet = _drawn(measured.fleet, GUESSED_MEAN_SECONDS, GUESS_COUNTS)
    project = _drawn(measured.project, fleet, OTHERS_COUNT)
    mean = _drawn(run, project, OTHERS_COUNT)
    told = (
        (run, OTHERS_COUNT, AdviceSource.RUN),
        (measured.project, OTHERS_COUNT, AdviceSource.PROJECT),
        (measured.fleet, GUESS_COUNTS, AdviceSource.FLEET),
    )
    for pool, weight, source in told:
        if pool.interruptions >= weight or pool.uptime_seconds >= weight * GUESSED_MEAN_SECONDS:
            return mean, source
    return mean, AdviceSource.DEFAULT


def _drawn(pool: Pool, towards: float, weight: float) -> float:
    """The pool's mean, drawn towards another as if that had been seen `weight` times."""
    return (pool.uptime_seconds + weight * towards) / (pool.interruptions + weight)


_ATTEMPTS = 300
_OTHERS_ATTEMPTS = 500
_SAVES = 30
_OTHERS_RUNS = 5
_LOSES_WORK = (AttemptOutcome.FAILED, AttemptOutcome.LOST, AttemptOutcome.PREEMPTED, AttemptOutcome.FENCED)
_ATTEMPT: Select[*tuple[Any, ...]] = select(
    Attempt.id,
    Attempt.run_id,
    Attempt.opened_at,
    Attempt.heartbeat_at,
    Attempt.progressed_at,
    Attempt.ended_at,
    Attempt.outcome,
    Attempt.last_step,
    Attempt.restore_seconds,
    Attempt.steps_per_second,
    Attempt.rolled_back_at,
)


@dataclass(frozen=True)
class Others:
    """What a project's runs, or all, went through and paid: `cost` of `saves` saves, None if nothing was saved."""

    pool: Pool
    cost: SaveCost | None
    saves: int


def read_measured(session: Session, run: Run, project: Others, fleet: Others) -> Measured:
    """What the catalog has measured of a run, its project and the fleet. A save's cost is that of the run's own newest
    saves, else of its project's, else of any project's.

    Only the newest attempts and saves count: hardware, state and store change. An attempt that never ran a step had
    nothing to lose, and says nothing of how often work is lost.
    """
    rows = session.execute(
        _ATTEMPT.where(Attempt.run_id == run.id).order_by(Attempt.number.desc()).limit(_ATTEMPTS)
    ).all()
    cost, saves = _save_cost(session, [run.id])
    source = AdviceSource.RUN
    for others, of in ((project, AdviceSource.PROJECT), (fleet, AdviceSource.FLEET)):
        if cost is None:
            cost, saves, source = others.cost, others.saves, of
    return Measured(
        uptimes=_uptimes(session, rows),
        project=project.pool,
        fleet=fleet.pool,
        cost=cost,
        cost_source=source if cost is not None else AdviceSource.DEFAULT,
        saves=saves,
        steps_per_second=next((row.steps_per_second for row in rows if row.steps_per_second), None),
        restart_seconds=_restart_seconds(rows),
    )


def read_others(session: Session, project_id: str | None = None) -> Others:
    """What a project's runs went through and paid; without a project what all runs did."""
    statement = _ATTEMPT.order_by(Attempt.id.desc()).limit(_OTHERS_ATTEMPTS)
    if project_id is not None:
        statement = statement.join(Run, Run.id == Attempt.run_id).where(Run.project_id == project_id)
    rows = session.execute(statement).all()
    uptimes = _uptimes(session, rows)
    pool = Pool(sum(each.seconds for each in uptimes), sum(1 for each in uptimes if each.interrupted))
    newest_runs = list(dict.fromkeys(row.run_id for row in rows))[:_OTHERS_RUNS]
    return Others(pool, *_save_cost(session, newest_runs))


def _uptimes(session: Session, rows: Sequence[Row[*tuple[Any, ...]]]) -> list[Uptime]:
    """Time in a restore is no time of training. An attempt that saved when it was told to go has lost nothing, and one
    that its own job left for an older checkpoint has thrown away what it wanted to."""
    in_time = _saved_in_time(session, [row for row in rows if row.outcome == AttemptOutcome.PREEMPTED])
    found = []
    for row in rows:
        if row.last_step is None:
            continue
        seconds = (_last_sign(row) - row.opened_at).total_seconds() - (row.restore_seconds or 0.0)
        loses = row.outcome in _LOSES_WORK and row.rolled_back_at is None and row.id not in in_time
        found.append(Uptime(max(0.0, seconds), loses))
    return found


def _saved_in_time(session: Session, preempted: Sequence[Row[*tuple[Any, ...]]]) -> set[int]:
    """Those of these attempts whose emergency save was committed."""
    if not preempted:
        return set()
    statement = select(Checkpoint.attempt_id).where(
        Checkpoint.run_id.in_({row.run_id for row in preempted}),
        Checkpoint.attempt_id.in_([row.id for row in preempted]),
        Checkpoint.kind == CheckpointKind.EMERGENCY,
        Checkpoint.committed_at.is_not(None),
    )
    return set(session.scalars(statement))


def _last_sign(row: Row[*tuple[Any, ...]]) -> datetime:
    """The last sign of training. The reaper, or the next attempt, comes later than when work ended."""
    if row.outcome in (AttemptOutcome.FINISHED, AttemptOutcome.FAILED, AttemptOutcome.PREEMPTED):
        ended: datetime = row.ended_at
        return min(row.progressed_at or ended, ended)
    seen: datetime = row.progressed_at or row.heartbeat_at or row.opened_at
    return seen


def _restart_seconds(newest_first: Sequence[Row[*tuple[Any, ...]]]) -> float | None:
    """From the last sign of an interrupted attempt to the next one's training; the median, as a person may have slept
    in between."""
    gaps = [
        max(0.0, (later.opened_at - _last_sign(earlier)).total_seconds()) + (later.restore_seconds or 0.0)
        for later, earlier in pairwise(newest_first)
        if earlier.outcome in _LOSES_WORK
    ]
    return median(gaps) if gaps else None


def _save_cost(session: Session, run_ids: Sequence[str]) -> tuple[SaveCost | None, int]:
    """The cost of the newest saves of these runs, and how many they were."""
    saves = [save for run_id in run_ids for save in _saves(session, run_id, _SAVES // len(run_ids))]
    if not saves:
        return None, 0
    # What blocks is paid each time, so its mean. One save that waited for an outage is an exception, on both ways.
    blocked = _usual_mean([save.blocked_seconds for save in saves])
    durable = median((save.committed_at - save.created_at).total_seconds() for save in saves)
    return SaveCost(blocked, max(0.0, durable)), len(saves)


def _usual_mean(values: Sequence[float]) -> float:
    """The mean, with the largest tenth, at least one, counted as the largest of the others."""
    exceptions = math.ceil(len(values) * EXCEPTIONS)
    most = sorted(values)[max(0, len(values) - exceptions - 1)]
    return fmean(min(value, most) for value in values)


def _saves(session: Session, run_id: str, most: int) -> Sequence[Row[*tuple[Any, ...]]]:
    return session.execute(
        select(Checkpoint.created_at, Checkpoint.committed_at, Checkpoint.blocked_seconds)
        .where(
            Checkpoint.run_id == run_id,
            Checkpoint.state == CheckpointState.COMMITTED,
            Checkpoint.pushed_by.is_(None),  # a late save waited in a spool
            Checkpoint.blocked_seconds.is_not(None),
        )
        # Not by the step alone: after a rollback the branch that was left has the largest ones.
        .order_by(Checkpoint.attempt_number.desc(), Checkpoint.step.desc())
        .limit(most)
    ).all()


_RUN_SECONDS = 60.0
_OTHERS_SECONDS = 600.0
_MOST_KEPT = 10_000


@dataclass
class SaveAdvice:
    """The recommended interval of a run, from the catalog, kept for a minute, because each heartbeat asks. What its
    project's runs and all others went through is kept for longer: it changes slowly, and is read from many rows.

    Each process keeps its own, for any thread: nothing is lost with it, and two that differ for a minute do no harm.
    """

    settings: ServiceSettings
    database: Database
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Run id -> when it was worked out, and the interval."""
    _others: dict[str | None, tuple[float, Others]] = field(default_factory=dict)
    """Project id, or None for the fleet -> when it was read, and what."""

    def interval_seconds(self, run_id: str) -> float:
        """Worked out at most once a minute for each run."""
        now = time.monotonic()
        with self._lock:
            known = self._intervals.get(run_id)
        if known is not None and now - known[0] < _RUN_SECONDS:
            return known[1]
        with self.database.read() as session:
            run = session.get_one(Run, run_id)
            return self._worked_out(session, run, self._kept(session, run.project_id))[1].interval_seconds

    def explained(self, session: Session, run: Run) -> tuple[Measured, Recommendation]:
        """Worked out now, but for what the fleet went through."""
        return self._worked_out(session, run, self._read(session, run.project_id))

    def _worked_out(self, session: Session, run: Run, project: Others) -> tuple[Measured, Recommendation]:
        measured = read_measured(session, run, project, self._kept(session, None))
        found = recommend(measured, bounds_of(self.settings))
        with self._lock:
            if len(self._intervals) >= _MOST_KEPT:
                self._intervals.clear()
            self._intervals[run.id] = (time.monotonic(), found.interval_seconds)
        return measured, found

    def _kept(self, session: Session, project_id: str | None) -> Others:
        with self._lock:
            known = self._others.get(project_id)
        if known is not None and time.monotonic() - known[0] < _OTHERS_SECONDS:
            return known[1]
        return self._read(session, project_id)

    def _read(self, session: Session, project_id: str | None) -> Others:
        others = read_others(session, project_id)
        with self._lock:
            if len(self._others) >= _MOST_KEPT:
                self._others.clear()
            self._others[project_id] = (time.monotonic(), others)
        return others


def bounds_of(settings: ServiceSettings) -> Bounds:
    return Bounds(
        default_seconds=settings.save_interval_seconds,
        shortest_seconds=min(settings.shortest_save_interval_seconds, settings.save_interval_seconds),
        longest_seconds=max(settings.longest_save_interval_seconds, settings.save_interval_seconds),
    )
