"""`holdfast store` and `holdfast catalog`: the stores, whose they are, and how they compare with the catalog."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core
from pydantic import ValidationError

from holdfast_client.cli.arguments import JsonOption, LimitOption, connect, first
from holdfast_client.cli.main import load_plugin
from holdfast_client.cli.operations import exit_unless_done, follow
from holdfast_client.cli.output import NOTHING, ExitCode, as_time, show_facts, show_json, show_table
from holdfast_client.cli.say import show_line
from holdfast_protocol.states import StoreRole
from holdfast_protocol.stores import CatalogCheck, CheckCatalog, ClaimStore, ConfirmCommits, StoreView
from holdfast_protocol.text import counted


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Where the bytes are, and whose the stores are.", no_args_is_help=True, rich_markup_mode=None
    )
    group.command("list")(list_stores)
    group.command("claim")(claim)
    app.add_typer(group, name="store")
    group = typer.Typer(
        cls=CatalogGroup,
        help="Compare the catalog with its stores, or get it back from one.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    group.command("check")(check)
    group.command("doubts")(doubts)
    group.command("confirm")(confirm)
    app.add_typer(group, name="catalog")


# `holdfast store list | claim`.


def list_stores(*, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List the attached stores: whether each is this catalog's, and when it was last checked."""
    with connect() as client:
        found = first(client.stores.list(), limit)
    if json:
        show_json(found)
        return
    _show_stores(found)


def claim(
    store: Annotated[StoreRole | None, typer.Option(help="Only the store of this role; without it: every one.")] = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Give up what the check found that the catalog does not know.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """After a restore, a rebuild or a clone, and a check: take the stores for this catalog's; deleting goes on."""
    with connect() as client:
        roles = [each.role for each in client.stores.list()] if store is None else [store]
        claimed = [client.stores.claim(role, ClaimStore(accept_loss=accept_loss)) for role in roles]
    if json:
        show_json(claimed)
        return
    _show_stores(claimed)


def _show_stores(stores: list[StoreView]) -> None:
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
            for each in stores
        ),
        nothing="There are no stores.",
    )
    show_facts([(f"{each.role.value} store", told) for each in stores for told in each.weaknesses])


# `holdfast catalog check`, `doubts` and `confirm`; and `rebuild`, which the service's own command line brings.

_SERVICE = "serve"


class CatalogGroup(typer.core.TyperGroup):
    """Adds what works on the database itself, when it is asked for: the client never imports the service."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._load()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        self._load()
        return sorted(super().list_commands(ctx))

    def _load(self) -> None:
        theirs: Any = typer.main.get_group(load_plugin(_SERVICE)).commands.get("catalog")
        for name, command in getattr(theirs, "commands", {}).items():
            self.commands.setdefault(name, command)


def check(
    store: Annotated[StoreRole | None, typer.Option(help="Only the store of this role; without it: every one.")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read and hash every copy too.")] = False,
    confirm_missing: Annotated[
        bool, typer.Option("--confirm-missing", help="What is missing is gone, even if it is most of a store.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compare the catalog with its stores, both ways. Exit code 1 if they differ."""
    asked = CheckCatalog(store=store, deep=deep, confirm_missing=confirm_missing)
    with connect() as client:
        view = follow(client, client.catalog.check(asked))
    exit_unless_done(view)
    found = CatalogCheck.model_validate(view.result)
    if json:
        show_json(found)
    else:
        _show(found)
    if found.went_back or found.away or any(each.findings for each in found.stores):
        raise typer.Exit(ExitCode.FAILED)


def doubts(json: JsonOption = False) -> None:
    """What a rebuild of the catalog could not know, and nobody has confirmed since."""
    with connect() as client:
        found = client.catalog.doubts()
    if json:
        show_json(found)
        return
    for each in found:
        show_line(f"{each.project or 'projects that the rebuild did not find'}: {each.reason}")
    if not found:
        show_line("nothing is in doubt")


def confirm(
    name: Annotated[str, typer.Argument(metavar="PROJECT[/RUN]", help="A run, or all runs of a project.")],
    reason: Annotated[str | None, typer.Option(help="For the audit.")] = None,
    json: JsonOption = False,
) -> None:
    """Confirm that a rebuilt catalog lacks no commit of a run, or of any run of a project: a run without a checkpoint
    then begins from nothing."""
    project, _, run = name.partition("/")
    try:
        request = ConfirmCommits(project=project, run=run or None, reason=reason)
    except ValidationError:
        raise typer.BadParameter(f"{name!r} is no project and no run; write demo or demo/gpt") from None
    with connect() as client:
        client.catalog.confirm(request)
    if json:
        show_json(request)
        return
    what = f"the run {name}" if run else f"every run of {project}"
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
            "`holdfast store claim --accept-loss` gives it up."
        )
    for line in found.away:
        show_line(f"{line}")
