"""The trash: `delete` and `undelete` of projects and runs, `prune` and `undelete` of checkpoints."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from holdfast_client.cli.arguments import (
    DryRunOption,
    JsonOption,
    ProjectArgument,
    ReasonOption,
    RunArgument,
    SelectorArgument,
    YesOption,
    connect,
    exit_unless_meant,
    read_duration,
    read_run,
    read_selector,
    select,
)
from holdfast_client.cli.checkpoints import checkpoints, pinned_until
from holdfast_client.cli.output import as_bytes, as_time, show_json
from holdfast_client.cli.policies import show_pruned
from holdfast_client.cli.projects import projects
from holdfast_client.cli.runs import runs
from holdfast_client.cli.say import show_line
from holdfast_client.client import Client
from holdfast_client.errors import CheckpointProtected
from holdfast_protocol.base import RunName
from holdfast_protocol.pruning import (
    MAX_AT_ONCE,
    Deletion,
    FreedBytes,
    PruneCheckpoints,
    Pruned,
    PruneFilter,
    TakenBack,
)
from holdfast_protocol.states import Health
from holdfast_protocol.text import counted


@projects.command("delete")
def delete_project(
    project: ProjectArgument,
    *,
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Delete a project with all of its runs. They go to the trash first.

    A held, pinned or read checkpoint refuses it, and so does a run with an active attempt.
    """
    done = yes and not dry_run
    with connect() as client:
        found = [client.runs.delete(project, one.name, dry_run=True) for one in client.runs.all(project)]
        if done:
            _ask_for_project(client, project)
            found = [_as_seen(client, each, reason) for each in found]
            found.append(client.projects.delete(project, reason=reason, etag="*"))
    if json:
        show_json(found)
    else:
        show_what_goes(project, found, back=f"`holdfast projects undelete {project}`", done=done)
    exit_unless_meant("deleted", yes=yes, dry_run=dry_run)


