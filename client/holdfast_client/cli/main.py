"""`holdfast`: gathers the commands, and turns every error into one or two plain lines and an exit code."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
import typer.core

from holdfast_client.cli.commands import ENTRIES, SUBJECTS
from holdfast_client.cli.plugins import load_plugin, plugin_names
from holdfast_client.cli.say import show_line, show_note

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
    """Loads a command when it is asked for, and is the one place where errors end."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = ENTRIES.get(cmd_name)
        if cmd_name in self.commands:
            pass
        elif entry is not None and entry.module:
            app = typer.Typer(rich_markup_mode=None)
            # One command alone would take the group's place.
            app.callback()(lambda: None)
            import_module(f"holdfast_client.cli.{entry.module}").register(app)
            self._add(app)
        elif entry is not None and entry.plugin in plugin_names():
            self._add(load_plugin(entry.plugin), entry.plugin)
        elif entry is None and cmd_name in plugin_names():
            self._add(load_plugin(cmd_name), cmd_name)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({*ENTRIES, *plugin_names()})

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """By subject, from the table: nothing is imported for the help but other people's plug-ins."""
        sections = {subject: [(entry.name, entry.help) for entry in entries] for subject, entries in SUBJECTS.items()}
        theirs = [name for name in plugin_names() if name not in ENTRIES]
        sections["More"] = [(name, self.get_command(ctx, name).get_short_help_str()) for name in theirs]
        for subject, rows in sections.items():
            if rows:
                with formatter.section(subject):
                    formatter.write_dl(rows)

    def _add(self, app: typer.Typer, plugin: str = "") -> None:
        """What a plug-in adds to a command of the client (`catalog rebuild`), that command takes in itself."""
        for name, command in typer.main.get_group(app).commands.items():
            if name not in ENTRIES or ENTRIES[name].plugin == plugin:
                self.commands.setdefault(name, command)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(error, _ENDINGS) or os.environ.get(DEBUG):
                raise
            raise typer.Exit(_report(error)) from None


def _report(error: Exception) -> int:
    """Says what is wrong and what to do, in a line or two; a traceback tells a user neither. Returns the exit code."""
    from pydantic import ValidationError

    from holdfast_client.cli.exit_codes import ExitCode, exit_code_of
    from holdfast_client.errors import HoldfastError

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
    show_note(f"holdfast: {text}")


def _show_version(wanted: bool) -> None:
    if wanted:
        show_line(f"holdfast {version('holdfast')}")
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


def main() -> None:
    app()
