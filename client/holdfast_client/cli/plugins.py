"""Commands that other packages hang into this CLI: entry points of the group `holdfast.commands`.

Each names a function `register(app: typer.Typer)`. One is loaded when a command of its name is asked for: loading torch
to list runs would take seconds. One whose packages are not installed stays in the list and says which extra to
install.
"""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires

import typer

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
