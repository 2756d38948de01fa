"""`holdfast project list | create | set-quota`."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from holdfast_client.cli.arguments import JsonOption, LimitOption, first
from holdfast_client.cli.connect import connect
from holdfast_client.cli.deleting import show_deleted
from holdfast_client.cli.say import show_line
from holdfast_client.cli.show import as_bytes, show_json, show_table
from holdfast_client.errors import EditNeedsVersion
from holdfast_protocol.runs import EditProject, ProjectView

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", re.IGNORECASE)

ProjectArgument = Annotated[str, typer.Argument(metavar="PROJECT")]
QUOTA_HELP = "Bytes in the store, such as 500GB or 2TiB, or `none`."


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="List and make projects, set their quota.", no_args_is_help=True, rich_markup_mode=None)
    group.command("list")(list_projects)
    group.command("create")(create)
    group.command("set-quota")(set_quota)
    app.add_typer(group, name="project")


def list_projects(
    *,
    deleted: Annotated[bool, typer.Option("--deleted", help="Only those in the trash.")] = False,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """List the projects and what they hold."""
    with connect() as client:
        found = first(client.all_projects(deleted=deleted), limit)
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
            view = client.edit_project(project, request)
        except EditNeedsVersion:
            view = client.edit_project(project, request, etag=client.project(project).etag)
    _show(view, json)


def set_quota(
    project: ProjectArgument, quota: Annotated[str, typer.Argument(help=QUOTA_HELP)], json: JsonOption = False
) -> None:
    """Set how much a project may store."""
    request = EditProject(quota_bytes=read_size(quota))
    with connect() as client:
        # A mistyped name must not make a project.
        view = client.edit_project(project, request, etag=client.project(project).etag)
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
