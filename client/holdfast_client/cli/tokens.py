"""`holdfast token create | list | revoke`."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from holdfast_client.cli.arguments import JsonOption, LimitOption, first
from holdfast_client.cli.connect import connect
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.cli.show import NOTHING, as_time, show_json, show_table
from holdfast_protocol.states import Scope
from holdfast_protocol.tokens import CreateToken, TokenView

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Make, list and revoke tokens.", no_args_is_help=True, rich_markup_mode=None)
    group.command("create")(create)
    group.command("list")(list_tokens)
    group.command("revoke")(revoke)
    app.add_typer(group, name="token")


def create(
    name: Annotated[str, typer.Argument(help="What or who it is for.")],
    scope: Annotated[list[Scope], typer.Option(help="What it may do; give it several times. None implies another.")],
    project: Annotated[str | None, typer.Option(help="Only in this project; without it, in every one.")] = None,
    expires: Annotated[str, typer.Option(help="After this time, such as 12h, 90d or never.")] = "90d",
    json: JsonOption = False,
) -> None:
    """Make a token. It is shown once and kept nowhere."""
    request = CreateToken(name=name, project=project, scopes=scope, expires_in_seconds=read_duration(expires))
    with connect() as client:
        made = client.create_token(request)
    if json:
        show_json(made)
        return
    show_line(made.token)
    show_note(f"Token {made.id} ({_scopes(made)}), until {as_time(made.expires_at)}. It is not shown again.")


def list_tokens(*, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List the tokens, revoked ones too."""
    with connect() as client:
        found = first(client.all_tokens(), limit)
    if json:
        show_json(found)
        return
    show_table(
        ["id", "name", "project", "scopes", "ends (UTC)"],
        (
            (
                one.id,
                one.name,
                one.project or "(all)",
                _scopes(one),
                "revoked" if one.revoked_at else as_time(one.expires_at) if one.expires_at else NOTHING,
            )
            for one in found
        ),
        nothing="There are no tokens.",
    )


def revoke(token_id: Annotated[str, typer.Argument(metavar="ID")], json: JsonOption = False) -> None:
    """Revoke a token, at once and for good."""
    with connect() as client:
        view = client.revoke_token(token_id)
    if json:
        show_json(view)
    else:
        show_line(f"{view.id} ({view.name}) is revoked.")


def _scopes(token: TokenView) -> str:
    return " ".join(scope.value for scope in token.scopes)


def read_duration(text: str) -> int | None:
    """`12h`, `90d` -> seconds; `never` -> None."""
    if text.strip().lower() == "never":
        return None
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time; write for example 30m, 12h, 90d, 4w or never.")
    return int(match[1]) * _UNITS[match[2]]
