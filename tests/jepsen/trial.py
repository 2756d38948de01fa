"""All of a trial together: the jobs, one fault after the other, the end of everything, and the judgement."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from holdfast_protocol.policies.policy import PolicyKind
from holdfast_service.service import close_service, open_service
from tests.jepsen.faults import ALL, FAILS_OVER, WITHOUT_AGENTS, Arena
from tests.jepsen.journal import Journal, Wrong
from tests.jepsen.judge import Judge
from tests.jepsen.keeper import ModelKeeper
from tests.jepsen.model import Model, Verdict
from tests.jepsen.place import KEEP_LAST, PROJECT, Place, new_place
from tests.soak.fleet import LONGEST_UPLOAD_SECONDS, TICKET_SECONDS

_RECOVERY_SECONDS = 300
"""A job that commits nothing for so long, while nothing is broken, does not come back. An idle machine takes 5."""
_QUIET_SECONDS = 300
"""Somebody's scrub of a whole run takes 5 on an idle machine; on a busy one it loses its lease and begins again."""
_LOOK_EVERY_SECONDS = 0.5
_PAUSE_SECONDS = (0.5, 2.5)
_SHARE_TOGETHER = 0.35
"""Of the faults that the next one follows before the jobs are back."""


@dataclass(frozen=True)
class Plan:
    """Faults of these kinds for `seconds`, and at least so many. `agents`: all jobs but the last one hand their saves
    to a node agent, and `kinds` may be OF_AGENTS too."""

    seconds: float
    seed: int
    kinds: Sequence[str] = WITHOUT_AGENTS
    least_faults: int = 0
    jobs: int = 4
    agents: bool = False


@dataclass
class Happened:
    kind: str
    what: str
    at: float
    over_at: float
    recovered_at: float | None = None

    @property
    def seconds(self) -> float | None:
        """Until every job has committed a save that it began behind the fault."""
        return None if self.recovered_at is None else self.recovered_at - self.at


@dataclass
class Outcome:
    happened: list[Happened] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    notes: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.verdict.findings


def run_trial(folder: Path, plan: Plan) -> Outcome:
    """Returns when everything is quiet and judged."""
    outcome = Outcome()
    with closing(Journal(folder)) as journal, new_place(folder, journal, with_agent=plan.agents) as place:
        keep_last = {}
        for number in range(plan.jobs):
            name = f"job-{number + 1}"
            if number % 2:
                keep_last[name] = KEEP_LAST
            with_agent = plan.agents and number < plan.jobs - 1
            place.add_job(name, plan.seed * 100 + number, retention=bool(number % 2), with_agent=with_agent)
        keeper = ModelKeeper(place.client, PROJECT, journal, plan.seed)
        keeper.start({PolicyKind.COPIES: {"every_steps": 2}})
        with _launcher(place):
            _let_things_fail(place, journal, plan, outcome)
            place.heal()
        keeper.stop()
        (folder / "stop").touch()
        for runner in place.runners:
            runner.end(90)
        if place.agent is not None:
            if not place.agent.process.runs:
                outcome.verdict.found(Wrong.STUCK, f"the agent has ended by itself; see {folder / 'agent.log'}")
            place.agent.process.stop()  # with what it still has
        print("  everything has ended; every byte is read", flush=True)
        _judge(place, Model(journal, keep_last), outcome)
        for what, times in journal.counts().items():
            outcome.verdict.count(what, times)
        outcome.notes += journal.faults()
    return outcome


class _launcher:
    """Starts whatever job has ended, until the block ends."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="launcher", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(_LOOK_EVERY_SECONDS):
            for runner in self._place.runners:
                runner.revive()


def _let_things_fail(place: Place, journal: Journal, plan: Plan, outcome: Outcome) -> None:
    numbers = random.Random(plan.seed)
    arena = Arena(place, journal, numbers)
    start = Happened("", "", time.monotonic(), time.monotonic())
    if not _wait_until_recovered(journal, place, [start]):
        raise RuntimeError("no first commits; see the folder's logs")
    began, bag = time.monotonic(), list[str]()
    while time.monotonic() < began + plan.seconds or len(outcome.happened) < plan.least_faults:
        arena.sleep(_PAUSE_SECONDS)
        bag = bag or numbers.sample(sorted(plan.kinds), k=len(plan.kinds))
        kind = bag.pop()
        if kind in FAILS_OVER:
            # What an operator does takes for granted that nothing else is broken.
            _wait_until_recovered(journal, place, outcome.happened)
        at = time.monotonic()
        what = ALL[kind](arena)
        outcome.happened.append(Happened(kind, what, at, time.monotonic()))
        print(f"  {time.monotonic() - began:5.0f} s  {kind}: {what}", flush=True)
        _revive_members(place)
        together = numbers.random() < _SHARE_TOGETHER and kind not in FAILS_OVER
        if not together and not _wait_until_recovered(journal, place, outcome.happened):
            break
    _wait_until_recovered(journal, place, outcome.happened)
    for one in outcome.happened:
        if one.recovered_at is None:
            outcome.verdict.found(Wrong.STUCK, f"{one.kind}: a job did not commit again in {_RECOVERY_SECONDS} s")


def _wait_until_recovered(journal: Journal, place: Place, happened: Sequence[Happened]) -> bool:
    """Whether every job has committed a save that it began when the last fault was over."""
    deadline = time.monotonic() + _RECOVERY_SECONDS
    while time.monotonic() < deadline:
        _revive_members(place)
        open_ones = [one for one in happened if one.recovered_at is None]
        lines = list(journal.lines("committed")) if open_ones else []
        for one in open_ones:
            first: dict[str, float] = {}
            for line in lines:
                if line["begun_at"] > one.over_at:
                    first[line["run"]] = min(line["at"], first.get(line["run"], line["at"]))
            if len(first) == len(place.runners):
                one.recovered_at = max(first.values())
        if all(one.recovered_at is not None for one in happened):
            return True
        time.sleep(_LOOK_EVERY_SECONDS)
    return False


def _revive_members(place: Place) -> None:
    """As systemd does: a process may end where its database is unavailable at its start."""
    for member in place.members:
        if not member.process.runs:
            member.process = member.start()


def _judge(place: Place, model: Model, outcome: Outcome) -> None:
    found_before = outcome.verdict.findings
    context = open_service(place.service_settings())
    try:
        time.sleep(TICKET_SECONDS + LONGEST_UPLOAD_SECONDS)
        for member in place.members:
            if not member.process.runs:
                found_before.append((Wrong.STUCK, f"{member.name} has ended by itself, with nothing in its way"))
        outcome.verdict = Judge(place.client, context, model).judge(_QUIET_SECONDS)
        outcome.verdict.findings += found_before
        outcome.verdict.count("commits told to the jobs", len(model.commits))
        outcome.notes += model.launches_with_one_fence()
        for controller in place.client.controllers.list():
            if controller.error is not None:
                outcome.notes.append(f"the last failure of {controller.name}: {controller.error}")
    finally:
        close_service(context)
