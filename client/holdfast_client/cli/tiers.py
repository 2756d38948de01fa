"""`holdfast tiers` and `thaw`; `holdfast collect` and `sweep`: where the bytes are, and what nothing needs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated

import typer

from holdfast_client.cli.arguments import JsonOption, RunArgument, SelectorArgument, connect, read_run, read_selector
from holdfast_client.cli.operations import exit_unless_done, follow
from holdfast_client.cli.output import NOTHING, as_bytes, as_time, show_facts, show_json, show_table
from holdfast_client.cli.say import show_line
from holdfast_client.client import Client
from holdfast_protocol.states import StoreRole
from holdfast_protocol.stores import CollectionPass, CollectionPlan, StartSweep, StoreCollection, SweepReport
from holdfast_protocol.text import counted
from holdfast_protocol.tiers import LONGEST_THAW_DAYS, ThawSpeed, ThawState, ThawView, TierPlan


def register(app: typer.Typer) -> None:
    app.command("thaw")(thaw)
    group = typer.Typer(help="What gets cold when.", no_args_is_help=True, rich_markup_mode=None)
    group.callback()(_options)
    group.command("plan")(plan)
    app.add_typer(group, name="tiers")
    app.command("collect")(collect)
    app.command("sweep")(sweep)


# `holdfast thaw PROJECT/RUN@WHICH` makes a cold checkpoint readable; `holdfast tiers plan PROJECT/RUN` tells what gets
# cold when.

_LOOK_SECONDS = 5.0


def _options() -> None:
    """The policy itself: `holdfast policy show | put | delete tiers PROJECT[/RUN]`."""


def thaw(
    selector: SelectorArgument,
    *,
    days: Annotated[int, typer.Option(min=1, max=LONGEST_THAW_DAYS, help="How long it can be read.")] = 3,
    speed: Annotated[ThawSpeed, typer.Option(help="The faster, the dearer.")] = ThawSpeed.STANDARD,
    status: Annotated[
        bool, typer.Option("--status", "--dry-run", help="Only tell how far it is, or what it would take and cost.")
    ] = False,
    wait: Annotated[bool, typer.Option(help="Wait until it can be read.")] = False,
    json: JsonOption = False,
) -> None:
    """Make a cold checkpoint readable for some days. It takes minutes to days; repeat it to prolong."""
    name, point = read_selector(selector)
    with connect() as client:
        checkpoint_id = client.checkpoints.select(name.project, name.run, str(point)).id
        view = (
            client.tiers.thaw_status(checkpoint_id)
            if status
            else client.tiers.thaw(checkpoint_id, days=days, speed=speed)
        )
        if wait:
            view = _until_thawed(client, view, quiet=json)
    if json:
        show_json(view)
    else:
        show_facts(_facts(view))


def _until_thawed(client: Client, view: ThawView, *, quiet: bool) -> ThawView:
    told = -1
    while view.state is ThawState.THAWING:
        if not quiet and view.readable_chunks != told:
            told = view.readable_chunks
            show_line(f"{told} of {counted(view.chunks, 'chunk')} can be read")
        time.sleep(_LOOK_SECONDS)
        view = client.tiers.thaw_status(view.checkpoint_id)
    return view


def _facts(view: ThawView) -> list[tuple[str, str]]:
    takes = ", ".join(
        f"{_span(seconds)} ({speed}, ${view.costs_dollars.get(speed, 0):.2f})"
        for speed, seconds in view.takes_seconds.items()
    )
    facts = [
        ("checkpoint", f"{view.project}/{view.run}@{view.step}#{view.attempt}"),
        ("tier", view.tier.value),
        ("thaw", view.state.value.replace("_", " ")),
        ("chunks", f"{view.readable_chunks} of {view.chunks} can be read, {view.thawing_chunks} being thawed"),
        ("cold", as_bytes(view.cold_bytes) if view.cold_bytes else ""),
        ("takes at most", takes if view.state is not ThawState.THAWED else ""),
        ("asked for", f"{as_time(view.requested_at)} UTC" if view.requested_at else ""),
        ("expected", f"{as_time(view.expected_at)} UTC" if view.expected_at else ""),
        ("readable until", f"{as_time(view.readable_until)} UTC at least" if view.readable_until else ""),
    ]
    return [(name, value) for name, value in facts if value]


def plan(run: RunArgument, json: JsonOption = False) -> None:
    """Tell what the policy would move when, and how many bytes. Nothing moves by it."""
    name = read_run(run)
    with connect() as client:
        found = client.tiers.plan(name.project, name.run)
    if json:
        show_json(found)
        return
    show_table(
        [">step", ">attempt", "tier", "goes to", "from (UTC)", ">bytes", "stays hot because"],
        (
            (
                str(row.step),
                str(row.attempt),
                row.tier.value,
                row.target or NOTHING,
                as_time(row.moves_at),
                as_bytes(row.moves_bytes) if row.target else NOTHING,
                row.stays or "",
            )
            for row in found.rows
        ),
        nothing=f"{name} has no committed checkpoints.",
    )
    _show_totals(found)


def _show_totals(found: TierPlan) -> None:
    for total in found.totals:
        terms = [f"{as_bytes(total.due_bytes)} now and {as_bytes(total.later_bytes)} later"]
        if total.minimum_days is not None:
            terms.append(f"paid for at least {counted(total.minimum_days, 'day')}")
        if total.takes_seconds:
            spans = ", ".join(f"{_span(seconds)} {speed}" for speed, seconds in total.takes_seconds.items())
            terms.append(f"to be thawed first ({spans})")
        if total.retrieval_dollars:
            terms.append(f"reading all of it costs ${total.retrieval_dollars:.2f} or more")
        show_line(f"to {total.target}: {'; '.join(terms)}")
    if found.kept_hot_by_others_bytes:
        show_line(f"kept hot by other runs: {as_bytes(found.kept_hot_by_others_bytes)}")
    if found.policy_level is None:
        show_line("There is no tiers policy: all of it stays hot. `holdfast policy put tiers` makes one.")


def _span(seconds: int) -> str:
    return f"{seconds // 3600} h" if seconds >= 3600 else f"{seconds // 60} min"


# `holdfast collect` and `holdfast sweep`: what nothing needs any more, and what no row of the catalog knows.

StoreOption = Annotated[StoreRole | None, typer.Option(help="Only this store; without it: every one.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only look.")]


def collect(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go now, and what waits.")] = False,
    project: Annotated[str | None, typer.Option(help="With --dry-run: only this project's.")] = None,
    json: JsonOption = False,
) -> None:
    """Delete what nothing needs any more now, instead of in the next pass."""
    if project is not None and not dry_run:
        raise typer.BadParameter("a pass is of every project; --project goes with --dry-run.")
    with connect() as client:
        if dry_run:
            plan = client.collection.plan(project)
            show_json(plan) if json else _show_plan(plan)
            return
        view = follow(client, client.collection.start())
    exit_unless_done(view)
    done = CollectionPass.model_validate(view.result)
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
        view = follow(client, client.collection.sweep(StartSweep(store=store, dry_run=dry_run, force=force)))
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
