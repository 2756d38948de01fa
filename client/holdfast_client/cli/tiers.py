"""`holdfast tiers plan` tells which chunks get cold when; `holdfast checkpoints thaw` makes a cold one readable."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast_client.cli.arguments import (
    JsonOption,
    RunArgument,
    SelectorArgument,
    WaitOption,
    connect,
    read_run,
    select,
)
from holdfast_client.cli.checkpoints import checkpoints
from holdfast_client.cli.main import noun
from holdfast_client.cli.output import NOTHING, as_bytes, as_time, show_facts, show_json, show_table
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.client import Client
from holdfast_protocol.text import counted
from holdfast_protocol.tiers import LONGEST_THAW_DAYS, ThawSpeed, ThawState, ThawView, TierPlan

tiers = noun("tiers")

_LOOK_SECONDS = 5.0


@checkpoints.command()
def thaw(
    selector: SelectorArgument,
    *,
    days: Annotated[int, typer.Option(min=1, max=LONGEST_THAW_DAYS, help="How long it can be read.")] = 3,
    speed: Annotated[ThawSpeed, typer.Option(help="The faster, the dearer.")] = ThawSpeed.STANDARD,
    status: Annotated[
        bool, typer.Option("--status", "--dry-run", help="Only tell how far it is, or what it would take and cost.")
    ] = False,
    wait: WaitOption = False,
    json: JsonOption = False,
) -> None:
    """Make a cold checkpoint readable for some days. It takes minutes to days; repeat it to prolong."""
    with connect() as client:
        checkpoint_id = select(client, selector).id
        view = (
            client.tiers.thaw_status(checkpoint_id)
            if status
            else client.tiers.thaw(checkpoint_id, days=days, speed=speed)
        )
        if wait:
            view = _until_thawed(client, view)
    if json:
        show_json(view)
    else:
        show_facts(_facts(view))


def _until_thawed(client: Client, view: ThawView) -> ThawView:
    told = -1
    while view.state is ThawState.THAWING:
        if view.readable_chunks != told:
            told = view.readable_chunks
            show_note(f"{told} of {counted(view.chunks, 'chunk')} can be read")
        time.sleep(_LOOK_SECONDS)
        view = client.tiers.thaw_status(view.checkpoint_id)
    return view


def _facts(view: ThawView) -> list[tuple[str, str]]:
    takes = ", ".join(
        f"{_span(seconds)} ({speed}, ${view.costs_dollars.get(speed, 0):.2f})"
        for speed, seconds in view.takes_seconds.items()
    )
    facts = [
        ("checkpoint", f"{view.project}/{view.run}@{view.step}#{view.attempt}"),
        ("tier", view.tier.value),
        ("thaw", view.state.value.replace("_", " ")),
        ("chunks", f"{view.readable_chunks} of {view.chunks} can be read, {view.thawing_chunks} being thawed"),
        ("cold", as_bytes(view.cold_bytes) if view.cold_bytes else ""),
        ("takes at most", takes if view.state is not ThawState.THAWED else ""),
        ("asked for", f"{as_time(view.requested_at)} UTC" if view.requested_at else ""),
        ("expected", f"{as_time(view.expected_at)} UTC" if view.expected_at else ""),
        ("readable until", f"{as_time(view.readable_until)} UTC at least" if view.readable_until else ""),
    ]
    return [(name, value) for name, value in facts if value]


@tiers.command()
def plan(run: RunArgument, json: JsonOption = False) -> None:
    """Tell what the policy would move when, and how many bytes. Nothing moves by it."""
    name = read_run(run)
    with connect() as client:
        found = client.tiers.plan(name.project, name.run)
    if json:
        show_json(found)
        return
    show_table(
        [">step", ">attempt", "tier", "goes to", "from (UTC)", ">bytes", "stays hot because"],
        (
            (
                str(row.step),
                str(row.attempt),
                row.tier.value,
                row.target or NOTHING,
                as_time(row.moves_at),
                as_bytes(row.moves_bytes) if row.target else NOTHING,
                row.stays or "",
            )
            for row in found.rows
        ),
        nothing=f"{name} has no committed checkpoints: there is nothing to move yet.",
    )
    _show_totals(found)


def _show_totals(found: TierPlan) -> None:
    for total in found.totals:
        terms = [f"{as_bytes(total.due_bytes)} now and {as_bytes(total.later_bytes)} later"]
        if total.minimum_days is not None:
            terms.append(f"paid for at least {counted(total.minimum_days, 'day')}")
        if total.takes_seconds:
            spans = ", ".join(f"{_span(seconds)} {speed}" for speed, seconds in total.takes_seconds.items())
            terms.append(f"to be thawed first ({spans})")
        if total.retrieval_dollars:
            terms.append(f"reading all of it costs ${total.retrieval_dollars:.2f} or more")
        show_line(f"to {total.target}: {'; '.join(terms)}")
    if found.kept_hot_by_others_bytes:
        show_line(f"kept hot by other runs: {as_bytes(found.kept_hot_by_others_bytes)}")
    if found.policy_level is None:
        show_line("There is no tiers policy: all of it stays hot. `holdfast policies put tiers` makes one.")


def _span(seconds: int) -> str:
    return f"{seconds // 3600} h" if seconds >= 3600 else f"{seconds // 60} min"
