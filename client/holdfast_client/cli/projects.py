"""`holdfast project`, `delete` and `token`: what there is, what goes as a whole, who may do what."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated

import typer

from holdfast_client.cli.arguments import JsonOption, LimitOption, connect, first, read_duration
from holdfast_client.cli.output import NOTHING, ExitCode, as_bytes, as_time, show_json, show_table
from holdfast_client.cli.policies import read_target
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.client import Client
from holdfast_client.errors import CheckpointProtected, EditNeedsVersion
from holdfast_protocol.pruning import Deletion, InTrash
from holdfast_protocol.runs import EditProject, ProjectView
from holdfast_protocol.service import CreateToken, TokenView
from holdfast_protocol.states import Scope
from holdfast_protocol.text import counted


def register(app: typer.Typer) -> None:
    app.command("delete")(delete)
    group = typer.Typer(help="List and make projects, set their quota.", no_args_is_help=True, rich_markup_mode=None)
    group.command("list")(list_projects)
    group.command("create")(create)
    group.command("set-quota")(set_quota)
    app.add_typer(group, name="project")
    group = typer.Typer(help="Make, list and revoke tokens.", no_args_is_help=True, rich_markup_mode=None)
    group.command("create")(create_token)
    group.command("list")(list_tokens)
    group.command("revoke")(revoke)
    app.add_typer(group, name="token")


# `holdfast delete PROJECT[/RUN]`: a whole run, or a project with all of its runs, goes to the trash.


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
        names = [run] if run is not None else [one.name for one in client.runs.all(project)]
        found = [client.runs.delete(project, name, dry_run=True) for name in names]
        done = yes and not dry_run
        if done and run is None:
            _ask_for_project(client, project)
        if done:
            found = [_as_seen(client, each, reason) for each in found]
            if run is None:
                found.append(client.projects.delete(project, reason=reason, etag="*"))
    if json:
        show_json(found)
    else:
        _show_what_goes(target, found, done=done)
    if not (yes or dry_run):
        show_note("Nothing was deleted. Say --yes if you mean it.")
        raise typer.Exit(ExitCode.USAGE)


def _ask_for_project(client: Client, project: str) -> None:
    """Whether this token may delete it at all, before any of its runs goes. That it has runs speaks not against it."""
    with suppress(CheckpointProtected):
        client.projects.delete(project, dry_run=True)


def _as_seen(client: Client, shown: Deletion, reason: str) -> Deletion:
    """What the dry run has shown, and nothing that came in between."""
    assert shown.run is not None
    return client.runs.delete(shown.project, shown.run, reason=reason, etag=shown.etag)


def _show_what_goes(target: str, found: list[Deletion], *, done: bool) -> None:
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


# `holdfast project list | create | set-quota`.

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", re.IGNORECASE)

ProjectArgument = Annotated[str, typer.Argument(metavar="PROJECT")]
QUOTA_HELP = "Bytes in the store, such as 500GB or 2TiB, or `none`."


def list_projects(
    *,
    deleted: Annotated[bool, typer.Option("--deleted", help="Only those in the trash.")] = False,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """List the projects and what they hold."""
    with connect() as client:
        found = first(client.projects.all(deleted=deleted), limit)
    if json:
        show_json(found)
        return
    if deleted:
        show_deleted((one.name, one.in_trash) for one in found)
        return
    show_table(
        ["project", ">runs", ">logical", ">stored", ">deduplicated", ">quota"],
        (
            (
                one.name,
                str(one.runs),
                as_bytes(one.logical_bytes),
                as_bytes(one.stored_bytes),
                as_bytes(one.deduplicated_bytes),
                _quota(one),
            )
            for one in found
        ),
        nothing="There are no projects yet. `holdfast project create NAME` makes one.",
    )


def create(
    project: ProjectArgument,
    quota: Annotated[str | None, typer.Option(help=QUOTA_HELP)] = None,
    json: JsonOption = False,
) -> None:
    """Make a project. One that is there keeps its quota, unless another is given."""
    request = EditProject() if quota is None else EditProject(quota_bytes=read_size(quota))
    with connect() as client:
        try:
            view = client.projects.edit(project, request)
        except EditNeedsVersion:
            view = client.projects.edit(project, request, etag=client.projects.get(project).etag)
    _show(view, json)


def set_quota(
    project: ProjectArgument, quota: Annotated[str, typer.Argument(help=QUOTA_HELP)], json: JsonOption = False
) -> None:
    """Set how much a project may store."""
    request = EditProject(quota_bytes=read_size(quota))
    with connect() as client:
        # A mistyped name must not make a project.
        view = client.projects.edit(project, request, etag=client.projects.get(project).etag)
    _show(view, json)


def _show(view: ProjectView, json: bool) -> None:
    if json:
        show_json(view)
    else:
        show_line(f"{view.name}: quota {_quota(view)}, stored {as_bytes(view.stored_bytes)}")


def _quota(project: ProjectView) -> str:
    return "none" if project.quota_bytes is None else as_bytes(project.quota_bytes)


def read_size(text: str) -> int | None:
    """`500GB`, `2 TiB`, `1048576` -> bytes; `none` -> None."""
    if text.strip().lower() == "none":
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 500GB, 2TiB or none.")
    return int(float(match[1]) * _UNITS[match[2].lower()])


# `holdfast token create | list | revoke`.


def create_token(
    name: Annotated[str, typer.Argument(help="What or who it is for.")],
    scope: Annotated[list[Scope], typer.Option(help="What it may do; give it several times. None implies another.")],
    project: Annotated[str | None, typer.Option(help="Only in this project; without it, in every one.")] = None,
    expires: Annotated[str, typer.Option(help="After this time, such as 12h, 90d or never.")] = "90d",
    json: JsonOption = False,
) -> None:
    """Make a token. It is shown once and kept nowhere."""
    request = CreateToken(name=name, project=project, scopes=scope, expires_in_seconds=read_duration(expires))
    with connect() as client:
        made = client.tokens.create(request)
    if json:
        show_json(made)
        return
    show_line(made.token)
    show_note(f"Token {made.id} ({_scopes(made)}), until {as_time(made.expires_at)}. It is not shown again.")


def list_tokens(*, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List the tokens, revoked ones too."""
    with connect() as client:
        found = first(client.tokens.all(), limit)
    if json:
        show_json(found)
        return
    show_table(
        ["id", "name", "project", "scopes", "ends (UTC)"],
        (
            (
                one.id,
                one.name,
                one.project or "(all)",
                _scopes(one),
                "revoked" if one.revoked_at else as_time(one.expires_at) if one.expires_at else NOTHING,
            )
            for one in found
        ),
        nothing="There are no tokens.",
    )


def revoke(token_id: Annotated[str, typer.Argument(metavar="ID")], json: JsonOption = False) -> None:
    """Revoke a token, at once and for good."""
    with connect() as client:
        view = client.tokens.revoke(token_id)
    if json:
        show_json(view)
    else:
        show_line(f"{view.id} ({view.name}) is revoked.")


def _scopes(token: TokenView) -> str:
    return " ".join(scope.value for scope in token.scopes)
