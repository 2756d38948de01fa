"""Faults at random moments, each until every job that it hit has trained and committed beyond it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.chaos_run.faults import ALL, OF_AGENTS, Arena
from tests.chaos_run.job import Job

_LOOK_EVERY_SECONDS = 0.1
_WAIT_SECONDS = 400
"""Without a sign from a job for so long, while nothing is broken, it hangs. On an idle machine it takes some 8."""
_PAUSE_SECONDS = (0.0, 3.0)
_SHARE_TOGETHER = 0.4
"""Of the faults that the next one follows before they are fixed."""


@dataclass
class Happened:
    """One fault. `high_water`: the last step of each job that it hit, when it began; `mended_at`: when that job had
    committed a step beyond it, begun when the fault was over."""

    kind: str
    what: str
    at: float
    over_at: float
    high_water: dict[str, int]
    mended_at: dict[str, float] = field(default_factory=dict)
    hung: list[str] = field(default_factory=list)

    @property
    def is_mended(self) -> bool:
        return set(self.mended_at) == set(self.high_water)

    @property
    def seconds(self) -> float:
        """From its beginning until the last job was beyond it."""
        return max(self.mended_at.values()) - self.at


def let_things_fail(arena: Arena, *, seconds: float, kinds: Iterable[str] = ALL, least: int = 0) -> list[Happened]:
    """For so long, and until there were at least so many; returns when all are fixed, or a job hangs."""
    happened: list[Happened] = []
    bag: list[str] = []
    put_off: set[str] = set()
    _wait_until_committed(arena.jobs)
    began = time.monotonic()
    while time.monotonic() < began + seconds or len(happened) < least:
        arena.pause(*_PAUSE_SECONDS)
        # Each kind is as likely as any other, and in no order.
        if not bag:
            bag, put_off = arena.numbers.sample(sorted(kinds), k=len(set(kinds))), set()
        kind = bag.pop()
        one = _strike(arena, kind)
        if one is None:
            if kind not in put_off:
                bag.insert(0, kind)  # it could not be done now: once more after the others
                put_off.add(kind)
            continue
        happened.append(one)
        print(f"  {time.monotonic() - began:5.0f} s  {one.kind}: {one.what}", flush=True)
        if arena.numbers.random() < _SHARE_TOGETHER and _unmended(arena.jobs, happened) < 2:
            continue
        if not _wait_until_mended(arena.jobs, happened):
            return happened
    _wait_until_mended(arena.jobs, happened)
    return happened


def _strike(arena: Arena, kind: str) -> Happened | None:
    before = {job.name: job.last_step() for job in arena.jobs}
    at = time.monotonic()
    strike = (ALL | OF_AGENTS)[kind](arena, kind)
    if strike is None:
        return None
    names = {job.name for job in strike.jobs}
    return Happened(kind, strike.what, at, time.monotonic(), {name: before[name] for name in sorted(names)})


def _wait_until_committed(jobs: list[Job]) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not all(each.told for job in jobs for each in job.launches()[-1:]) or not all(j.launches() for j in jobs):
        if time.monotonic() > deadline:
            raise RuntimeError("no first checkpoint:\n" + "\n".join(job.dump_stacks() for job in jobs))
        time.sleep(_LOOK_EVERY_SECONDS)


def _unmended(jobs: list[Job], happened: list[Happened]) -> int:
    for one in happened:
        if not one.is_mended:
            _look(jobs, one)
    return sum(not one.is_mended for one in happened)


def _look(jobs: list[Job], one: Happened) -> None:
    for job in jobs:
        if job.name in one.high_water and job.name not in one.mended_at:
            beyond = (
                told.at
                for each in job.launches()
                for told in each.told
                if told.at > one.over_at and told.step > one.high_water[job.name]
            )
            first = min(beyond, default=None)
            if first is not None:
                one.mended_at[job.name] = first


def _wait_until_mended(jobs: list[Job], happened: list[Happened]) -> bool:
    """False where a job gives no sign any more, or trains and never commits: its stacks are in its log then."""
    began = time.monotonic()
    while _unmended(jobs, happened):
        for job in jobs:
            if time.monotonic() - began > _WAIT_SECONDS:
                for one in happened:
                    if job.name in one.high_water and job.name not in one.mended_at:
                        one.hung.append(job.name)
                        job.dump_stacks()
        if any(one.hung for one in happened):
            return False
        time.sleep(_LOOK_EVERY_SECONDS)
    return True
