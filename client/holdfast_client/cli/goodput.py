"""`holdfast goodput PROJECT/RUN`: where a run's time and its steps went."""

from __future__ import annotations

import typer

from holdfast_client.cli.arguments import JsonOption, RunArgument, read_run
from holdfast_client.cli.connect import connect
from holdfast_client.cli.say import show_line
from holdfast_client.cli.show import NOTHING, show_json, show_table
from holdfast_protocol.goodput import SpentTime


def register(app: typer.Typer) -> None:
    app.command("goodput")(goodput)


def goodput(run: RunArgument, json: JsonOption = False) -> None:
    """Show how much of a run's time went into steps that it still has, and where the rest went."""
    name = read_run(run)
    with connect() as client:
        found = client.goodput(name.project, name.run)
    if json:
        show_json(found)
        return
    show_table(
        [">attempt", "outcome", ">steps", ">lost", ">wall", ">kept", ">lost s", ">save", ">restore", ">start", ">idle"],
        (
            *(_row(str(one.attempt), one.outcome.value if one.outcome else "open", one) for one in found.attempts),
            *([_row("all", "", found)] if found.attempts else []),
        ),
        nothing=f"{name} has no attempts yet.",
    )
    if found.attempts:
        share = NOTHING if found.goodput is None else f"{found.goodput:.1%}"
        show_line(f"Goodput: {share} of the time went into steps that the run still has. From `wall` on: seconds.")


def _row(attempt: str, outcome: str, spent: SpentTime) -> list[str]:
    return [
        attempt,
        outcome,
        str(spent.steps_run),
        str(spent.steps_lost),
        *(
            f"{seconds:.0f}"
            for seconds in (
                spent.wall_seconds,
                spent.productive_seconds,
                spent.lost_seconds,
                spent.saving_seconds,
                spent.restoring_seconds,
                spent.restarting_seconds,
                spent.idle_seconds,
            )
        ),
    ]
