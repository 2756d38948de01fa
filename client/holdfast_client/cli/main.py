"""`holdfast`: gathers the commands, and turns every error into one or two plain lines and an exit code."""

from __future__ import annotations

import os
import re
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version
from typing import Annotated, Any, NamedTuple

import typer
import typer.core

from holdfast_client.cli.say import show_line, show_note

# Which commands there are: by subject, each with its line in `holdfast --help` and the module that brings it.
#
# The help is written from this table alone. A module is imported when one of its commands runs, so that a prompt or a
# script does not wait for forty modules that it does not need.


class Entry(NamedTuple):
    """`module` is below `holdfast_client.cli`; or `plugin` is an entry point that another package brings."""

    name: str
    help: str
    module: str = ""
    plugin: str = ""


SUBJECTS: dict[str, tuple[Entry, ...]] = {
    "Start here": (
        Entry("serve", "Run the service; without options for this machine.", plugin="serve"),
        Entry("doctor", "Check the way to the service and its store.", "doctor"),
    ),
    "Runs": (
        Entry("runs", "List runs, how they fare, and their restore points.", "runs"),
        Entry("attempts", "List the launches of a run, and why each ended.", "runs"),
        Entry("restore-point", "Tell what a relaunch would resume from, and why.", "runs"),
        Entry("goodput", "Show where a run's time and steps went.", "runs"),
        Entry("advise", "Say how often a run should save, and why.", "runs"),
    ),
    "Training jobs": (
        Entry("run", "Start a job; the exit code says how it ended.", "run"),
        Entry("spool", "Saves on this machine's disk that are not committed.", "spool"),
        Entry("verify-resume", "Does this script resume exactly?", plugin="verify-resume"),
    ),
    "Checkpoints": (
        Entry("checkpoints", "List the checkpoints of a run.", "checkpoints"),
        Entry("show", "Show one checkpoint, whatever its state.", "checkpoints"),
        Entry("pull", "Fetch, verify, and write files for other tools.", plugin="pull"),
        Entry("health", "Quarantine a checkpoint, or release it.", "checkpoints"),
        Entry("pin", "Keep a checkpoint from policies and from prune.", "trash"),
        Entry("unpin", "Take a pin away.", "trash"),
        Entry("hold", "Keep a checkpoint from everybody.", "policies"),
    ),
    "What stays, and what goes": (
        Entry("retention", "What stays of a run and why: plan, apply, policies.", "retention"),
        Entry("prune", "Delete one checkpoint, or those that fit conditions.", "trash"),
        Entry("delete", "Delete a whole run, or a project with its runs.", "projects"),
        Entry("trash", "What was deleted and can be taken back.", "trash"),
        Entry("collect", "Delete what nothing needs any more, now.", "tiers"),
        Entry("sweep", "Find objects in a store that no row knows.", "tiers"),
        Entry("policy", "Policies of every kind: show, put, delete.", "policies"),
    ),
    "Proof and copies": (
        Entry("scrub", "Read stored bytes again, and repair what is bad.", "copies"),
        Entry("bad-copies", "List the copies that are bad or suspect.", "copies"),
        Entry("impact", "Tell what a bad chunk means, and for whom.", "copies"),
        Entry("copies", "Tell how far the second store is behind.", "copies"),
        Entry("drill", "Restore from one store alone, to prove it.", "copies"),
    ),
    "Where the bytes are, and what they cost": (
        Entry("usage", "Show what checkpoints take up, figure by figure.", "usage"),
        Entry("cost", "Show what storing costs a month.", "usage"),
        Entry("prices", "The prices that costs are counted with.", "usage"),
        Entry("tiers", "What gets cold when.", "tiers"),
        Entry("thaw", "Make a cold checkpoint readable for some days.", "tiers"),
    ),
    "Operating the service": (
        Entry("project", "Projects and their quotas.", "projects"),
        Entry("token", "Tokens: create, list, revoke.", "projects"),
        Entry("webhook", "Have a URL called when something happens.", "events"),
        Entry("events", "Who changed what, and why.", "events"),
        Entry("operations", "Long work that somebody started.", "operations"),
        Entry("controllers", "Background work: what is due, its lag, its errors.", "operations"),
        Entry("worker", "Do background work, beside a service on Postgres.", plugin="serve"),
        Entry("workers", "List the processes that serve or do background work.", "operations"),
        Entry("store", "The stores, and whose they are.", "catalog"),
        Entry("catalog", "Compare the catalog with its stores, or rebuild it.", "catalog"),
        Entry("admin", "Work on the catalog's database itself.", plugin="serve"),
    ),
}

ENTRIES = {entry.name: entry for entries in SUBJECTS.values() for entry in entries}


# Commands that other packages hang into this CLI: entry points of the group `holdfast.commands`.
#
# Each names a function `register(app: typer.Typer)`. One is loaded when a command of its name is asked for: loading
# torch to list runs would take seconds. One whose packages are not installed stays in the list and says which extra to
# install.

GROUP = "holdfast.commands"
_DISTRIBUTION = "holdfast"
_EVERYTHING = "dev"


def plugin_names() -> list[str]:
    return sorted({point.name for point in entry_points(group=GROUP)})


def load_plugin(name: str) -> typer.Typer:
    """An app that holds the plug-in's commands, or one of its name that says what is missing."""
    (point, *_) = entry_points(group=GROUP, name=name)
    app = typer.Typer(rich_markup_mode=None)
    try:
        point.load()(app)
    except ImportError as error:
        app = typer.Typer(rich_markup_mode=None)
        _register_absent(app, point, error)
    return app


def _register_absent(app: typer.Typer, point: EntryPoint, error: ImportError) -> None:
    module = (error.name or "").partition(".")[0]
    extra = _extra_that_has(module)
    remedy = f'Install it with: pip install "{_DISTRIBUTION}[{extra}]"' if extra else "Install that package."

    @app.command(
        name=point.name,
        help=f"(Not installed: needs {module or 'a package that is not there'}.)",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    )
    def absent() -> None:
        from holdfast_client.errors import ConfigurationError

        raise ConfigurationError(
            f"`holdfast {point.name}` needs {module or point.value}, which is not installed here. {remedy}"
        )


def _extra_that_has(module: str) -> str | None:
    """The smallest of our extras that requires the module's package."""
    try:
        requirements = requires(_DISTRIBUTION) or []
    except PackageNotFoundError:
        return None
    sizes: dict[str, int] = {}
    with_module: set[str] = set()
    for requirement in requirements:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        package = re.match(r"[\w.-]+", requirement)
        if extra is None or package is None or extra[1] == _EVERYTHING:
            continue
        sizes[extra[1]] = sizes.get(extra[1], 0) + 1
        if re.sub(r"[-.]", "_", package[0]).lower() == module.lower():
            with_module.add(extra[1])
    return min(with_module, key=lambda name: sizes[name], default=None)


# `holdfast`: gathers the commands, and turns every error into one or two plain lines and an exit code.

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

    from holdfast_client.cli.output import ExitCode, exit_code_of
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
