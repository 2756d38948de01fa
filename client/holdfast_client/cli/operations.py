"""Long operations, controllers and workers: the service's background work."""

from __future__ import annotations

import json as json_text
from typing import Annotated, Any

import typer

from holdfast_client.cli.arguments import (
    JsonOption,
    LimitedOption,
    LimitOption,
    OnlyProject,
    ReasonOption,
    WaitOption,
    connect,
    first,
    say_if_cut,
)
from holdfast_client.cli.main import noun
from holdfast_client.cli.output import NOTHING, ExitCode, as_time, show_facts, show_json, show_table
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.client import Client
from holdfast_protocol.service import ControllerView, OperationView
from holdfast_protocol.states import OperationState

operations = noun("operations")
controllers = noun("controllers")
workers = noun("workers")


IdArgument = Annotated[str, typer.Argument(metavar="ID", help="As `holdfast operations list` shows it.")]


@operations.command("list")
def list_operations(
    project: OnlyProject = None,
    *,
    kind: Annotated[str | None, typer.Option(help="Only of this kind.")] = None,
    state: Annotated[OperationState | None, typer.Option(help="Only in this state.")] = None,
    limit: LimitedOption = 50,
    json: JsonOption = False,
) -> None:
    """List long operations, the newest first."""
    with connect() as client:
        found = first(client.operations.all(project=project, kind=kind, state=state), limit)
    if json:
        show_json(found)
        return
    say_if_cut(found, limit)
    show_table(
        ["id", "kind", "of", "state", "progress"],
        ((one.id, one.kind, _subject(one), one.state.value, _progress(one)) for one in found),
        nothing="There are no such operations. `holdfast scrubs start` makes one, and so does any other `start`.",
    )


@operations.command("show")
def show_operation(operation_id: IdArgument, json: JsonOption = False) -> None:
    """Show one: how far it is, and what came of it."""
    with connect() as client:
        _show_operation(client.operations.get(operation_id), json=json)


@operations.command()
def cancel(operation_id: IdArgument, json: JsonOption = False) -> None:
    """Cancel one. Its finished steps stay done."""
    with connect() as client:
        _show_operation(client.operations.cancel(operation_id), json=json)


@operations.command()
def wait(operation_id: IdArgument, json: JsonOption = False) -> None:
    """Wait until it has ended. Exit code 1 if it failed or was cancelled."""
    with connect() as client:
        view = _follow(client, client.operations.get(operation_id))
    _show_operation(view, json=json)
    _exit_unless_done(view)


def run_to_end(client: Client, started: OperationView, *, wait: bool, json: bool) -> OperationView | None:
    """The operation that a command has started, once it is done; None if the user does not wait. `json` shows it."""
    if wait:
        started = _follow(client, started)
    if json:
        show_json(started)
    elif not wait:
        show_line(f"{started.id} is under way. `holdfast operations wait {started.id}` waits for it.")
    if not wait:
        return None
    _exit_unless_done(started)
    return started


def _follow(client: Client, started: OperationView) -> OperationView:
    """Waits for it, with its progress on stderr. Ctrl-C leaves it running."""
    said = ""

    def say(view: OperationView) -> None:
        nonlocal said
        text = f"{view.kind}: {view.state.value} {_progress(view)}"
        if text != said and not view.state.ended:
            show_note(text)
            said = text

    try:
        return client.operations.wait(started.id, on_view=say)
    except KeyboardInterrupt:
        show_note(f"holdfast: {started.id} goes on. `holdfast operations wait {started.id}` waits for it again.")
        raise


def _exit_unless_done(view: OperationView) -> None:
    """Prints why the operation did not finish, and ends the command with exit code 1."""
    if view.state is not OperationState.DONE:
        show_note(f"holdfast: {view.kind} {view.state.value}: {view.error}")
        raise typer.Exit(ExitCode.FAILED)


def _show_operation(view: OperationView, *, json: bool) -> None:
    if json:
        show_json(view)
        return
    facts = [
        ("operation", view.id),
        ("kind", view.kind),
        ("of", _subject(view)),
        ("state", view.state.value),
        ("progress", _progress(view)),
        ("started by", f"{view.created_by}, {as_time(view.created_at)} UTC"),
        ("began", as_time(view.started_at)),
        ("ended", as_time(view.ended_at)),
        ("tries", str(view.tries)),
    ]
    if view.cancel_requested_at is not None:
        facts.append(("cancelled", as_time(view.cancel_requested_at)))
    facts += [(name, json_text.dumps(value)) for name, value in {**view.arguments, **(view.result or {})}.items()]
    if view.error:
        facts.append(("reason", view.error))
    show_facts(facts)


def _subject(view: OperationView) -> str:
    if view.project is None:
        return NOTHING
    return view.checkpoint_id or (f"{view.project}/{view.run}" if view.run else view.project)


def _progress(view: OperationView) -> str:
    progress = view.progress
    parts = [] if progress.done is None else [f"{progress.done}/{'?' if progress.total is None else progress.total}"]
    return " ".join([*parts, *([progress.note] if progress.note else [])]) or NOTHING


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="As `holdfast controllers list` shows it.")]


@controllers.command("list")
def list_controllers(*, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List the controllers: what is due, lag, last failure."""
    with connect() as client:
        found = first(client.controllers.list(), limit)
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
        nothing="This service has no controllers. `holdfast workers list` shows which processes there are.",
    )


@controllers.command()
def show(name: NameArgument, json: JsonOption = False) -> None:
    """Show a controller: its work, its last pass and its last error."""
    with connect() as client:
        _show(client.controllers.get(name), json=json)


@controllers.command()
def pause(
    name: NameArgument,
    *,
    reason: ReasonOption,
    json: JsonOption = False,
) -> None:
    """Pause a controller in every process. A pass under way ends first."""
    with connect() as client:
        _show(client.controllers.pause(name, reason), json=json)


@controllers.command()
def resume(name: NameArgument, json: JsonOption = False) -> None:
    """Let a paused controller go on."""
    with connect() as client:
        _show(client.controllers.resume(name), json=json)


@controllers.command()
def run(
    name: NameArgument,
    wait: WaitOption = False,
    json: JsonOption = False,
) -> None:
    """Do a pass now, once, in one process."""
    with connect() as client:
        asked = client.controllers.run(name)
        view = client.controllers.wait(asked) if wait else asked
    if json or wait:
        _show(view, json=json)
    else:
        show_line(f"It is asked for. See `holdfast controllers show {name}`.")


@workers.command("list")
def list_workers(*, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List the processes that serve or do background work."""
    with connect() as client:
        found = first(client.controllers.workers(), limit)
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
        nothing="No process has reported. `holdfast serve` and `holdfast workers run` start one.",
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
        ("last pass", as_time(view.last_pass_at)),
    ]
    if view.report is not None:
        facts.append(("last work", f"{as_time(view.report_at)} UTC, {_seconds(view.pass_seconds)}"))
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
