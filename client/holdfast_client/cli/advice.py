"""`holdfast advise`: how often a run should save, and why."""

from __future__ import annotations

import typer

from holdfast_client.cli.arguments import JsonOption, RunArgument, read_run
from holdfast_client.cli.connect import connect
from holdfast_client.cli.say import show_line
from holdfast_client.cli.show import show_json
from holdfast_protocol.advice import AdviceView
from holdfast_protocol.counted import counted


def register(app: typer.Typer) -> None:
    app.command("advise")(advise)


def advise(run: RunArgument, json: JsonOption = False) -> None:
    """Say how often a run should save, and why."""
    name = read_run(run)
    with connect() as client:
        found = client.advice(name.project, name.run)
    if json:
        show_json(found)
    else:
        _show(found)


def _show(found: AdviceView) -> None:
    steps = "" if found.steps is None else f" (about {counted(found.steps, 'step')} at its rate)"
    show_line(f"{found.project}/{found.run}: save every {_minutes(found.interval_seconds)}{steps}")
    for reason in found.reasons:
        show_line(f"  {reason}")
    if len(found.outlook) == 3:
        half, at, twice = (f"{100 * each.lost_share:.2g}%" for each in found.outlook)
        show_line(f"  Lost to saves and to work done again: {at} of training; {half} at half of it, {twice} at twice.")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
