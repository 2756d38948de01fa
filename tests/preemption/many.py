"""Launch after launch of one run: each resumes what the one before has saved, is told to leave, and is judged."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.runs import EditProject
from holdfast_protocol.states import CheckpointKind, CheckpointState
from tests.preemption.judge import Judged, Verdict, judge
from tests.preemption.launch import Launched, launch
from tests.preemption.plan import Kind, Plan, plan_of
from tests.support.serve import holdfast_serve

PROJECT, RUN = "preempted", "run"


@dataclass
class Outcome:
    verdicts: Counter[tuple[Kind, Verdict]] = field(default_factory=Counter)
    emergencies: int = 0
    """Checkpoints of that kind that are committed."""
    superseded: int = 0
    resumed: int = 0
    """Launches that went on with the very bits that the one before had after its last saved step."""
    handed: int = 0
    """Shards that the agents of the launches have taken."""
    left: int = 0
    """Of these, committed by the agent for a rank that had ended."""
    faults: list[str] = field(default_factory=list)


def preempt_many(
    folder: Path,
    times: int,
    seed: int,
    kinds: list[Kind] | None = None,
    grace_factor: float = 1.0,
    *,
    begins_with: str | None = None,
    agent_every: int = 0,
) -> Outcome:
    """`kinds`: of the launches, in turn; else as they are drawn. `grace_factor`: lengthens every deadline.
    `begins_with`: in place of each plan's own. `agent_every`: each launch is a `holdfast launch --agent`, or every
    second one, and so on; 0: none is."""
    outcome = Outcome()
    states: dict[int, str] = {}
    seeds = random.Random(seed)
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(holdfast_serve(folder))
        # Not below `folder`, whose path may be longer than a socket's can be.
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-preempt-")))
        settings = ClientSettings(
            url=service.environment["HOLDFAST_URL"], data_dir=Path(service.environment["HOLDFAST_DATA_DIR"])
        )
        with Client(settings) as client:
            client.projects.edit(PROJECT, EditProject())
            client.runs.create(PROJECT, RUN)
            for number in range(times):
                plan = _drawn(seeds, kinds[number % len(kinds)] if kinds else None)
                plan = replace(
                    plan,
                    grace_seconds=grace_factor * plan.grace_seconds,
                    begins_with=begins_with or plan.begins_with,
                )
                before = _newest(client)
                began = time.monotonic()
                of_launch = folder / f"launch-{number}"
                with_agent = agent_every > 0 and (number + 1) % agent_every == 0
                agent = sockets / "agent.sock" if with_agent else None
                launched = launch(f"{PROJECT}/{RUN}", plan, of_launch, service.environment, agent)
                outcome.handed += launched.handed
                if with_agent:
                    outcome.left += (of_launch / "launch.log").read_text().count("committed for a rank that is gone")
                after = list(client.checkpoints.all(PROJECT, RUN))
                judged = judge(plan, launched, before, after)
                problem = _resumed_wrongly(launched, before, states)
                if problem is None and states:
                    outcome.resumed += 1
                for line in (line for journal in launched.journals[:1] for line in journal if "step" in line):
                    states[line["step"]] = line["state"]
                _count(outcome, plan, judged, problem)
                print(
                    f"{number + 1:4d}  seed {plan.seed}  {plan.kind}: {judged.verdict}{problem or ''} "
                    f"({launched.seconds:.1f} of {plan.grace_seconds:.1f} s, {time.monotonic() - began:.1f} s in all)",
                    flush=True,
                )
            views = list(client.checkpoints.all(PROJECT, RUN))
    outcome.emergencies = sum(
        view.kind == CheckpointKind.EMERGENCY and view.state == CheckpointState.COMMITTED for view in views
    )
    outcome.superseded = sum("There was no time left" in (view.abort_reason or "") for view in views)
    return outcome


def table(outcome: Outcome) -> list[str]:
    lines = [
        f"{count:5d}  {kind}: {verdict}"
        for (kind, verdict), count in sorted(outcome.verdicts.items(), key=lambda item: (item[0][1], item[0][0]))
    ]
    lines += [
        f"{outcome.emergencies:5d}  emergency checkpoints committed",
        f"{outcome.superseded:5d}  saves given up for a newer state",
        f"{outcome.resumed:5d}  launches that resumed bit for bit",
    ]
    if outcome.handed:
        lines += [
            f"{outcome.handed:5d}  shards that agents have taken",
            f"{outcome.left:5d}  of these committed for a rank that had ended",
        ]
    return lines + [f"FAULT  {fault}" for fault in outcome.faults]


def _drawn(seeds: random.Random, kind: Kind | None) -> Plan:
    while True:
        plan = plan_of(seeds.randrange(2**31))
        if kind is None or plan.kind is kind:
            return plan


def _newest(client: Client) -> CheckpointView | None:
    committed = [view for view in client.checkpoints.all(PROJECT, RUN) if view.state == CheckpointState.COMMITTED]
    return max(committed, key=lambda view: view.step, default=None)


def _resumed_wrongly(launched: Launched, before: CheckpointView | None, states: dict[int, str]) -> str | None:
    for journal in launched.journals:
        for line in journal:
            if "start" in line:
                expected = 0 if before is None else before.step + 1
                if line["start"] != expected:
                    return f"resumed at {line['start']}, and not at {expected}"
                if before is not None and line["state"] != states[before.step]:
                    return f"what was restored of step {before.step} are other bits than were saved"
    return None


def _count(outcome: Outcome, plan: Plan, judged: Judged, problem: str | None) -> None:
    outcome.verdicts[plan.kind, judged.verdict] += 1
    for what in [judged.why] if judged.verdict is Verdict.FAILED else []:
        outcome.faults.append(f"seed {plan.seed} ({plan.kind}): {what}")
    if problem is not None:
        outcome.faults.append(f"seed {plan.seed} ({plan.kind}): {problem}")