@runs.command("delete")
def delete_run(
    run: RunArgument,
    *,
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Delete a whole run. It goes to the trash first.

    A held, pinned or read checkpoint refuses it, and so does an active attempt.
    """
    name = read_run(run)
    done = yes and not dry_run
    with connect() as client:
        found = client.runs.delete(name.project, name.run, dry_run=True)
        if done:
            found = _as_seen(client, found, reason)
    if json:
        show_json(found)
    else:
        show_what_goes(run, [found], back=f"`holdfast runs undelete {run}`", done=done)
    exit_unless_meant("deleted", yes=yes, dry_run=dry_run)


def _ask_for_project(client: Client, project: str) -> None:
    """Whether this token may delete it at all, before any of its runs goes. Existing runs are no obstacle yet."""
    with suppress(CheckpointProtected):
        client.projects.delete(project, dry_run=True)


def _as_seen(client: Client, shown: Deletion, reason: str) -> Deletion:
    """Deletes what the dry run has shown, and nothing that came in between."""
    assert shown.run is not None
    return client.runs.delete(shown.project, shown.run, reason=reason, etag=shown.etag)


def show_what_goes(target: str, found: list[Deletion], *, back: str, done: bool) -> None:
    for each in found:
        if each.run is not None:
            size = f"{counted(each.checkpoints, 'checkpoint')}, {as_bytes(each.logical_bytes)} of state"
            show_line(f"{each.project}/{each.run}: {size}, {as_bytes(each.freed.bytes)} in the stores")
    if not done and len(found) > 1:
        # Each was asked about while the others are there; when they go one after the other, the last counts it.
        show_line("What only these runs share is freed, too, and is in none of these figures.")
    until = min((each.in_trash.purge_at for each in found if each.in_trash is not None), default=None)
    taken_back = "" if until is None else f" {back} takes it back until {as_time(until)} UTC."
    show_line(f"{target} {'is' if done else 'would be'} deleted.{taken_back}")


@projects.command("undelete")
def undelete_project(project: ProjectArgument, json: JsonOption = False) -> None:
    """Take a deleted project back, with its deleted runs."""
    with connect() as client:
        back = [client.projects.undelete(project)]
        back += [client.runs.undelete(project, one.name) for one in client.runs.all(project, deleted=True)]
    if json:
        show_json(back)
        return
    for each in back:
        _show_taken_back(each)


@runs.command("undelete")
def undelete_run(run: RunArgument, json: JsonOption = False) -> None:
    """Take a deleted run back until its purge begins."""
    name = read_run(run)
    with connect() as client:
        back = client.runs.undelete(name.project, name.run)
    if json:
        show_json(back)
    else:
        _show_taken_back(back)


def _show_taken_back(each: TakenBack) -> None:
    if each.run is None:
        show_line(f"{each.project} is back.")
        return
    gone = f", {each.purged} are purged" if each.purged else ""
    show_line(f"{each.project}/{each.run} is back: {counted(each.checkpoints, 'checkpoint')}{gone}.")


@checkpoints.command()
def prune(
    selector: SelectorArgument,
    *,
    before_step: Annotated[int | None, typer.Option(min=0, help="Steps below this one.")] = None,
    from_step: Annotated[int | None, typer.Option(min=0, help="Steps from this one on.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="With this label; several mean any of them.")] = None,
    health: Annotated[list[Health] | None, typer.Option(help="Of this health; several mean any of them.")] = None,
    older_than: Annotated[str | None, typer.Option(help="Committed longer ago than this, such as 12h or 30d.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Of this attempt.")] = None,
    all_of_run: Annotated[
        bool, typer.Option("--all-of-run", help="Also the last healthy points, of a run that has ended.")
    ] = False,
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Delete one checkpoint, or those that meet every condition.

    They go to the trash first.
    Held, pinned and read checkpoints stay, and so do the restore point, the two newest healthy points
    and the two newest that are proven.
    """
    wanted = PruneFilter(
        before_step=before_step,
        from_step=from_step,
        labels=label or [],
        health=health or [],
        older_than_seconds=None if older_than is None else read_duration(older_than),
        attempt=attempt,
    )
    filtered = wanted != PruneFilter()
    with connect() as client:
        name, request = _what(client, selector, wanted if filtered or all_of_run else None)
        request = request.model_copy(update={"reason": reason, "all_of_run": all_of_run})
        results = [client.retention.prune(name.project, name.run, request.model_copy(update={"dry_run": True}))]
        if yes and not dry_run:
            results = _delete(client, name, request, results[0])
    if json:
        show_json(results)
    else:
        show_pruned(results, nothing=f"{name} has nothing of that to delete.")
    if results[0].trashed:
        exit_unless_meant("deleted", yes=yes, dry_run=dry_run)


@checkpoints.command("undelete")
def undelete_checkpoint(
    selector: SelectorArgument,
    *,
    pin: Annotated[
        bool | None,
        typer.Option(help="Keep it from expiring again. Left out: for a while, if a policy had expired it."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Take a deleted checkpoint back until its purge begins."""
    with connect() as client:
        found = select(client, selector)
        view = client.checkpoints.undelete(found.id, pin=pin)
    if json:
        show_json(view)
        return
    pinned = "" if view.pinned_at is None else f", pinned{pinned_until(view)}"
    show_line(f"{view.project}/{view.run}@{view.step}#{view.attempt} is {view.state}{pinned}.")


def _what(client: Client, selector: str, wanted: PruneFilter | None) -> tuple[RunName, PruneCheckpoints]:
    """One checkpoint by its name, or a filter over a run. A run without either is refused: it would be all of it."""
    name, point = read_selector(selector)
    if "@" in selector:
        if wanted is not None and wanted != PruneFilter():
            raise typer.BadParameter("A checkpoint that is named needs no conditions. Leave them out, or the @.")
        found = client.checkpoints.select(name.project, name.run, str(point))
        return name, PruneCheckpoints(checkpoint_ids=[found.id])
    if wanted is None:
        raise typer.BadParameter(
            f"Say which checkpoints of {name}: a condition such as --before-step 5000, a name such as {name}@1200, or "
            "--all-of-run."
        )
    return name, PruneCheckpoints(filter=wanted)


def _delete(client: Client, name: RunName, request: PruneCheckpoints, shown: Pruned) -> list[Pruned]:
    """Deletes the checkpoints that were shown, and none that came in between; in portions."""
    if request.filter is None:
        return [client.retention.prune(name.project, name.run, request)]
    ids = [one.checkpoint_id for one in shown.trashed]
    results = [
        client.retention.prune(
            name.project,
            name.run,
            request.model_copy(update={"checkpoint_ids": ids[start : start + MAX_AT_ONCE]}),
        )
        for start in range(0, len(ids), MAX_AT_ONCE)
    ]
    return [*results, shown.model_copy(update={"trashed": [], "dry_run": False, "freed": FreedBytes(bytes=0)})]
