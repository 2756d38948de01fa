"""`holdfast catalog check`, `doubts` and `confirm`; and `rebuild`, which the service's own command line brings."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core
from pydantic import ValidationError

from holdfast_client.cli.arguments import JsonOption
from holdfast_client.cli.connect import connect
from holdfast_client.cli.exit_codes import ExitCode
from holdfast_client.cli.operations import exit_unless_done, follow
from holdfast_client.cli.plugins import load_plugin
from holdfast_client.cli.say import show_line
from holdfast_client.cli.show import show_json
from holdfast_protocol.counted import counted
from holdfast_protocol.states import StoreRole
from holdfast_protocol.stores import CatalogCheck, CheckCatalog, ConfirmCommits

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


def register(app: typer.Typer) -> None:
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
        view = follow(client, client.check_catalog(asked))
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
        found = client.doubts()
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
        client.confirm_commits(request)
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
            "`holdfast store adopt --accept-loss` gives it up."
        )
    for line in found.away:
        show_line(f"{line}")
