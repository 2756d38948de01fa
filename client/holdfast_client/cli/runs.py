"""`holdfast runs [PROJECT]`: the runs, each with what could be restored now."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast_client.cli.arguments import JsonOption, LimitOption, first
from holdfast_client.cli.connect import connect
from holdfast_client.cli.deleting import show_deleted
from holdfast_client.cli.show import NOTHING, as_time, show_json, show_table
from holdfast_protocol.states import RunStatus


def register(app: typer.Typer) -> None:
    app.command("runs")(runs)


def runs(
    project: Annotated[str | None, typer.Argument(help="Only this project's.")] = None,
    *,
    status: Annotated[RunStatus | None, typer.Option(help="Only those that fare so.")] = None,
    deleted: Annotated[bool, typer.Option("--deleted", help="Only those in the trash.")] = False,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """List runs, how they fare, when their jobs were last heard of, and their newest restore point.

    A job is lost once it was not heard of for the service's HOLDFAST_LOST_AFTER_SECONDS.
    """
    with connect() as client:
        projects = iter([project]) if project is not None else (one.name for one in client.all_projects())
        found = first(
            (run for name in projects for run in client.all_runs(name, status=status, deleted=deleted)), limit
        )
    if json:
        show_json(found)
        return
    if deleted:
        show_deleted((f"{run.project}/{run.name}", run.in_trash) for run in found)
        return
    show_table(
        ["run", "status", "last heard (UTC)", ">attempts", ">saved", ">restore", "committed (UTC)"],
        (
            (
                f"{run.project}/{run.name}",
                run.status.value if run.status else NOTHING,
                as_time(run.last_heard_at),
                str(run.latest_attempt),
                str(run.committed_checkpoints),
                str(run.restore_point.step) if run.restore_point else NOTHING,
                as_time(run.restore_point.committed_at if run.restore_point else None),
            )
            for run in found
        ),
        nothing=f"No run is {status.value}."
        if status
        else "There are no runs yet. A training job makes one when it starts.",
    )
