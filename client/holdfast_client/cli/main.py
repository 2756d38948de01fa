"""`holdfast`: gathers the commands, and turns every error into one or two plain lines and an exit code.

The help is written from the table of nouns alone. The modules of a noun are imported when one of its verbs runs,
because a prompt or a script must not wait for modules that it does not need.

Other packages add commands as entry points of the group `holdfast.commands`. Each is named like its command, `serve` or
`checkpoints.pull`, and names a function `register(app: typer.Typer)` that adds it. It is loaded on use: loading torch
to list runs would take seconds. If its packages are not installed, it stays in the list and says which extra to
install.
"""

from __future__ import annotations

import difflib
import os
import re
from abc import ABC, abstractmethod
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version
from typing import Annotated, Any, NamedTuple

import typer
import typer.core

from holdfast_client.cli.say import show_line, show_note


class Entry(NamedTuple):
    """A noun and its verbs in the order of the help, or a command without verbs.

    `modules` are below `holdfast_client.cli`: the first has the app, by its name, and the others add verbs to it. An
    entry without modules is a plug-in of another package.
    """

    name: str
    help: str
    verbs: str = ""
    modules: str = ""


SUBJECTS: dict[str, tuple[Entry, ...]] = {
    "Start here": (
        Entry("serve", "Run the service; without options for this machine."),
        Entry("doctor", "Check the way to the service and its store.", modules="doctor"),
        Entry("login", "Sign in at your provider, in a browser.", modules="login"),
        Entry("logout", "Revoke the token of `holdfast login`.", modules="login"),
        Entry("whoami", "Show whose token this is, and what it may do.", modules="projects"),
        Entry("ui", "Open the web page in a browser, signed in.", modules="projects"),
    ),
    "Training jobs": (
        Entry("launch", "Start a job; the exit code says how it ended.", modules="launch"),
        Entry("verify-resume", "Does this script resume exactly?"),
        Entry("spool", "Saves on this machine's disk that are not committed", "list push drop", "spool"),
        Entry("agent", "The process of this node that finishes saves of killed jobs", "serve status", "spool"),
    ),
    "Runs": (
        Entry("projects", "Projects and quotas", "list show create edit delete undelete samples", "projects trash"),
        Entry(
            "runs",
            "Runs, and their restore points",
            "list show fork edit delete undelete restore-point goodput samples advise history",
            "runs trash",
        ),
        Entry("attempts", "The launches of a run, and why each ended", "list show-config", "runs"),
    ),
    "Checkpoints": (
        Entry(
            "checkpoints",
            "Saved states of a run",
            "list show diff edit prune undelete pin unpin pull push thaw impact",
            "checkpoints copies usage trash",
        ),
        Entry("import", "Bring in a checkpoint that another tool saved."),
        Entry("holds", "Checkpoints that no policy and no person may delete", "list create extend release", "holds"),
    ),
    "What stays, and what goes": (
        Entry("policies", "Policies of projects and runs", "show put delete list-presets", "policies"),
        Entry("retention", "Which checkpoints of a run stay, and why", "plan apply", "policies"),
        Entry("collections", "Deleting unneeded copies", "plan start", "stores"),
        Entry("sweeps", "Objects in a store that no row knows", "list start", "stores"),
    ),
    "Proof and copies": (
        Entry("scrubs", "Reading stored bytes again, and repairing them", "start", "copies"),
        Entry("copies", "How far the second store is behind, and bad copies", "list list-bad", "copies"),
        Entry("drills", "Restoring from one store alone, to prove it", "start", "copies"),
        Entry("chunks", "The impact of a bad chunk", "impact", "copies"),
    ),
    "Bytes and costs": (
        Entry("usage", "Bytes of checkpoints, figure by figure", "list show", "usage"),
        Entry("costs", "Storage costs a month", "show forecast", "usage"),
        Entry("prices", "Prices that costs are computed with", "show put", "usage"),
        Entry("tiers", "When checkpoints get cold", "plan", "usage"),
    ),
    "Operating the service": (
        Entry("tokens", "Who may do what", "list create rotate revoke", "projects"),
        Entry("sessions", "Who has signed in to the web page", "list revoke", "projects"),
        Entry("webhooks", "URLs that are called on events", "list create delete test deliveries redeliver", "events"),
        Entry("events", "What happens to runs, checkpoints and stores", "list follow", "events"),
        Entry("audit", "Who changed what, and why", "list follow", "events"),
        Entry("operations", "Long work that a command has started", "list show wait cancel", "operations"),
        Entry("controllers", "Background work", "list show pause resume run", "operations"),
        Entry("workers", "Processes that serve or do background work", "list run", "operations"),
        Entry("stores", "The stores, and their owners", "list claim", "stores"),
        Entry("catalog", "The catalog against its stores", "check rebuild doubts confirm", "stores"),
        Entry(
            "admin",
            "Work on the database itself",
            "create-token raise-epoch confirm-move dashboard-role rotate-secrets migrate backup restore",
        ),
    ),
}

ENTRIES = {entry.name: entry for entries in SUBJECTS.values() for entry in entries}


