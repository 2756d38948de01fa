"""`holdfast stores`, `catalog`, `collections` and `sweeps`: the stores' catalogs, and the objects that they hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from pydantic import ValidationError

from holdfast_client.cli.arguments import (
    DryRunOption,
    JsonOption,
    LimitOption,
    OnlyProject,
    ReasonOption,
    StoreOption,
    TargetArgument,
    WaitOption,
    YesOption,
    connect,
    exit_unless_meant,
    first,
)
from holdfast_client.cli.main import noun
from holdfast_client.cli.operations import run_to_end
from holdfast_client.cli.output import NOTHING, ExitCode, as_bytes, as_time, show_facts, show_json, show_table
from holdfast_client.cli.say import show_line
from holdfast_protocol.stores import (
    CatalogCheck,
    CheckCatalog,
    ClaimStore,
    CollectionPass,
    CollectionPlan,
    ConfirmCommits,
    StartSweep,
    StoreCollection,
    StoreView,
    SweepReport,
)
from holdfast_protocol.text import counted

stores = noun("stores")
catalog = noun("catalog")
collections = noun("collections")
sweeps = noun("sweeps")


@stores.command("list")
def list_stores(*, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List the attached stores, their owners, and their last checks."""
    with connect() as client:
        found = first(client.stores.list(), limit)
    if json:
        show_json(found)
        return
    _show_stores(found)


