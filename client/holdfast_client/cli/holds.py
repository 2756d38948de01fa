"""`holdfast holds`: which checkpoints no policy and no person may delete."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast_client.cli.arguments import (
    JsonOption,
    LimitOption,
    OnlyOf,
    ReasonOption,
    SelectorArgument,
    connect,
    first,
    read_moment,
    read_run,
    select,
)
from holdfast_client.cli.main import noun
from holdfast_client.cli.output import NOTHING, as_time, show_json, show_table
from holdfast_client.cli.say import show_line
from holdfast_protocol.pruning import ExtendHold, HoldView, PlaceHold, ReleaseHold

holds = noun("holds")

HoldArgument = Annotated[str, typer.Argument(metavar="HOLD", help="Its id, from `holdfast holds list`.")]
UntilOption = Annotated[str, typer.Option(help="A time (2027-01-31, 2027-01-31T12:00) in UTC, or from now: 90d, 4w.")]


@holds.command()
def create(
    selector: SelectorArgument,
    *,
    reason: ReasonOption,
    until: Annotated[
        str | None, typer.Option(help="In force until then, instead of until it is released: 2027-01-31, 90d.")
    ] = None,
    mirror: Annotated[bool, typer.Option("--mirror", help="Also by the store's Object Lock (S3).")] = False,
    json: JsonOption = False,
) -> None:
    """Hold a checkpoint until a time, or a release by another token."""
    request = PlaceHold(reason=reason, retain_until=None if until is None else read_moment(until), mirror=mirror)
    with connect() as client:
        found = select(client, selector)
        hold = client.holds.create(found.id, request)
    if json:
        show_json(hold)
    else:
        show_line(f"{hold.id}: {_what(hold)} is held {_until(hold)}.")


@holds.command("list")
def list_holds(
    what: OnlyOf = None,
    *,
    over: Annotated[bool, typer.Option("--all", help="Also holds that are released or have ended.")] = False,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """List the holds that are in force."""
    with connect() as client:
        if what is not None and "@" in what:
            found = first(client.holds.all_on(select(client, what).id, over=over), limit)
        elif what is not None and "/" in what:
            name = read_run(what)
            found = first(client.holds.all(project=name.project, run=name.run, over=over), limit)
        else:
            found = first(client.holds.all(project=what, over=over), limit)
    if json:
        show_json(found)
        return
    mirrored = any(one.mirror for one in found)
    show_table(
        ["hold", "checkpoint", "in force (UTC)", "by", "why", *(["in the store"] if mirrored else [])],
        (
            (one.id, _what(one), _until(one), one.placed_by, one.reason, *([_mirrored(one)] if mirrored else []))
            for one in found
        ),
        nothing="There are no such holds. `holdfast holds create` places one, and --all lists those that have ended.",
    )


@holds.command()
def extend(hold: HoldArgument, until: UntilOption, json: JsonOption = False) -> None:
    """Move the end of a hold further away."""
    with connect() as client:
        view = client.holds.extend(hold, ExtendHold(retain_until=read_moment(until)))
    if json:
        show_json(view)
    else:
        show_line(f"{view.id}: {_what(view)} is held {_until(view)}.")


@holds.command()
def release(hold: HoldArgument, reason: ReasonOption, json: JsonOption = False) -> None:
    """Release a hold that another token has placed."""
    with connect() as client:
        view = client.holds.release(hold, ReleaseHold(reason=reason))
    if json:
        show_json(view)
    else:
        show_line(f"{view.id} on {_what(view)} is released.")


def hold_in_words(hold: HoldView) -> str:
    return f"by {hold.placed_by} {_until(hold)}: {hold.reason}"


def _what(hold: HoldView) -> str:
    return f"{hold.project}/{hold.run}@{hold.step}#{hold.attempt}"


def _until(hold: HoldView) -> str:
    if hold.released_at is not None:
        return f"released {as_time(hold.released_at)} by {hold.released_by}"
    if hold.retain_until is None:
        return "until it is released"
    return f"until {as_time(hold.retain_until)}" if hold.in_force else f"ended {as_time(hold.retain_until)}"


def _mirrored(hold: HoldView) -> str:
    if not hold.mirror or not hold.in_force:
        return NOTHING
    return hold.mirror_error or ("locked" if hold.mirrored_at else "not yet locked")
