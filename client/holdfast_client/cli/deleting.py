"""`holdfast delete PROJECT[/RUN]`: a whole run, or a project with all of its runs, goes to the trash."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated

import typer

from holdfast_client.cli.arguments import JsonOption
from holdfast_client.cli.connect import connect
from holdfast_client.cli.exit_codes import ExitCode
from holdfast_client.cli.policies import read_target
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.cli.show import NOTHING, as_bytes, as_time, show_json, show_table
from holdfast_client.client import Client
from holdfast_client.errors import CheckpointProtected
from holdfast_protocol.counted import counted
from holdfast_protocol.deletion import Deletion, InTrash


def register(app: typer.Typer) -> None:
    app.command("delete")(delete)


def delete(
    target: Annotated[str, typer.Argument(metavar="PROJECT[/RUN]", help="One run, or a project with all of its runs.")],
    *,
    reason: Annotated[str, typer.Option(help="For those who look for it later.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it, only say what would go.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete a whole run, or a project with all of its runs. They go to the trash first.

    What is held, pinned or being read refuses it, and so does a run with an active attempt.
    """
    project, run = read_target(target)
    with connect() as client:
        names = [run] if run is not None else [one.name for one in client.all_runs(project)]
        found = [client.delete_run(project, name, dry_run=True) for name in names]
        done = yes and not dry_run
        if done and run is None:
            _ask_for_project(client, project)
        if done:
            found = [_as_seen(client, each, reason) for each in found]
            if run is None:
                found.append(client.delete_project(project, reason=reason, etag="*"))
    if json:
        show_json(found)
    else:
        _show(target, found, done=done)
    if not (yes or dry_run):
        show_note("Nothing was deleted. Say --yes if you mean it.")
        raise typer.Exit(ExitCode.USAGE)


def _ask_for_project(client: Client, project: str) -> None:
    """Whether this token may delete it at all, before any of its runs goes. That it has runs speaks not against it."""
    with suppress(CheckpointProtected):
        client.delete_project(project, dry_run=True)


def _as_seen(client: Client, shown: Deletion, reason: str) -> Deletion:
    """What the dry run has shown, and nothing that came in between."""
    assert shown.run is not None
    return client.delete_run(shown.project, shown.run, reason=reason, etag=shown.etag)


def _show(target: str, found: list[Deletion], *, done: bool) -> None:
    for each in found:
        if each.run is not None:
            size = f"{counted(each.checkpoints, 'checkpoint')}, {as_bytes(each.logical_bytes)} of state"
            show_line(f"{each.project}/{each.run}: {size}, {as_bytes(each.freed.bytes)} in the stores")
    until = min((each.in_trash.purge_at for each in found if each.in_trash is not None), default=None)
    back = "" if until is None else f" `holdfast trash restore {target}` takes it back until {as_time(until)} UTC."
    show_line(f"{target} {'is' if done else 'would be'} deleted.{back}")


def show_deleted(found: Iterable[tuple[str, InTrash | None]]) -> None:
    """A table of what can be taken back."""
    show_table(
        ["deleted", "at (UTC)", "by", "why", "until (UTC)"],
        (
            (name, as_time(each.deleted_at), each.deleted_by, each.reason or NOTHING, as_time(each.purge_at))
            for name, each in found
            if each is not None
        ),
        nothing="Nothing of that is in the trash.",
    )
