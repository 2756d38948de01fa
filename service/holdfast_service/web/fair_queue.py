"""Whose turn it is: a bounded number of calls is worked on at once, and the projects take turns. A token may call only
so often and so many times at once, a project only so often, and an address only so often with wrong tokens. Pure: no
clock, no waiting, no I/O; `web/admission.py` waits and has the lock.

Among the projects that wait it goes round, one call a turn. Within a project the classes have an order, and what waited
longest in its class is first. A project never has all places, so that another one's call finds one free at once, and
only an eighth of them while another one trains and the process is crowded: all threads of a process share one
interpreter, and each call that is worked on delays the others at every answer of the database.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from math import ceil, floor
from typing import Generic, TypeVar

from holdfast_service.auth.principal import Tries, keep_newest

Caller = TypeVar("Caller")


class CallClass(IntEnum):
    """In the order in which a project's calls are worked on. What is shed first is another matter: `SHARE`."""

    PROMISED = 0
    """Seals, heartbeats, and what ends something: never refused for load, because work was done for it already."""
    RESTORE = 1
    NEGOTIATE = 2
    BEGIN = 3
    OTHER = 4


SHARE = {
    CallClass.OTHER: 0.5,
    CallClass.BEGIN: 0.5,
    CallClass.NEGOTIATE: 0.75,
    CallClass.RESTORE: 1.0,
    CallClass.PROMISED: float("inf"),
}
"""A class is refused when so much of a limit is used. Begins go first: nothing was sent for them yet."""

LONGEST_WAIT_SECONDS = 20.0
"""A call is refused too if it would wait for its turn longer than its class's share of this. A client gives a call up
after 30 s and sends it again: in a storm of a thousand ranks the last begins would never be answered in time."""

SHARED_SECONDS = 60.0
"""A project whose training has called in this time shares the process with the others. A job that lives calls more
often: it has a heartbeat."""

PAUSE = 4.0
"""A project's calls of the last class pause so many times as long as one has taken, while calls of another project's
training are worked on: who lists without end has a fifth of the time of its places."""
LONGEST_PAUSE_SECONDS = 2.0

AGAIN_SECONDS = 0.1
"""While calls wait beside free places it is looked so often whether they may have them by now."""

_DEALT_EVERY = 8
"""Each so manieth turn of a project is dealt to the classes in rotation, so that none of them starves."""
_RETRY_SECONDS = (1, 30)


