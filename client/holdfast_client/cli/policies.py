"""`holdfast policy` and `holdfast hold`: what a project or a run wants, and what nobody may take away."""

from __future__ import annotations

import json as json_module
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast_client.cli.arguments import (
    JsonOption,
    LimitOption,
    SelectorArgument,
    connect,
    first,
    read_duration,
    read_run,
    read_selector,
)
from holdfast_client.cli.output import NOTHING, ExitCode, as_time, show_facts, show_json, show_table
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.client import Client
from holdfast_client.errors import PolicyNotFound
from holdfast_protocol.policies import PolicyError, PolicyKind, PolicyView, read_policy
from holdfast_protocol.pruning import ExtendHold, HoldView, PlaceHold, ReleaseHold


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Policies of projects and runs.", no_args_is_help=True, rich_markup_mode=None)
    group.command("show")(show)
    group.command("put")(put)
    group.command("delete")(delete)
    app.add_typer(group, name="policy")
    group = typer.Typer(
        help="Keep a checkpoint from being taken away by anybody.", no_args_is_help=True, rich_markup_mode=None
    )
    group.command("place")(place)
    group.command("list")(list_holds)
    group.command("extend")(extend)
    group.command("release")(release)
    app.add_typer(group, name="hold")


# `holdfast policy show | put | delete KIND PROJECT[/RUN]`: what a project or a run wants of a controller.

TargetArgument = Annotated[
    str, typer.Argument(metavar="PROJECT[/RUN]", help="A run, or a project for all its runs without one of their own.")
]
KindArgument = Annotated[PolicyKind, typer.Argument(metavar="KIND", help="retention, copies or tiers.")]


def show(kind: KindArgument, target: TargetArgument, json: JsonOption = False) -> None:
    """Show the policy that holds, and where it comes from."""
    project, run = read_target(target)
    with connect() as client:
        view = client.policies.get(kind, project, run)
    show_policy(view, json=json)


def put(
    kind: KindArgument,
    target: TargetArgument,
    file: Annotated[str, typer.Option("--file", help="The policy as JSON; - reads stdin.")],
    json: JsonOption = False,
) -> None:
    """Put a policy in place of the target's own, if it has one."""
    project, run = read_target(target)
    document = read_document(file)
    checked_policy(kind, document)
    with connect() as client:
        view = put_own(client, kind, project, run, document)
    show_policy(view, json=json)


def delete(
    kind: KindArgument,
    target: TargetArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it, only say what would be deleted.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete the target's own policy. A run has its project's from then on."""
    project, run = read_target(target)
    with connect() as client:
        own = own_policy(client, kind, project, run)
        if own is None:
            raise PolicyNotFound(f"{target} has no {kind} policy of its own.")
        if yes:
            own = client.policies.delete(kind, project, run, etag=own.etag)
    show_policy(own, json=json)
    if not yes:
        show_note("Nothing was deleted. Say --yes if you mean it.")
        raise typer.Exit(ExitCode.USAGE)


def read_target(text: str) -> tuple[str, str | None]:
    """`demo` -> ("demo", None); `demo/gpt` -> ("demo", "gpt")."""
    if "/" not in text:
        return text, None
    name = read_run(text)
    return name.project, name.run


def own_policy(client: Client, kind: PolicyKind, project: str, run: str | None) -> PolicyView | None:
    """The target's own; None if it has none, whatever its project has."""
    try:
        view = client.policies.get(kind, project, run)
    except PolicyNotFound:
        return None
    return view if run is None or view.level == "run" else None


def put_own(client: Client, kind: PolicyKind, project: str, run: str | None, document: dict[str, Any]) -> PolicyView:
    own = own_policy(client, kind, project, run)
    return client.policies.put(kind, project, run, document, etag=None if own is None else own.etag)


def checked_policy(kind: PolicyKind, document: dict[str, Any]) -> None:
    """Says what is wrong before anything is sent."""
    try:
        read_policy(kind, document)
    except PolicyError as error:
        raise typer.BadParameter(str(error)) from None


def show_policy(view: PolicyView, *, json: bool) -> None:
    if json:
        show_json(view)
        return
    target = view.project if view.run is None else f"{view.project}/{view.run}"
    show_facts(
        [
            (f"{view.kind} policy", f"of {target}, version {view.version}"),
            ("put", f"{as_time(view.updated_at)} UTC by {view.updated_by}"),
            *((name, _shown(value)) for name, value in view.document.items()),
        ]
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(item) for item in value)
    if isinstance(value, dict):
        return " ".join(f"{name}={_shown(item)}" for name, item in value.items())
    return str(value)


def read_document(file: str) -> dict[str, Any]:
    text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    try:
        document = json_module.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{file} is not JSON: {error}.") from None
    if not isinstance(document, dict):
        raise typer.BadParameter(f"{file} must hold a JSON object.")
    return document


# `holdfast hold place | list | extend | release`: what nobody may take away.

HoldArgument = Annotated[str, typer.Argument(metavar="HOLD", help="Its id, from `holdfast hold list`.")]
UntilOption = Annotated[str, typer.Option(help="A time (2027-01-31, 2027-01-31T12:00) in UTC, or from now: 90d, 4w.")]
ReasonOption = Annotated[str, typer.Option(help="Others read it.")]


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
        found = client.checkpoints.select(name.project, name.run, str(point))
        hold = client.holds.place(found.id, request)
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
            found = client.checkpoints.select(name.project, name.run, str(point))
            holds = first(client.holds.all_on(found.id, over=over), limit)
        elif what is not None and "/" in what:
            name = read_run(what)
            holds = first(client.holds.all(project=name.project, run=name.run, over=over), limit)
        else:
            holds = first(client.holds.all(project=what, over=over), limit)
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
        view = client.holds.extend(hold, ExtendHold(retain_until=read_moment(until)))
    if json:
        show_json(view)
    else:
        show_line(f"{view.id}: {_what(view)} is held {_until(view)}.")


def release(hold: HoldArgument, reason: ReasonOption, json: JsonOption = False) -> None:
    """Release a hold that somebody else has placed."""
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
