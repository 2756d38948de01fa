"""`holdfast attempts PROJECT/RUN`: every launch of a run, and how it ended."""

from __future__ import annotations

import typer

from holdfast_client.cli.arguments import JsonOption, RunArgument, read_run
from holdfast_client.cli.connect import connect
from holdfast_client.cli.show import NOTHING, as_time, show_json, show_table
from holdfast_protocol.attempts import AttemptView


def register(app: typer.Typer) -> None:
    app.command("attempts")(attempts)


def attempts(run: RunArgument, json: JsonOption = False) -> None:
    """List the attempts of a run, the newest first."""
    name = read_run(run)
    with connect() as client:
        found = list(client.all_attempts(name.project, name.run))
    if json:
        show_json(found)
        return
    show_table(
        [">attempt", "opened (UTC)", "last sign (UTC)", ">world", ">step", "outcome", "host"],
        (
            (
                str(attempt.number),
                as_time(attempt.opened_at),
                as_time(attempt.ended_at or attempt.heartbeat_at),
                str(attempt.world_size),
                NOTHING if attempt.last_step is None else str(attempt.last_step),
                _outcome(attempt),
                attempt.host or NOTHING,
            )
            for attempt in found
        ),
        nothing=f"{name} has no attempts yet.",
    )


def _outcome(attempt: AttemptView) -> str:
    return attempt.outcome.value if attempt.outcome else "open"
