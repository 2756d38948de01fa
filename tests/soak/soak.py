"""All of a soak together. `run_soak` returns what it found; the table is for people."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_protocol.policies.policy import PolicyKind
from holdfast_protocol.runs import EditProject
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings
from tests.soak.fleet import LONGEST_UPLOAD_SECONDS, TICKET_SECONDS, Fleet, Member, new_fleet
from tests.soak.judge import Judge
from tests.soak.keeper import Keeper
from tests.soak.ledger import BY_AGENT, COMMITTED, Ledger

_POLICIES: dict[PolicyKind, dict[str, Any]] = {
    PolicyKind.RETENTION: {"keep_last": 4, "keep_best": [{"metric": "loss", "n": 2}]},
    PolicyKind.COPIES: {"every_steps": 2},
}
_QUIET_SECONDS = 120
_SLOWEST_SECONDS = 180
_SHARE_OF_NODES = 0.3
"""Of the agents that are killed: so many together with their jobs, as with a node."""


@dataclass(frozen=True)
class Plan:
    """`kills`: how many processes are killed meanwhile, at random moments. It goes on for `seconds`, and, on a machine
    that is busy with other things, until so many checkpoints were committed behind the last kill. `agents`: all writers
    but the last one hand their saves to so many, in turn; the others upload by themselves."""

    seconds: float
    kills: int
    least_checkpoints: int = 0
    workers: int = 3
    writers: int = 3
    readers: int = 2
    agents: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    did: Counter[str]
    killed: Counter[str]
    notes: list[str]
    faults: list[str]


def run_soak(folder: Path, plan: Plan) -> Outcome:
    """Returns when everything is quiet again and judged."""
    with closing(Ledger(folder)) as ledger, new_fleet(folder, seed=plan.seed) as fleet:
        fleet.add_service()
        with Client(_client_settings(fleet)) as client:
            client.projects.edit(fleet.project, EditProject())
            for number in range(plan.workers):
                fleet.add_worker(number + 1)
            for number in range(plan.agents):
                fleet.add_agent(number + 1)
            for number in range(plan.writers):
                with_agent = plan.agents and number < plan.writers - 1
                fleet.add_writer(f"run-{number + 1}", number % plan.agents + 1 if with_agent else None)
            for number in range(plan.readers):
                fleet.add_reader(number + 1)
            keeper = Keeper(client, fleet.project, ledger, plan.seed)
            keeper.start(_POLICIES)
            _kill_at_random(fleet, plan)
            _wait_for_work(fleet, ledger, plan)
            keeper.stop()
            fleet.end_clients(90)
            judge, faults = _judge(fleet, client, ledger)
        did, killed = ledger.counts() + judge.facts + fleet.finished_by_agents(), fleet.kills()
        return Outcome(did, killed, judge.notes, [*ledger.faults(), *fleet.faults, *faults])


def _kill_at_random(fleet: Fleet, plan: Plan) -> None:
    numbers = random.Random(plan.seed)
    began = time.monotonic()
    moments = sorted(numbers.uniform(0, plan.seconds) for _ in range(plan.kills))
    # Each kind is as likely as any other, or the one service would hardly ever be among them.
    kinds = ["service", "worker", "writer", "reader", *(["agent"] if plan.agents else [])]
    for number, moment in enumerate([*moments, plan.seconds]):
        while (left := began + moment - time.monotonic()) > 0:
            fleet.revive_the_ended()
            time.sleep(min(0.2, left))
        if number < plan.kills:
            victims = [numbers.choice(_of_kind(fleet, kinds[number % len(kinds)]))]
            if victims[0].kind == "agent" and numbers.random() < _SHARE_OF_NODES:
                victims += fleet.jobs_of(victims[0])
            for victim in victims:
                victim.kill9()
            for victim in victims:
                victim.process = victim.start()


def _wait_for_work(fleet: Fleet, ledger: Ledger, plan: Plan) -> None:
    """Of agents too, which are started last."""
    wanted = ledger.counts()[COMMITTED] + plan.least_checkpoints
    deadline = time.monotonic() + _SLOWEST_SECONDS
    while time.monotonic() < deadline:
        counts = ledger.counts()
        if counts[COMMITTED] >= wanted and (counts[BY_AGENT] or not plan.agents):
            break
        fleet.revive_the_ended()
        time.sleep(0.2)


def _of_kind(fleet: Fleet, kind: str) -> list[Member]:
    return [member for member in fleet.members if member.kind == kind]


def _judge(fleet: Fleet, client: Client, ledger: Ledger) -> tuple[Judge, list[str]]:
    context = open_service(_service_settings(fleet))
    try:
        judge = Judge(client, context, ledger)
        time.sleep(TICKET_SECONDS + LONGEST_UPLOAD_SECONDS)
        left = judge.wait_until_quiet(_QUIET_SECONDS)
        faults = [f"not at an end after {_QUIET_SECONDS} seconds of quiet: {what}" for what in left]
        return judge, faults + judge.faults()
    finally:
        close_service(context)


def _client_settings(fleet: Fleet) -> ClientSettings:
    return ClientSettings(
        url=fleet.url, token=SecretStr(fleet.environment["HOLDFAST_TOKEN"]), retry_seconds=60, direct_files=False
    )


def _service_settings(fleet: Fleet) -> ServiceSettings:
    """The fleet's own. A store's keys come from the environment, as ever."""
    prefix = "HOLDFAST_"
    os.environ.update({name: value for name, value in fleet.settings.items() if not name.startswith(prefix)})
    own = {
        name.removeprefix(prefix).lower(): value for name, value in fleet.settings.items() if name.startswith(prefix)
    }
    return ServiceSettings(**own)


def table(outcome: Outcome) -> Iterable[str]:
    """Lines of text."""
    rows = [
        *((what, f"{times:,}") for what, times in sorted(outcome.did.items())),
        *((f"killed: {kind}", f"{times:,}") for kind, times in sorted(outcome.killed.items())),
        ("faults", f"{len(outcome.faults):,}"),
    ]
    width = max(len(what) for what, _ in rows)
    yield from (f"{what:<{width}}  {times:>15}" for what, times in rows)
    yield from (f"NOTE   {note}" for note in outcome.notes)
    yield from (f"FAULT  {fault}" for fault in outcome.faults)
