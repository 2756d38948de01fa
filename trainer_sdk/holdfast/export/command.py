"""`holdfast checkpoints pull` and `push`: the commands, which add themselves to the client's CLI. They load torch only
when they run."""

from __future__ import annotations

import importlib.util
import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from holdfast_client.cli.arguments import JsonOption, SelectorArgument, connect, read_selector
from holdfast_client.cli.output import as_bytes
from holdfast_client.cli.projects import read_size
from holdfast_client.cli.say import show_line, show_note
from holdfast_protocol.text import counted

if TYPE_CHECKING:
    from holdfast.export.hf.folder import HfChoices

_NEEDED = ("torch", "numpy", "safetensors")

FormatOption = Annotated[
    Literal["torch", "safetensors", "dcp", "hf"], typer.Option("--format", help="What the files are for.")
]
OnlyOption = Annotated[list[str] | None, typer.Option(help="Just this component; may be given several times.")]
ConfigOption = Annotated[
    Path | None, typer.Option(metavar="PATH", help="hf: a config.json, or a folder with it and a tokenizer.")
]
DtypeOption = Annotated[
    Literal["bf16", "bfloat16", "fp16", "float16", "fp32", "float32"] | None,
    typer.Option(help="hf: convert floating-point weights. Without it they stay as they are."),
]
MaxFileSizeOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="hf: a new file after so many bytes (5GB), or `none`.")
]
PrefixOption = Annotated[
    str | None, typer.Option(metavar="TEXT", help="hf: what stands before the weights' names and is no part of them.")
]
CheckOption = Annotated[bool, typer.Option("--check/--no-check", help="hf: refuse a config that does not fit.")]


def register(app: typer.Typer) -> None:
    """Raises ModuleNotFoundError if the extra is not installed; the CLI then names the extra."""
    refuse_without_torch()
    app.command("pull")(pull)
    app.command("push")(push)


def refuse_without_torch() -> None:
    """Raises ModuleNotFoundError with the name of the first module that the extra would bring."""
    for module in _NEEDED:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def pull(
    selector: SelectorArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    *,
    format_: FormatOption = "torch",
    only: OnlyOption = None,
    config: ConfigOption = None,
    dtype: DtypeOption = None,
    max_file_size: MaxFileSizeOption = None,
    prefix: PrefixOption = None,
    check: CheckOption = True,
    force: Annotated[bool, typer.Option("--force", help="Replace DIR if it is not empty.")] = False,
    json: JsonOption = False,
) -> None:
    """Fetch and verify a checkpoint, as files for stock tools.

    torch: COMPONENT.pt for torch.load(weights_only=True). safetensors: COMPONENT.safetensors. dcp: a folder for
    torch.distributed.checkpoint.load. Values that are not tensors come as JSON. hf: one model, for from_pretrained()
    of transformers.
    """
    name, point = read_selector(selector)
    hf = _hf_choices(format_, config, dtype, max_file_size, prefix, check=check)
    from holdfast.export.pull import Format
    from holdfast.export.pull import pull as pull_checkpoint

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


def push(
    selector: SelectorArgument,
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder that fsspec opens: s3://bucket/gpt, gs://…")],
    *,
    format_: FormatOption = "torch",
    only: OnlyOption = None,
    config: ConfigOption = None,
    dtype: DtypeOption = None,
    max_file_size: MaxFileSizeOption = None,
    prefix: PrefixOption = None,
    check: CheckOption = True,
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the files are made first, in place of /tmp.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another checkpoint there.")] = False,
    json: JsonOption = False,
) -> None:
    """Write the files of a pull to a bucket. Run it again after a failure: what is there already is not sent.

    The formats are those of `holdfast checkpoints pull`. Credentials are those of fsspec's package for the URL, such as
    s3fs or gcsfs, from the environment.
    """
    name, point = read_selector(selector)
    hf = _hf_choices(format_, config, dtype, max_file_size, prefix, check=check)
    from holdfast.export.pull import Format
    from holdfast.export.push import push as push_checkpoint

    with connect() as client, transfer_progress(quiet=json) as progress:
        task = progress.add_task("fetching", total=None)
        summary = push_checkpoint(
            client,
            name,
            point,
            url,
            Format(format_),
            only=only or (),
            hf=hf,
            force=force,
            work=work,
            on_total=lambda total: progress.update(task, total=total),
            on_bytes=lambda count: progress.advance(task, count),
            on_note=lambda note: show_note(f"holdfast: {note}"),
        )
    if json:
        show_line(json_module.dumps(summary, indent=2))
    else:
        sent, kept = counted(len(summary["sent"]), "file"), len(summary["kept"])
        what = f"{name}@{summary['step']}#{summary['attempt']}"
        show_line(f"{what} is at {url}, as {format_}: {sent} sent, {kept} there already.")


def _hf_choices(
    format_: str, config: Path | None, dtype: str | None, max_file_size: str | None, prefix: str | None, *, check: bool
) -> HfChoices | None:
    most_bytes = None if max_file_size is None else read_size(max_file_size)
    if most_bytes == 0:
        raise typer.BadParameter("--max-file-size must be more than 0.")
    if format_ != "hf" and (config, dtype, max_file_size, prefix, check) == (None, None, None, None, True):
        return None
    from holdfast.export.hf.folder import DEFAULT_FILE_BYTES, HfChoices

    if max_file_size is None:
        most_bytes = DEFAULT_FILE_BYTES
    return HfChoices(
        config=config,
        dtype=dtype,
        most_file_bytes=sys.maxsize if most_bytes is None else most_bytes,
        prefix=prefix,
        check=check,
    )


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
