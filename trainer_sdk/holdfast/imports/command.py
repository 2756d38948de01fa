"""`holdfast import`: the command, which adds itself to the client's CLI. It loads torch only when it runs."""

from __future__ import annotations

import faulthandler
import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.export.command import refuse_without_torch, transfer_progress
from holdfast_client.cli.arguments import JsonOption, connect, read_selector
from holdfast_client.cli.output import as_bytes
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.settings import ClientSettings
from holdfast_protocol.runs import AtStep, Latest
from holdfast_protocol.text import counted, printable


def register(app: typer.Typer) -> None:
    """Raises ModuleNotFoundError if the extra is not installed; the CLI then names the extra."""
    refuse_without_torch()
    app.command("import")(import_)


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A file or folder of torch, safetensors or DCP; or a folder of several steps."
        ),
    ],
    target: Annotated[
        str, typer.Argument(metavar="PROJECT/RUN[@STEP]", help="The step, if the name of SOURCE does not say it.")
    ],
    *,
    only: Annotated[list[str] | None, typer.Option(help="Just this component; may be given several times.")] = None,
    rename: Annotated[
        list[str] | None, typer.Option(metavar="OLD=NEW", help="Name a component NEW; may be given several times.")
    ] = None,
    tie: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=KEPT", help="Two equal tensors are tied: model/head.weight=model/embed.weight."),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="The run is new, though its name is like that of another.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Bring in what another tool saved, as checkpoints that jobs restore.

    Every step is committed, read back and compared with the source. Run it again after a failure: it goes on.
    """
    run, point = read_selector(target)
    if not isinstance(point, Latest) and not (isinstance(point, AtStep) and point.attempt is None):
        raise typer.BadParameter(f"{target!r} names no step; write for example demo/gpt@1200.")
    renamed, tied = dict(map(_pair, rename or ())), dict(map(_pair, tie or ()))
    from holdfast.imports.checkpoint_plan import Choices
    from holdfast.imports.sources import find_sources
    from holdfast.imports.steps import import_sources

    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        # The system ends a process that reads a mapped file behind its new end. It says so, with the line that read.
        faulthandler.enable(sys.__stderr__)
    sources = find_sources(source, point.step if isinstance(point, AtStep) else None)
    with connect(retry_seconds=ClientSettings().retry_seconds) as client, transfer_progress(quiet=json) as progress:
        task = progress.add_task("importing", total=0)
        report = import_sources(
            client,
            run,
            sources,
            choices=Choices(only=frozenset(only or ()), renamed=renamed, tied=tied),
            create=True if create else None,
            on_total=lambda count: progress.update(task, total=count),
            on_bytes=lambda count: progress.advance(task, count),
            on_note=lambda note: show_note(f"holdfast: {printable(note, one_line=True)}"),
        )
    if json:
        show_line(json_module.dumps(report, indent=2))
        return
    new = sum(not step["skipped"] for step in report["steps"])
    deleted = sum(step["deleted"] for step in report["steps"])
    gone = f", {deleted} deleted since" if deleted else ""
    total, sent, present = (as_bytes(report[name]) for name in ("bytes", "sent_bytes", "present_bytes"))
    show_line(
        f"{run}: {counted(new, 'step')} imported, {len(sources) - new - deleted} there already{gone}; "
        f"{counted(report['tensors'], 'tensor')}, {total}: {sent} sent, {present} already in the store."
    )


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise typer.BadParameter(f"{text!r} names no two; write for example --rename model_state_dict=model.")
    return old, new
