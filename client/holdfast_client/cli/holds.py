"""`holdfast hold place | list | extend | release`: what nobody may take away."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from holdfast_client.cli.arguments import JsonOption, LimitOption, SelectorArgument, first, read_run, read_selector
from holdfast_client.cli.connect import connect
from holdfast_client.cli.say import show_line
from holdfast_client.cli.show import NOTHING, as_time, show_json, show_table
from holdfast_client.cli.tokens import read_duration
from holdfast_protocol.holds import ExtendHold, HoldView, PlaceHold, ReleaseHold

HoldArgument = Annotated[str, typer.Argument(metavar="HOLD", help="Its id, from `holdfast hold list`.")]
UntilOption = Annotated[str, typer.Option(help="A time (2027-01-31, 2027-01-31T12:00) in UTC, or from now: 90d, 4w.")]
ReasonOption = Annotated[str, typer.Option(help="Others read it.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Keep a checkpoint from being taken away by anybody.", no_args_is_help=True, rich_markup_mode=None
    )
    group.command("place")(place)
    group.command("list")(list_holds)
    group.command("extend")(extend)
    group.command("release")(release)
    app.add_typer(group, name="hold")


def place(
    selector: SelectorArgument,
    *,
    reason: ReasonOption,
    until: Annotated[
        str | None, typer.Option(help="In force until then, instead of until it is released: 2027-01-31, 90d.")
    ] = None,
    mirror: Annotated[bool, typer.Option("--mirror", help="Also by the store's Object Lock (S3).")] = False,
    json: JsonOption = False,
) -> None:
    """Hold a checkpoint: until another token releases it, or until a time."""
    name, point = read_selector(selector)
    request = PlaceHold(reason=reason, retain_until=None if until is None else read_moment(until), mirror=mirror)
    with connect() as client:
        found = client.selected_checkpoint(name.project, name.run, str(point))
        hold = client.place_hold(found.id, request)
    if json:
        show_json(hold)
    else:
        show_line(f"{hold.id}: {_what(hold)} is held {_until(hold)}.")


def list_holds(
    what: Annotated[
        str | None, typer.Argument(metavar="[PROJECT[/RUN[@WHICH]]]", help="Only of this project, run or checkpoint.")
    ] = None,
    *,
    over: Annotated[bool, typer.Option("--all", help="Also holds that are released or have ended.")] = False,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """List the holds that are in force."""
    with connect() as client:
        if what is not None and "@" in what:
            name, point = read_selector(what)
            found = client.selected_checkpoint(name.project, name.run, str(point))
            holds = first(client.all_holds_on(found.id, over=over), limit)
        elif what is not None and "/" in what:
            name = read_run(what)
            holds = first(client.all_holds(project=name.project, run=name.run, over=over), limit)
        else:
            holds = first(client.all_holds(project=what, over=over), limit)
    if json:
        show_json(holds)
        return
    mirrored = any(one.mirror for one in holds)
    show_table(
        ["hold", "checkpoint", "in force (UTC)", "by", "why", *(["in the store"] if mirrored else [])],
        (
            (one.id, _what(one), _until(one), one.placed_by, one.reason, *([_mirrored(one)] if mirrored else []))
            for one in holds
        ),
        nothing="There are no such holds.",
    )


def extend(hold: HoldArgument, until: UntilOption, json: JsonOption = False) -> None:
    """Move the end of a hold further away."""
    with connect() as client:
        view = client.extend_hold(hold, ExtendHold(retain_until=read_moment(until)))
    if json:
        show_json(view)
    else:
        show_line(f"{view.id}: {_what(view)} is held {_until(view)}.")


def release(hold: HoldArgument, reason: ReasonOption, json: JsonOption = False) -> None:
    """Release a hold that somebody else has placed."""
    with connect() as client:
        view = client.release_hold(hold, ReleaseHold(reason=reason))
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


def read_moment(text: str) -> datetime:
    """`2027-01-31`, `2027-01-31T12:00` (UTC unless it says otherwise), or `90d` from now."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        seconds = read_duration(text)
        if seconds is None:
            raise typer.BadParameter(f"{text!r} is no time; leave the option out for no end.") from None
        return datetime.now(UTC) + timedelta(seconds=seconds)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
