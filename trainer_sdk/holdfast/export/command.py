"""`holdfast checkpoints pull`: the command, which adds itself to the client's CLI. It loads torch only when it runs."""

from __future__ import annotations

import importlib.util
import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from holdfast_client.cli.arguments import JsonOption, SelectorArgument, connect, read_selector
from holdfast_client.cli.output import as_bytes
from holdfast_client.cli.projects import read_size
from holdfast_client.cli.say import show_line, show_note

_NEEDED = ("torch", "numpy", "safetensors")


def register(app: typer.Typer) -> None:
    """Raises ModuleNotFoundError if the extra is not installed; the CLI then names the extra."""
    refuse_without_torch()
    app.command("pull")(pull)


def refuse_without_torch() -> None:
    """Raises ModuleNotFoundError with the name of the first module that the extra would bring."""
    for module in _NEEDED:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def pull(
    selector: SelectorArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    *,
    format_: Annotated[
        Literal["torch", "safetensors", "dcp", "hf"], typer.Option("--format", help="What the files are for.")
    ] = "torch",
    only: Annotated[list[str] | None, typer.Option(help="Just this component; may be given several times.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="hf: a config.json, or a folder with it and a tokenizer."),
    ] = None,
    dtype: Annotated[
        Literal["bf16", "bfloat16", "fp16", "float16", "fp32", "float32"] | None,
        typer.Option(help="hf: convert floating-point weights. Without it they stay as they are."),
    ] = None,
    max_file_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="hf: a new file after so many bytes (5GB), or `none`.")
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="hf: what stands before the weights' names and is no part of them."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="hf: refuse a config that does not fit the weights.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace DIR if it is not empty.")] = False,
    json: JsonOption = False,
) -> None:
    """Fetch and verify a checkpoint, as files for stock tools.

    torch: COMPONENT.pt for torch.load(weights_only=True). safetensors: COMPONENT.safetensors. dcp: a folder for
    torch.distributed.checkpoint.load. Values that are not tensors come as JSON. hf: one model, for from_pretrained()
    of transformers.
    """
    name, point = read_selector(selector)
    most_bytes = None if max_file_size is None else read_size(max_file_size)
    if most_bytes == 0:
        raise typer.BadParameter("--max-file-size must be more than 0.")
    from holdfast.export.hf.folder import DEFAULT_FILE_BYTES, HfChoices
    from holdfast.export.pull import Format
    from holdfast.export.pull import pull as pull_checkpoint

    hf = None
    if format_ == "hf" or (config, dtype, max_file_size, prefix, check) != (None, None, None, None, True):
        if max_file_size is None:
            most_bytes = DEFAULT_FILE_BYTES
        hf = HfChoices(
            config=config,
            dtype=dtype,
            most_file_bytes=sys.maxsize if most_bytes is None else most_bytes,
            prefix=prefix,
            check=check,
        )
    with connect() as client, transfer_progress(quiet=json) as progress:
        task = progress.add_task("fetching", total=None)
        summary = pull_checkpoint(
            client,
            name,
            point,
            directory,
            Format(format_),
            only=only or (),
            hf=hf,
            force=force,
            on_total=lambda total: progress.update(task, total=total),
            on_bytes=lambda count: progress.advance(task, count),
            on_note=lambda note: show_note(f"holdfast: {note}"),
        )
    if json:
        show_line(json_module.dumps(summary, indent=2))
    else:
        size = as_bytes(summary["logical_bytes"])
        show_line(f"{name}@{summary['step']}#{summary['attempt']} ({size}) is in {directory}, as {format_}.")


def transfer_progress(*, quiet: bool) -> Progress:
    """A bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=quiet or not console.is_terminal,
        transient=True,
    )