@dataclass(frozen=True)
class Limits:
    """`at_once`: calls that are worked on, of all projects. The others count calls that were let in and are not over:
    those of one project, and of all."""

    at_once: int
    project_requests: int
    requests: int

    @property
    def project_at_once(self) -> int:
        return max(1, self.at_once - 1)

    @property
    def shared_at_once(self) -> int:
        """Of one project, while another one trains and the process is crowded."""
        return max(1, self.at_once // 8)

    @property
    def other_at_once(self) -> int:
        """Of the last class, of all projects: a listing may take seconds."""
        return max(1, self.at_once // 2)


class Limit(StrEnum):
    """Why a call is refused, as metrics name it: a setting, or the time that it would wait."""

    PROJECT = "HOLDFAST_PROJECT_REQUESTS"
    PROJECT_RATE = "HOLDFAST_PROJECT_REQUESTS_PER_SECOND"
    SERVICE = "HOLDFAST_MOST_REQUESTS"
    WAIT = "wait"


@dataclass(frozen=True)
class Refusal:
    limit: Limit
    retry_after_seconds: int


@dataclass
class _Project(Generic[Caller]):
    call_seconds: float
    """How long its calls use a place, on the average: those of another project may take longer."""
    of_several: bool
    let_in: int = 0
    held: int = 0
    held_by_others: int = 0
    """Of the last class."""
    away: int = 0
    """Of those that are held: the call waits for a store, and uses nothing that others need."""
    turn: int = 0
    comes_again_at: float = 0.0
    """When the last one that was refused is to retry: each later one retries later."""
    waiting: dict[CallClass, dict[Caller, None]] = field(default_factory=lambda: {kind: {} for kind in CallClass})

    @property
    def waits(self) -> int:
        return sum(map(len, self.waiting.values()))

    def pick(self, *, training: bool, others: bool) -> CallClass | None:
        """The class whose turn it is. `others`: the last one may have it; `training`: all but the last."""
        waiting = [kind for kind, callers in self.waiting.items() if callers]
        can = [kind for kind in waiting if (others if kind is CallClass.OTHER else training)]
        if not can:
            return None
        self.turn += 1
        dealt, rest = divmod(self.turn, _DEALT_EVERY)
        wanted = CallClass(dealt % len(CallClass))
        return wanted if rest == 0 and wanted in can else can[0]


class FairQueue(Generic[Caller]):
    """A call is let in, takes its turn once or more often, and leaves. Not thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._projects: dict[str, _Project[Caller]] = {}
        self._waiting: OrderedDict[str, None] = OrderedDict()  # the one whose turn was longest ago first
        self._trained_at: OrderedDict[str, float] = OrderedDict()  # the one that called longest ago first
        self._lists_again_at: dict[str, float] = {}
        self._held_by_others = 0
        self._call_seconds = 0.02
        self.let_in_count = 0
        self.held = 0
        self.is_crowded = True
        """Whether calls wait for the interpreter. Whoever has a clock says so."""

    def let_in(
        self, project: str, kind: CallClass, now: float, *, is_known: bool = True, of_several: bool = False
    ) -> Refusal | None:
        """None: it counts from now on, until `leave`. `is_known`: the project is one, and not a name for callers whose
        project this process does not know. Those take no places from a project. `of_several`: that name may stand for
        calls of many projects, so they are not held to the share of one."""
        self._forget(now)
        known = self._projects.get(project)
        own, every = (0 if known is None else known.let_in), self.let_in_count
        if known is not None and own >= SHARE[kind] * self._limits.project_requests:
            return Refusal(Limit.PROJECT, self._comes_again(project, known, now))
        if known is not None and self._wait_seconds(project, known, kind) >= SHARE[kind] * LONGEST_WAIT_SECONDS:
            return Refusal(Limit.WAIT, self._comes_again(project, known, now))
        # Within its fair share of what is under way nobody is refused for what the others do.
        if known is not None and every >= SHARE[kind] * self._limits.requests and own * len(self._projects) >= every:
            return Refusal(Limit.SERVICE, self._comes_again(project, known, now))
        if known is None:
            known = self._projects[project] = _Project(self._call_seconds, of_several)
        known.let_in += 1
        self.let_in_count += 1
        if is_known and kind is not CallClass.OTHER:
            self._trained_at[project] = now
            self._trained_at.move_to_end(project)
        return None

    def leave(self, project: str) -> None:
        known = self._projects[project]
        known.let_in -= 1
        self.let_in_count -= 1
        if not known.let_in:
            del self._projects[project]

    def wait(self, project: str, kind: CallClass, caller: Caller) -> None:
        self._projects[project].waiting[kind][caller] = None
        self._waiting.setdefault(project)

    def stop_waiting(self, project: str, kind: CallClass, caller: Caller) -> None:
        known = self._projects[project]
        del known.waiting[kind][caller]
        if not known.waits:
            del self._waiting[project]

    def take(self, now: float) -> Caller | None:
        """The caller whose turn it is: it holds a place until `give_back`. None: nobody waits, or nobody may."""
        self._forget(now)
        if self.held >= self._limits.at_once:
            return None
        for project in self._waiting:
            known = self._projects[project]
            if known.held >= self._limits.project_at_once:
                continue
            used = known.held - known.away - known.held_by_others
            kind = known.pick(training=used < self.most_of(project), others=self.may_list(project, now))
            if kind is None:
                continue
            caller = next(iter(known.waiting[kind]))
            self._waiting.move_to_end(project)
            self.stop_waiting(project, kind, caller)
            self._hold(known, kind, 1)
            return caller
        return None

    def give_back(self, project: str, kind: CallClass, seconds: float, now: float) -> None:
        """`seconds`: how long the place was held, less the time away."""
        known = self._projects[project]
        self._hold(known, kind, -1)
        known.call_seconds += (seconds - known.call_seconds) / 16
        self._call_seconds += (seconds - self._call_seconds) / 16
        training_of_others = self.held - self._held_by_others - (known.held - known.held_by_others)
        if kind is CallClass.OTHER and training_of_others:
            self._lists_again_at[project] = now + min(PAUSE * seconds, LONGEST_PAUSE_SECONDS)

    def goes_away(self, project: str, kind: CallClass) -> None:
        """A call that holds a place begins to wait for a store."""
        self._projects[project].away += kind is not CallClass.OTHER

    def comes_back(self, project: str, kind: CallClass) -> None:
        """It goes on at once, though the project may have more places than its share for a moment."""
        self._projects[project].away -= kind is not CallClass.OTHER

    def most_of(self, project: str) -> int:
        """So many places the training of one project may have now, besides those of calls that wait for a store. Its
        lists have as many of their own."""
        is_one_of_several = self.is_crowded and self._shares(project)
        return self._limits.shared_at_once if is_one_of_several else self._limits.project_at_once

    def may_list(self, project: str, now: float) -> bool:
        """Whether a call of the last class may have a place."""
        if self._held_by_others >= self._limits.other_at_once or now < self._lists_again_at.get(project, now):
            return False
        return self._projects[project].held_by_others < self.most_of(project)

    def again_at(self, now: float) -> float | None:
        """When to `take` again, though no call ends until then: a pause ends, or the process is crowded no longer.
        None: nobody waits, or only the end of a call gives a place."""
        if not self._waiting or self.held >= self._limits.at_once:
            return None
        lists = (project for project in self._waiting if self._projects[project].waiting[CallClass.OTHER])
        pauses = (at for project in lists if (at := self._lists_again_at.get(project)) is not None)
        return min([now + AGAIN_SECONDS, *pauses])

    @property
    def training_waits(self) -> bool:
        """Calls wait, and not only those of people."""
        for project in self._waiting:
            waiting = self._projects[project].waiting
            if any(callers for kind, callers in waiting.items() if kind is not CallClass.OTHER):
                return True
        return False

    def _hold(self, known: _Project[Caller], kind: CallClass, more: int) -> None:
        known.held += more
        self.held += more
        if kind is CallClass.OTHER:
            known.held_by_others += more
            self._held_by_others += more

    def _shares(self, project: str) -> bool:
        """It is one project, and another one trains in this process."""
        known = self._projects.get(project)
        return not (known and known.of_several) and len(self._trained_at) > (project in self._trained_at)

    def _forget(self, now: float) -> None:
        while self._trained_at and next(iter(self._trained_at.values())) < now - SHARED_SECONDS:
            self._trained_at.popitem(last=False)
        for project in [project for project, at in self._lists_again_at.items() if at <= now]:
            del self._lists_again_at[project]

    def _wait_seconds(self, project: str, known: _Project[Caller], kind: CallClass) -> float:
        """Until the calls of this project that wait now have had their turn; other projects take theirs meanwhile."""
        waits = known.waits
        calls = sum(min(waits, self._projects[each].waits) for each in self._waiting) if waits else 0
        turns = max(waits / self.most_of(project), calls / self._limits.project_at_once)
        if kind is CallClass.OTHER and project in self._lists_again_at:
            turns = max(turns, len(known.waiting[kind]) * (1 + PAUSE) / self.most_of(project))
        return known.call_seconds * turns

    def _comes_again(self, project: str, known: _Project[Caller], now: float) -> int:
        """When the calls that are let in are over, and those that were refused before have retried. So they come one
        by one, and not all at once."""
        call_seconds = known.call_seconds / self.most_of(project)
        known.comes_again_at = max(known.comes_again_at, now + known.let_in * call_seconds) + call_seconds
        least, most = _RETRY_SECONDS
        return min(most, max(least, ceil(known.comes_again_at - now)))


_MOST_KEPT = 10_000


class TokenLimit(StrEnum):
    """Why a call is refused, as metrics name it: the setting, in whose place a token may have a limit of its own."""

    RATE = "HOLDFAST_TOKEN_REQUESTS_PER_SECOND"
    CONCURRENT = "HOLDFAST_TOKEN_REQUESTS"


@dataclass(frozen=True)
class TokenRefusal:
    limit: TokenLimit
    most: float
    retry_after_seconds: int


@dataclass
class Bucket:
    """Fills at `per_second` up to `size`; each call takes one."""

    per_second: float
    size: float
    level: float
    at: float
    comes_again_at: float = 0.0
    """When the last one that was refused is to retry: each later one retries later."""

    def take(self, now: float, kept: int = 0) -> int | None:
        """None: the call may be made. Else in how many seconds it is to be made again. `kept`: what is left for calls
        of other classes."""
        self.level = min(self.size, self.level + (now - self.at) * self.per_second)
        self.at = now
        if self.level >= 1 + kept:
            self.level -= 1
            return None
        least, most = _RETRY_SECONDS
        next_at = max(now + (1 + kept - self.level) / self.per_second, self.comes_again_at + 1 / self.per_second)
        self.comes_again_at = min(next_at, now + most)
        return max(least, ceil(self.comes_again_at - now))

    def kept_from(self, kind: CallClass) -> int:
        """So much of it this class leaves to those that are refused later."""
        return floor((1 - SHARE[kind]) * self.size)

    def change(self, per_second: float, size: float, now: float) -> None:
        """From now on it fills otherwise: the tokens of one identity may have come by several rules."""
        self.level = min(size, self.level + (now - self.at) * self.per_second)
        self.per_second, self.size, self.at = per_second, size, now

    def headers(self, kept: int = 0) -> tuple[tuple[bytes, bytes], ...]:
        """What a reply says of it: how many calls at once, how many are left, and in how many seconds it is full.
        `kept`: of it, for calls of other classes."""
        told = {
            b"ratelimit-limit": int(self.size) - kept,
            b"ratelimit-remaining": max(0, int(self.level) - kept),
            b"ratelimit-reset": ceil((self.size - self.level) / self.per_second),
        }
        return tuple((name, str(value).encode()) for name, value in told.items())


class Rates:
    """How often one token, one identity or one project may call, in one process. Seals, heartbeats and what ends
    something are neither counted nor refused: work was done for them already.

    Not thread-safe. `burst_seconds`: who was quiet may make as many calls at once as in so long."""

    def __init__(self, burst_seconds: float) -> None:
        self._burst_seconds = burst_seconds
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def bucket_of(self, counted_as: str, per_second: float, now: float) -> Bucket | None:
        """None: a rate of 0, which is no limit."""
        if not per_second:
            return None
        bucket = self._buckets.get(counted_as)
        size = max(1.0, per_second * self._burst_seconds)
        if bucket is not None and bucket.per_second != per_second:
            bucket.change(per_second, size, now)
        if bucket is None:
            bucket = self._buckets[counted_as] = Bucket(per_second, size, size, now)
        self._buckets.move_to_end(counted_as)
        if len(self._buckets) > _MOST_KEPT:
            self._buckets.popitem(last=False)
        return bucket


class TokenLimits(Rates):
    """And how many calls of one token, or one identity, may be under way."""

    def __init__(self, burst_seconds: float) -> None:
        super().__init__(burst_seconds)
        self._under_way: dict[str, int] = {}

    def let_in(self, counted_as: str, kind: CallClass, most: int) -> TokenRefusal | None:
        """None: the call counts from now on, until `leave`. As of a project, begins are refused first."""
        count = self._under_way.get(counted_as, 0)
        if count >= SHARE[kind] * most:
            return TokenRefusal(TokenLimit.CONCURRENT, most, _RETRY_SECONDS[0])
        self._under_way[counted_as] = count + 1
        return None

    def leave(self, counted_as: str) -> None:
        self._under_way[counted_as] -= 1
        if not self._under_way[counted_as]:
            del self._under_way[counted_as]


MOST_WRONG = 100
SECONDS_PER_WRONG = 0.125
"""A hundred ranks with an old token are all told so, and then eight a second."""
LONGEST_SHUT_SECONDS = 5.0
"""However many came at once, before the first of them was refused."""
SERVED_SECONDS = 3600.0


class WrongTokens:
    """Which addresses go on with wrong tokens. One that was served within the hour is not turned away: jobs and health
    checks call from there too. Not thread-safe."""

    def __init__(self) -> None:
        self._refused = Tries(MOST_WRONG, SECONDS_PER_WRONG)
        self._served: OrderedDict[str, float] = OrderedDict()

    def was_served(self, address: str, now: float) -> None:
        keep_newest(self._served, address, now)

    def was_refused(self, address: str, now: float) -> None:
        """A call from there, because too many before it had a wrong token."""
        if self._refused.wait_seconds(address, now) < LONGEST_SHUT_SECONDS:
            self._refused.count_failure(address, now)

    def turns_away(self, address: str, now: float) -> bool:
        """Whether a connection from there is one too many."""
        served_at = self._served.get(address)
        if served_at is not None and now - served_at < SERVED_SECONDS:
            return False
        return self._refused.wait_seconds(address, now) > 0
