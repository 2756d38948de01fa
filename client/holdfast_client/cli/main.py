"""`holdfast`: gathers the commands, and turns every error into one or two plain lines and an exit code."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
import typer.core
from pydantic import ValidationError

from holdfast_client.cli import (
    advice,
    attempts,
    catalog,
    checkpoints,
    collection,
    controllers,
    copies,
    events,
    goodput,
    health,
    holds,
    operations,
    policies,
    projects,
    restore_point,
    retention,
    runs,
    scrub,
    stores,
    tiers,
    tokens,
    trash,
    usage,
    webhooks,
)
from holdfast_client.cli.doctor import command as doctor
from holdfast_client.cli.exit_codes import ExitCode, exit_code_of
from holdfast_client.cli.plugins import load_plugin, plugin_names
from holdfast_client.cli.run import command as run
from holdfast_client.cli.spool import command as spool
from holdfast_client.errors import HoldfastError

DEBUG = "HOLDFAST_DEBUG"
# The command line's own ways to end. typer brings its own click or takes the installed one, by its version: the
# parents of BadParameter are the right UsageError and ClickException.
_ENDINGS: tuple[type[BaseException], ...] = (
    BrokenPipeError,
    typer.Exit,
    typer.Abort,
    *(kind for kind in typer.BadParameter.__mro__ if kind.__name__ in ("UsageError", "ClickException")),
)


class HoldfastGroup(typer.core.TyperGroup):
    """Loads plug-ins when they are asked for, and is the one place where errors end."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._load([cmd_name] if cmd_name in plugin_names() else plugin_names())
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        self._load(plugin_names())
        return sorted(super().list_commands(ctx))

    def _load(self, names: list[str]) -> None:
        for name in names:
            if name not in self.commands:
                for command, found in typer.main.get_group(load_plugin(name)).commands.items():
                    self.commands.setdefault(command, found)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(error, _ENDINGS) or os.environ.get(DEBUG):
                raise
            raise typer.Exit(_report(error)) from None


def _report(error: Exception) -> ExitCode:
    """Says what is wrong and what to do, in a line or two; a traceback tells a user neither."""
    if isinstance(error, HoldfastError):
        _say(str(error) + (f" (request {error.request_id})" if error.request_id else ""))
        return exit_code_of(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        _say(f"{' '.join(map(str, first['loc']))} is not usable: {first['msg'].removeprefix('Value error, ')}.")
        return ExitCode.USAGE
    if isinstance(error, OSError):
        _say(f"{error.filename or 'this machine'}: {error.strerror or type(error).__name__}.")
        return ExitCode.FAILED
    _say(f"This is a bug in holdfast ({type(error).__name__}). Set {DEBUG}=1 to see where, and report it.")
    return ExitCode.FAILED


def _say(text: str) -> None:
    sys.stderr.write(f"holdfast: {text}\n")


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"holdfast {version('holdfast')}\n")
        raise typer.Exit


app = typer.Typer(
    cls=HoldfastGroup,
    name="holdfast",
    help="Checkpoint storage for GPU training. What was called committed can be restored, bit for bit.",
    no_args_is_help=True,
    # Plain lines: the same in a terminal, in a job's log and in a pipe.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """The service is HOLDFAST_URL, the token HOLDFAST_TOKEN; a service on this machine needs neither."""


for noun in (
    runs,
    advice,
    attempts,
    goodput,
    checkpoints,
    restore_point,
    scrub,
    spool,
    health,
    events,
    holds,
    operations,
    controllers,
    collection,
    policies,
    retention,
    trash,
    tiers,
    catalog,
    stores,
    projects,
    tokens,
    webhooks,
    usage,
    copies,
    doctor,
    run,
):
    noun.register(app)


def main() -> None:
    app()