@stores.command()
def claim(
    *,
    store: StoreOption = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Give up objects that the catalog does not know.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Take the stores for this catalog's, so that deleting goes on.

    After a restore, a rebuild or a clone of the catalog, and after a check.
    """
    with connect() as client:
        roles = [each.role for each in client.stores.list()] if store is None else [store]
        claimed = [client.stores.claim(role, ClaimStore(accept_loss=accept_loss)) for role in roles]
    if json:
        show_json(claimed)
        return
    _show_stores(claimed)


def _show_stores(attached: list[StoreView]) -> None:
    show_table(
        ["store", "kind", "URL", "this catalog's", "checked (UTC)", "whole", "probed (UTC)", "changed (UTC)"],
        (
            (
                each.role.value,
                each.kind,
                each.url,
                "yes" if each.claimed else f"no: {each.problem}",
                as_time(each.checked_at),
                NOTHING if each.checked_whole is None else ("yes" if each.checked_whole else "no"),
                as_time(each.probed_at),
                as_time(each.changed_at),
            )
            for each in attached
        ),
        nothing="There are no stores. `holdfast serve --store URL` attaches one.",
    )
    show_facts([(f"{each.role.value} store", told) for each in attached for told in each.weaknesses])


@catalog.command()
def check(
    *,
    store: StoreOption = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read and hash every copy too.")] = False,
    confirm_missing: Annotated[
        bool, typer.Option("--confirm-missing", help="Missing objects are gone, even if they are most of a store.")
    ] = False,
    wait: WaitOption = True,
    json: JsonOption = False,
) -> None:
    """Compare the catalog with its stores, both ways. Exit code 1 if they differ."""
    asked = CheckCatalog(store=store, deep=deep, confirm_missing=confirm_missing)
    with connect() as client:
        ended = run_to_end(client, client.catalog.check(asked), wait=wait, json=json)
    if ended is None:
        return
    found = CatalogCheck.model_validate(ended.result)
    if not json:
        _show(found)
    if found.went_back or found.unavailable or any(each.findings for each in found.stores):
        raise typer.Exit(ExitCode.FAILED)


@catalog.command()
def doubts(*, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List unconfirmed facts that a rebuild could not know."""
    with connect() as client:
        found = first(client.catalog.doubts(), limit)
    if json:
        show_json(found)
        return
    for each in found:
        show_line(f"{each.project or 'projects that the rebuild did not find'}: {each.reason}")
    if not found:
        show_line("Nothing is in doubt.")


@catalog.command()
def confirm(
    target: TargetArgument,
    *,
    reason: ReasonOption = "",
    json: JsonOption = False,
) -> None:
    """Confirm that a rebuilt catalog lacks no commit.

    Of a run, or of any run of a project: a run without a checkpoint then begins from nothing.
    """
    project, _, run = target.partition("/")
    try:
        request = ConfirmCommits(project=project, run=run or None, reason=reason or None)
    except ValidationError:
        raise typer.BadParameter(f"{target!r} is no project and no run; write demo or demo/gpt") from None
    with connect() as client:
        client.catalog.confirm(request)
    if json:
        show_json(request)
        return
    what = f"the run {target}" if run else f"every run of {project}"
    show_line(f"Confirmed for {what}: the catalog lacks no commit.")


def _show(found: CatalogCheck) -> None:
    for store in found.stores:
        read = f", {store.read_copies} of them read" if store.read_copies else ""
        show_line(
            f"{store.role.value} store: {counted(store.objects, 'object')}, "
            f"{counted(store.copies, 'copy', 'copies')}{read}, {counted(store.records, 'record')}"
        )
        for finding in store.findings:
            show_line(f"  {finding.what} {finding.remedy}")
            for example in finding.examples:
                show_line(f"    {example}")
        if not store.findings:
            show_line("  nothing differs")
    if found.went_back:
        show_line(
            f"The database went back to an older state. It has lost: {found.went_back}.\n"
            "  `holdfast catalog rebuild` into an empty database brings back what has a record above. "
            "`holdfast stores claim --accept-loss` gives it up."
        )
    for line in found.unavailable:
        show_line(f"{line}")


@collections.command()
def plan(project: OnlyProject = None, json: JsonOption = False) -> None:
    """Show what would be deleted now, and what waits for what."""
    with connect() as client:
        found = client.collections.plan(project)
    if json:
        show_json(found)
    else:
        _show_plan(found)


@collections.command("start")
def start_collection(wait: WaitOption = True, json: JsonOption = False) -> None:
    """Delete unneeded copies now, not in the next pass."""
    with connect() as client:
        ended = run_to_end(client, client.collections.start(), wait=wait, json=json)
    if ended is None or json:
        return
    done = CollectionPass.model_validate(ended.result)
    show_facts(
        [
            ("deleted", f"{counted(done.deleted_copies, 'copy', 'copies')}, {as_bytes(done.deleted_bytes)}"),
            ("tried again", counted(done.kept_copies, "copy", "copies")),
            *(("problem", problem) for problem in done.problems),
        ]
    )


@sweeps.command("list")
def list_sweeps(*, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List what the last sweep of each store has found."""
    with connect() as client:
        found = client.sweeps.last()
    found = found.model_copy(update={"stores": first(found.stores, limit)})
    if json:
        show_json(found.stores)
    else:
        _show_sweep(found)


@sweeps.command("start")
def start_sweep(
    *,
    store: StoreOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Delete even more than the set share of a store; needs --yes.")
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    wait: WaitOption = True,
    json: JsonOption = False,
) -> None:
    """Compare stores with the catalog, and delete unknown objects.

    It deletes only objects that are old enough, and has the copies read again whose objects are missing.
    """
    only_look = dry_run or (force and not yes)
    with connect() as client:
        started = client.sweeps.start(StartSweep(store=store, dry_run=only_look, force=force))
        ended = run_to_end(client, started, wait=wait, json=json)
    if ended is not None:
        report = SweepReport.model_validate(ended.result)
        if not json:
            _show_sweep(report)
        if report.problems or any(one.stopped for one in report.stores):
            raise typer.Exit(ExitCode.FAILED)
    if force:
        exit_unless_meant("deleted", yes=yes, dry_run=dry_run)


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
        nothing="No store was swept yet. `holdfast sweeps start --dry-run` looks without deleting.",
    )
    stopped = [("stopped", one.stopped) for one in report.stores if one.stopped is not None]
    if problems := [*stopped, *(("problem", problem) for problem in report.problems)]:
        show_facts(problems)
