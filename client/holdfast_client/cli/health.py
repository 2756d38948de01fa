"""`holdfast health PROJECT/RUN@WHICH ok`, or `diverged`, `quarantined`: a person says whether to resume from it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from holdfast_client.cli.arguments import JsonOption, SelectorArgument, read_selector
from holdfast_client.cli.connect import connect
from holdfast_client.cli.say import show_line
from holdfast_client.cli.show import show_json
from holdfast_protocol.checkpoints import EditCheckpoint


class Said(StrEnum):
    """`corrupt` is missing: only the service finds that, and takes it back."""

    OK = "ok"
    DIVERGED = "diverged"
    QUARANTINED = "quarantined"


def register(app: typer.Typer) -> None:
    app.command("health")(health)


def health(
    selector: SelectorArgument,
    said: Annotated[Said, typer.Argument(metavar="ok|diverged|quarantined", help="What it is.", show_default=False)],
    *,
    reason: Annotated[str | None, typer.Option(help="Others read it; needed for all but ok.")] = None,
    json: JsonOption = False,
) -> None:
    """Say whether a checkpoint may be resumed from; `ok` releases one from quarantine."""
    name, point = read_selector(selector)
    with connect() as client:
        found = client.selected_checkpoint(name.project, name.run, str(point))
        request = EditCheckpoint.model_validate({"health": said.value, "health_reason": reason})
        edited = client.edit_checkpoint(found.id, request, found.etag)
    if json:
        show_json(edited)
        return
    before = "" if found.health == edited.health else f", and was {found.health}"
    show_line(f"{name}@{edited.step}#{edited.attempt} is {edited.health}{before}.")
