"""`holdfast prune` deletes, `holdfast trash list | restore` takes back, `holdfast pin | unpin` keeps."""

from __future__ import annotations

from typing import Annotated

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
from holdfast_client.cli.output import NOTHING, ExitCode, as_bytes, as_time, show_json, show_table
from holdfast_client.cli.policies import read_target
from holdfast_client.cli.retention import show_pruned
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.client import Client
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.pruning import MAX_AT_ONCE, FreedBytes, PruneCheckpoints, Pruned, PruneFilter
from holdfast_protocol.runs import RunName
from holdfast_protocol.states import CheckpointState, Health
from holdfast_protocol.text import counted


def register(app: typer.Typer) -> None:
    app.command("prune")(prune)
    group = typer.Typer(help="What was deleted and can be taken back.", no_args_is_help=True, rich_markup_mode=None)
    group.command("list")(list_trash)
    group.command("restore")(restore)
    app.add_typer(group, name="trash")
    app.command("pin")(pin)
    app.command("unpin")(unpin)


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
    reason: Annotated[str, typer.Option(help="For those who look for it later.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it, only say what would go.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete one checkpoint by its name, or those of a run that meet every condition. They go to the trash first.

    What is held, pinned or being read stays, and so do the restore point, the two newest healthy points
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
    if not (yes or dry_run) and results[0].trashed:
        show_note("Nothing was deleted. Say --yes if you mean it.")
        raise typer.Exit(ExitCode.USAGE)


def list_trash(
    target: Annotated[str, typer.Argument(metavar="PROJECT[/RUN]", help="A run, or a project for all its runs.")],
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """List what is in the trash, and until when it can be taken back."""
    with connect() as client:
        if "/" in target:
            names = iter([read_run(target)])
        else:
            names = (RunName(run.project, run.name) for run in client.runs.all(target))
        found = first(
            (
                one
                for name in names
                for one in client.checkpoints.all(name.project, name.run, state=CheckpointState.TRASHED)
            ),
            limit,
        )
    if json:
        show_json(found)
        return
    show_table(
        ["run", ">step", ">attempt", ">size", "until (UTC)", "by", "why"],
        (
            (
                f"{one.project}/{one.run}",
                str(one.step),
                str(one.attempt),
                as_bytes(one.logical_bytes),
                as_time(one.purge_at),
                one.trashed_by or NOTHING,
                one.trash_reason or NOTHING,
            )
            for one in found
        ),
        nothing="The trash is empty.",
    )


def restore(
    selector: Annotated[
        str,
        typer.Argument(metavar="PROJECT[/RUN[@WHICH]]", help="A checkpoint; or a run or project that was deleted."),
    ],
    *,
    pin: Annotated[
        bool | None,
        typer.Option(help="Keep it from expiring again. Left out: for a while, if a policy had expired it."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Take a checkpoint, a deleted run or a deleted project back, as long as its purge has not begun."""
    if "@" not in selector:
        _restore_all(selector, json=json)
        return
    name, point = read_selector(selector)
    with connect() as client:
        found = client.checkpoints.select(name.project, name.run, str(point))
        view = client.checkpoints.undelete(found.id, pin=pin)
    if json:
        show_json(view)
        return
    pinned = "" if view.pinned_at is None else f", pinned{_until(view)}"
    show_line(f"{name} step {view.step} of attempt {view.attempt} is {view.state}{pinned}.")


def _restore_all(target: str, *, json: bool) -> None:
    """Of a project first itself, and then each of its runs that is in the trash."""
    project, run = read_target(target)
    with connect() as client:
        if run is not None:
            back = [client.runs.undelete(project, run)]
        else:
            back = [client.projects.undelete(project)]
            back += [client.runs.undelete(project, one.name) for one in client.runs.all(project, deleted=True)]
    if json:
        show_json(back)
        return
    for each in back:
        name = each.project if each.run is None else f"{each.project}/{each.run}"
        gone = f", {each.purged} are purged" if each.purged else ""
        show_line(f"{name} is back" + (f": {counted(each.checkpoints, 'checkpoint')}{gone}." if each.run else "."))


def pin(
    selector: SelectorArgument,
    reason: Annotated[str, typer.Option(help="For those who ask why it is still there.")],
    until: Annotated[str, typer.Option(help="For so long, such as 30d, or never to end.")] = "never",
    json: JsonOption = False,
) -> None:
    """Keep a checkpoint from every policy and from prune."""
    name, point = read_selector(selector)
    with connect() as client:
        found = client.checkpoints.select(name.project, name.run, str(point))
        view = client.checkpoints.pin(found.id, reason, expires_in_seconds=read_duration(until))
    if json:
        show_json(view)
        return
    show_line(f"{name} step {view.step} of attempt {view.attempt} is pinned{_until(view)}.")


def unpin(selector: SelectorArgument, json: JsonOption = False) -> None:
    """Take a checkpoint's pin away."""
    name, point = read_selector(selector)
    with connect() as client:
        found = client.checkpoints.select(name.project, name.run, str(point))
        view = client.checkpoints.unpin(found.id)
    if json:
        show_json(view)
        return
    show_line(f"{name} step {view.step} of attempt {view.attempt} is not pinned.")


def _what(client: Client, selector: str, wanted: PruneFilter | None) -> tuple[RunName, PruneCheckpoints]:
    """One checkpoint by its name, or a filter over a run; a run without either would be all of it, by mistake."""
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
    """What was shown, and nothing that came in between; in portions."""
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


def _until(view: CheckpointView) -> str:
    return "" if view.pinned_until is None else f" until {as_time(view.pinned_until)} UTC"
