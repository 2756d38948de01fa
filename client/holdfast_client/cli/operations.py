"""`holdfast operations list | show | cancel | wait`, and how every command that starts one waits for it."""

from __future__ import annotations

import json as json_text
from typing import Annotated

import typer

from holdfast_client.cli.arguments import JsonOption, LimitedOption, first
from holdfast_client.cli.connect import connect
from holdfast_client.cli.exit_codes import ExitCode
from holdfast_client.cli.say import show_note
from holdfast_client.cli.show import NOTHING, as_time, show_facts, show_json, show_table
from holdfast_client.client import Client
from holdfast_protocol.operations import OperationView
from holdfast_protocol.states import OperationState

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="As `holdfast operations list` shows it.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Long work that somebody started: look, wait, cancel.", no_args_is_help=True, rich_markup_mode=None
    )
    group.command("list")(list_operations)
    group.command("show")(show)
    group.command("cancel")(cancel)
    group.command("wait")(wait)
    app.add_typer(group, name="operations")


def list_operations(
    project: Annotated[str | None, typer.Option(help="Only this project's.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only of this kind.")] = None,
    state: Annotated[OperationState | None, typer.Option(help="Only in this state.")] = None,
    limit: LimitedOption = 50,
    json: JsonOption = False,
) -> None:
    """List long operations, the newest first."""
    with connect() as client:
        found = first(client.all_operations(project=project, kind=kind, state=state), limit)
    if json:
        show_json(found)
        return
    show_table(
        ["id", "kind", "of", "state", "progress"],
        ((one.id, one.kind, _subject(one), one.state.value, _progress(one)) for one in found),
        nothing="There are no operations.",
    )


def show(operation_id: IdArgument, json: JsonOption = False) -> None:
    """Show one: how far it is, and what came of it."""
    with connect() as client:
        _show(client.operation(operation_id), json=json)


def cancel(operation_id: IdArgument, json: JsonOption = False) -> None:
    """Cancel one. What it has done by then stays done."""
    with connect() as client:
        _show(client.cancel_operation(operation_id), json=json)


def wait(operation_id: IdArgument, json: JsonOption = False) -> None:
    """Wait until it has ended. Exit code 1 if it failed or was cancelled."""
    with connect() as client:
        view = follow(client, client.operation(operation_id))
    _show(view, json=json)
    exit_unless_done(view)


def follow(client: Client, started: OperationView) -> OperationView:
    """Waits for one that a command has started, with its progress on stderr. Ctrl-C leaves it running."""
    said = ""

    def say(view: OperationView) -> None:
        nonlocal said
        text = f"{view.kind}: {view.state.value} {_progress(view)}"
        if text != said and not view.state.ended:
            show_note(text)
            said = text

    try:
        return client.wait_operation(started.id, on_view=say)
    except KeyboardInterrupt:
        show_note(f"holdfast: {started.id} goes on. `holdfast operations wait {started.id}` waits for it again.")
        raise


def exit_unless_done(view: OperationView) -> None:
    """Says why it did not come to its end, and ends the command with exit code 1."""
    if view.state is not OperationState.DONE:
        show_note(f"holdfast: {view.kind} {view.state.value}: {view.error}")
        raise typer.Exit(ExitCode.FAILED)


def _show(view: OperationView, *, json: bool) -> None:
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
