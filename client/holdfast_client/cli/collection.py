"""`holdfast collect` and `holdfast sweep`: what nothing needs any more, and what no row of the catalog knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from holdfast_client.cli.arguments import JsonOption
from holdfast_client.cli.connect import connect
from holdfast_client.cli.operations import exit_unless_done, follow
from holdfast_client.cli.show import NOTHING, as_bytes, as_time, show_facts, show_json, show_table
from holdfast_protocol.collection import CollectionPlan, CollectionRound, StartSweep, StoreCollection, SweepReport
from holdfast_protocol.counted import counted
from holdfast_protocol.states import StoreRole

StoreOption = Annotated[StoreRole | None, typer.Option(help="Only this store; without it: every one.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only look.")]


def register(app: typer.Typer) -> None:
    app.command("collect")(collect)
    app.command("sweep")(sweep)


def collect(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go now, and what waits.")] = False,
    project: Annotated[str | None, typer.Option(help="With --dry-run: only this project's.")] = None,
    json: JsonOption = False,
) -> None:
    """Delete what nothing needs any more now, instead of in the next round."""
    if project is not None and not dry_run:
        raise typer.BadParameter("a round is of every project; --project goes with --dry-run.")
    with connect() as client:
        if dry_run:
            plan = client.plan_collection(project)
            show_json(plan) if json else _show_plan(plan)
            return
        view = follow(client, client.collect_now())
    exit_unless_done(view)
    done = CollectionRound.model_validate(view.result)
    if json:
        show_json(done)
        return
    show_facts(
        [
            ("deleted", f"{counted(done.deleted_copies, 'copy', 'copies')}, {as_bytes(done.deleted_bytes)}"),
            ("tried again", counted(done.kept_copies, "copy", "copies")),
            *(("problem", problem) for problem in done.problems),
        ]
    )


def sweep(
    store: StoreOption = None,
    dry_run: DryRunOption = False,
    force: Annotated[
        bool, typer.Option("--force", help="Delete also where that is more than the set share of a store.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --force: do not ask.")] = False,
    json: JsonOption = False,
) -> None:
    """Compare stores with the catalog: delete objects that no row knows, have missing ones read again."""
    if force and not dry_run and not yes:
        typer.confirm("Delete every old object that the catalog does not know, however many they are?", abort=True)
    with connect() as client:
        view = follow(client, client.sweep(StartSweep(store=store, dry_run=dry_run, force=force)))
    exit_unless_done(view)
    report = SweepReport.model_validate(view.result)
    if json:
        show_json(report)
    else:
        _show_sweep(report)
    if report.problems or any(one.stopped for one in report.stores):
        raise typer.Exit(1)


def _show_plan(plan: CollectionPlan) -> None:
    show_table(
        ["store", "what", ">copies", ">bytes", "until (UTC)"],
        (row for one in plan.stores for row in _rows(one)),
        nothing="There is no store.",
    )
    if problems := [(one.store.value, one.problem) for one in plan.stores if one.problem is not None]:
        show_facts((f"{store} store", f"nothing is deleted from it: {problem}") for store, problem in problems)


def _rows(one: StoreCollection) -> Iterable[tuple[str, ...]]:
    yield one.store.value, "would go now", str(one.copies), as_bytes(one.bytes), NOTHING
    for each in one.waiting:
        what = f"waits for {each.waits_for.value}"
        yield one.store.value, what, str(each.copies), as_bytes(each.bytes), as_time(each.until)


def _show_sweep(report: SweepReport) -> None:
    show_table(
        ["store", ">objects", ">orphans", ">bytes", ">old enough", ">deleted", ">missing"],
        (
            (
                one.store.value,
                str(sum(project.objects for project in one.projects)),
                str(one.orphans),
                as_bytes(one.orphan_bytes),
                str(one.due_orphans),
                f"{one.deleted} ({as_bytes(one.deleted_bytes)})",
                str(sum(project.missing for project in one.projects)),
            )
            for one in report.stores
        ),
        nothing="No store was swept.",
    )
    stopped = [("stopped", one.stopped) for one in report.stores if one.stopped is not None]
    if problems := [*stopped, *(("problem", problem) for problem in report.problems)]:
        show_facts(problems)