def noun(name: str) -> typer.Typer:
    """The app of a noun of the table; its module adds the verbs to it."""
    return typer.Typer(
        cls=NounGroup, name=name, help=f"{ENTRIES[name].help}.", no_args_is_help=True, rich_markup_mode=None
    )


GROUP = "holdfast.commands"
_DISTRIBUTION = "holdfast"
_EVERYTHING = "dev"


def plugin_names() -> list[str]:
    return sorted({point.name for point in entry_points(group=GROUP)})


def load_plugin(name: str) -> Any:
    """The plug-in's command, or one that says which package is missing."""
    (point, *_) = entry_points(group=GROUP, name=name)
    app = typer.Typer(rich_markup_mode=None)
    try:
        point.load()(app)
    except ImportError as error:
        app = typer.Typer(rich_markup_mode=None)
        _register_absent(app, point, error)
    return typer.main.get_group(app).commands.get(_verb(name))


def _verb(plugin: str) -> str:
    return plugin.rpartition(".")[2]


def _register_absent(app: typer.Typer, point: EntryPoint, error: ImportError) -> None:
    module = (error.name or "").partition(".")[0]
    extra = _extra_that_has(module)
    remedy = f'Install it with: pip install "{_DISTRIBUTION}[{extra}]"' if extra else "Install that package."

    @app.command(
        name=_verb(point.name),
        help=f"(Not installed: needs {module or 'a package that is not there'}.)",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    )
    def absent() -> None:
        from holdfast_client.errors import ConfigurationError

        words = point.name.replace(".", " ")
        raise ConfigurationError(
            f"`holdfast {words}` needs {module or point.value}, which is not installed here. {remedy}"
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


DEBUG = "HOLDFAST_DEBUG"
# The command line's own endings. typer has its own click or takes the installed one, by its version: the parents of
# BadParameter are the right UsageError and ClickException.
_ENDINGS: tuple[type[BaseException], ...] = (
    BrokenPipeError,
    typer.Exit,
    typer.Abort,
    *(kind for kind in typer.BadParameter.__mro__ if kind.__name__ in ("UsageError", "ClickException")),
)


class _Group(typer.core.TyperGroup, ABC):
    """A mistyped command is answered with the existing ones."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            ctx.fail(f"There is no `{ctx.command_path} {args[0]}`. {self.remedy(args[0])}")
        return super().resolve_command(ctx, args)

    @abstractmethod
    def remedy(self, word: str) -> str:
        """The existing words in place of `word`."""


class NounGroup(_Group):
    """A noun: its verbs in the order of the table, and those that plug-ins add."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        plugin = f"{self.name}.{cmd_name}"
        if cmd_name not in self.commands and plugin in plugin_names():
            self.commands[cmd_name] = load_plugin(plugin)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        theirs = [_verb(name) for name in plugin_names() if name.startswith(f"{self.name}.")]
        return list(dict.fromkeys([*ENTRIES[str(self.name)].verbs.split(), *theirs]))

    def remedy(self, word: str) -> str:
        return f"`holdfast {self.name}` has: {', '.join(self.list_commands(None))}."


class HoldfastGroup(_Group):
    """Loads a command on use, and is the one place where errors end."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            entry = ENTRIES.get(cmd_name)
            if entry is not None and (entry.modules or entry.verbs):
                self.commands[cmd_name] = _load(entry)
            elif cmd_name in plugin_names():
                self.commands[cmd_name] = load_plugin(cmd_name)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({*ENTRIES, *(name for name in plugin_names() if "." not in name)})

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """By subject, from the table: the help imports only plug-ins of other packages."""
        sections = {subject: [(entry.name, _line(entry)) for entry in entries] for subject, entries in SUBJECTS.items()}
        theirs = [name for name in self.list_commands(ctx) if name not in ENTRIES]
        sections["More"] = [(name, self.get_command(ctx, name).get_short_help_str()) for name in theirs]
        for subject, rows in sections.items():
            if rows:
                with formatter.section(subject):
                    formatter.write_dl(rows)

    def remedy(self, word: str) -> str:
        names = self.list_commands(None)
        nouns = [entry.name for entry in ENTRIES.values() if word in entry.verbs.split()]
        if nouns:
            return f"Name a noun first: `holdfast NOUN {word}`, with {', '.join(nouns)}."
        near = [f"`holdfast {name}`" for name in difflib.get_close_matches(word, names, n=3)]
        guess = f"Did you mean {' or '.join(near)}? " if near else ""
        return f"{guess}There are: {', '.join(names)}."

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(error, _ENDINGS) or os.environ.get(DEBUG):
                raise
            raise typer.Exit(_report(error)) from None


def _load(entry: Entry) -> Any:
    modules = [import_module(f"holdfast_client.cli.{name}") for name in entry.modules.split()]
    group = typer.main.get_group(getattr(modules[0], entry.name) if modules else noun(entry.name))
    return group if entry.verbs else group.commands[entry.name]


def _line(entry: Entry) -> str:
    return f"{entry.help}: {', '.join(entry.verbs.split())}" if entry.verbs else entry.help


def _report(error: Exception) -> int:
    """Prints what is wrong and what to do, in a line or two; a traceback tells a user neither. Returns the exit
    code."""
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
