"""`holdfast policy show | put | delete KIND PROJECT[/RUN]`: what a project or a run wants of a controller."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast_client.cli.arguments import JsonOption, read_run
from holdfast_client.cli.connect import connect
from holdfast_client.cli.exit_codes import ExitCode
from holdfast_client.cli.say import show_note
from holdfast_client.cli.show import as_time, show_facts, show_json
from holdfast_client.client import Client
from holdfast_client.errors import PolicyNotFound
from holdfast_protocol.policies import PolicyError, PolicyKind, PolicyView, read_policy

TargetArgument = Annotated[
    str, typer.Argument(metavar="PROJECT[/RUN]", help="A run, or a project for all its runs without one of their own.")
]
KindArgument = Annotated[PolicyKind, typer.Argument(metavar="KIND", help="retention, copies or tiers.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Policies of projects and runs.", no_args_is_help=True, rich_markup_mode=None)
    group.command("show")(show)
    group.command("put")(put)
    group.command("delete")(delete)
    app.add_typer(group, name="policy")


def show(kind: KindArgument, target: TargetArgument, json: JsonOption = False) -> None:
    """Show the policy that holds, and where it comes from."""
    project, run = read_target(target)
    with connect() as client:
        view = client.policy(kind, project, run)
    show_policy(view, json=json)


def put(
    kind: KindArgument,
    target: TargetArgument,
    file: Annotated[str, typer.Option("--file", help="The policy as JSON; - reads stdin.")],
    json: JsonOption = False,
) -> None:
    """Put a policy in place of the target's own, if it has one."""
    project, run = read_target(target)
    document = read_document(file)
    checked_policy(kind, document)
    with connect() as client:
        view = put_own(client, kind, project, run, document)
    show_policy(view, json=json)


def delete(
    kind: KindArgument,
    target: TargetArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it, only say what would be deleted.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete the target's own policy. A run has its project's from then on."""
    project, run = read_target(target)
    with connect() as client:
        own = own_policy(client, kind, project, run)
        if own is None:
            raise PolicyNotFound(f"{target} has no {kind} policy of its own.")
        if yes:
            own = client.delete_policy(kind, project, run, etag=own.etag)
    show_policy(own, json=json)
    if not yes:
        show_note("Nothing was deleted. Say --yes if you mean it.")
        raise typer.Exit(ExitCode.USAGE)


def read_target(text: str) -> tuple[str, str | None]:
    """`demo` -> ("demo", None); `demo/gpt` -> ("demo", "gpt")."""
    if "/" not in text:
        return text, None
    name = read_run(text)
    return name.project, name.run


def own_policy(client: Client, kind: PolicyKind, project: str, run: str | None) -> PolicyView | None:
    """The target's own; None if it has none, whatever its project has."""
    try:
        view = client.policy(kind, project, run)
    except PolicyNotFound:
        return None
    return view if run is None or view.level == "run" else None


def put_own(client: Client, kind: PolicyKind, project: str, run: str | None, document: dict[str, Any]) -> PolicyView:
    own = own_policy(client, kind, project, run)
    return client.put_policy(kind, project, run, document, etag=None if own is None else own.etag)


def checked_policy(kind: PolicyKind, document: dict[str, Any]) -> None:
    """Says what is wrong before anything is sent."""
    try:
        read_policy(kind, document)
    except PolicyError as error:
        raise typer.BadParameter(str(error)) from None


def show_policy(view: PolicyView, *, json: bool) -> None:
    if json:
        show_json(view)
        return
    target = view.project if view.run is None else f"{view.project}/{view.run}"
    show_facts(
        [
            (f"{view.kind} policy", f"of {target}, version {view.version}"),
            ("put", f"{as_time(view.updated_at)} UTC by {view.updated_by}"),
            *((name, _shown(value)) for name, value in view.document.items()),
        ]
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(item) for item in value)
    if isinstance(value, dict):
        return " ".join(f"{name}={_shown(item)}" for name, item in value.items())
    return str(value)


def read_document(file: str) -> dict[str, Any]:
    text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    try:
        document = json_module.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{file} is not JSON: {error}.") from None
    if not isinstance(document, dict):
        raise typer.BadParameter(f"{file} must hold a JSON object.")
    return document
