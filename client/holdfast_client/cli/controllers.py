"""`holdfast controllers [pause | resume | run]` and `holdfast workers`: the service's background work."""

from __future__ import annotations

import json as json_text
from typing import Annotated, Any

import typer

from holdfast_client.cli.arguments import JsonOption, LimitOption, first
from holdfast_client.cli.connect import connect
from holdfast_client.cli.say import show_line
from holdfast_client.cli.show import NOTHING, as_time, show_facts, show_json, show_table
from holdfast_protocol.controllers import ControllerView

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="As `holdfast controllers` shows it.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Background work: what is due, its lag, its last error; pause one, run one now.",
        invoke_without_command=True,
        rich_markup_mode=None,
    )
    group.callback()(controllers)
    group.command("show")(show)
    group.command("pause")(pause)
    group.command("resume")(resume)
    group.command("run")(run)
    app.add_typer(group, name="controllers")
    app.command("workers")(workers)


def controllers(context: typer.Context, *, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List the controllers; `show` tells all of one."""
    if context.invoked_subcommand is not None:
        return
    with connect() as client:
        found = first(client.controllers(), limit)
    if json:
        show_json(found)
        return
    show_table(
        ["controller", "state", ">due", ">leased", ">done", ">failed", ">lag", "last error (UTC)"],
        (
            (
                one.name,
                _state(one),
                _count(one.due),
                _count(one.leased),
                str(one.done),
                str(one.failed),
                _seconds(one.lag_seconds),
                as_time(one.error_at),
            )
            for one in found
        ),
        nothing="This service has no controllers.",
    )


def show(name: NameArgument, json: JsonOption = False) -> None:
    """Show a controller: its work, its last round and its last error."""
    with connect() as client:
        _show(client.controller(name), json=json)


def pause(
    name: NameArgument,
    reason: Annotated[str, typer.Option(help="For the people who find it paused.")],
    json: JsonOption = False,
) -> None:
    """Pause a controller in every process. A round under way ends first."""
    with connect() as client:
        _show(client.pause_controller(name, reason), json=json)


def resume(name: NameArgument, json: JsonOption = False) -> None:
    """Let a paused controller go on."""
    with connect() as client:
        _show(client.resume_controller(name), json=json)


def run(
    name: NameArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Until the round is over, and show what it did.")] = False,
    json: JsonOption = False,
) -> None:
    """Do a round now, once, in one process."""
    with connect() as client:
        asked = client.run_controller(name)
        view = client.wait_controller(asked) if wait else asked
    if json or wait:
        _show(view, json=json)
    else:
        show_line(f"It is asked for. See `holdfast controllers show {name}`.")


def workers(*, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List the processes that serve or do background work."""
    with connect() as client:
        found = first(client.workers(), limit)
    if json:
        show_json(found)
        return
    show_table(
        ["process", "kind", "version", "started (UTC)", "state", "stores", ">rows done"],
        (
            (
                one.id,
                one.kind,
                one.version,
                as_time(one.started_at),
                "silent" if one.silent else "alive",
                ", ".join(f"{role} {number}" for role, number in one.stores.items()),
                str(sum(one.done.values())),
            )
            for one in found
        ),
        nothing="No process says that it is there.",
    )


def _show(view: ControllerView, *, json: bool) -> None:
    if json:
        show_json(view)
        return
    facts = [("controller", view.name), ("state", _state(view))]
    if view.paused_at is not None:
        facts.append(("paused", f"{as_time(view.paused_at)} UTC by {view.paused_by}: {view.pause_reason}"))
    facts += [
        ("every", _seconds(view.interval_seconds)),
        ("due", f"{_count(view.due)}, the oldest for {_seconds(view.lag_seconds)}"),
        ("leased", _count(view.leased)),
        ("done", str(view.done)),
        ("failed", str(view.failed)),
        ("last round", as_time(view.last_round_at)),
    ]
    if view.report is not None:
        facts.append(("last work", f"{as_time(view.report_at)} UTC, {_seconds(view.round_seconds)}"))
        facts += [(f"  {name}", _plain(value)) for name, value in view.report.items() if value]
    if view.error is not None:
        facts.append(("last error", f"{as_time(view.error_at)} UTC: {view.error}"))
    show_facts(facts)


def _state(view: ControllerView) -> str:
    if view.paused_at is not None:
        return "paused"
    return "run asked for" if view.run_requested_at is not None else "active"


def _count(value: int | None) -> str:
    return NOTHING if value is None else str(value)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json_text.dumps(value, ensure_ascii=False)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
