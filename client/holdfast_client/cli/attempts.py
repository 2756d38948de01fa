"""`holdfast attempts PROJECT/RUN`: every launch of a run, and why it ended."""

from __future__ import annotations

import typer

from holdfast_client.cli.arguments import JsonOption, LimitOption, RunArgument, first, read_run
from holdfast_client.cli.connect import connect
from holdfast_client.cli.show import NOTHING, as_time, show_json, show_table
from holdfast_protocol.attempts import AttemptView

_SHOWN_LETTERS = 200


def register(app: typer.Typer) -> None:
    app.command("attempts")(attempts)


def attempts(run: RunArgument, *, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List the attempts of a run, the newest first.

    A job is lost once it was not heard of for the service's HOLDFAST_LOST_AFTER_SECONDS.
    """
    name = read_run(run)
    with connect() as client:
        found = first(client.all_attempts(name.project, name.run), limit)
    if json:
        show_json(found)
        return
    show_table(
        [">attempt", "last heard (UTC)", ">step", "outcome", "host", "why"],
        (
            (
                str(attempt.number),
                as_time(attempt.heartbeat_at or attempt.opened_at),
                NOTHING if attempt.last_step is None else str(attempt.last_step),
                _outcome(attempt),
                attempt.host or NOTHING,
                _why(attempt),
            )
            for attempt in found
        ),
        nothing=f"{name} has no attempts yet.",
    )


def _outcome(attempt: AttemptView) -> str:
    if attempt.outcome is not None:
        return attempt.outcome.value
    if attempt.stalled_at is not None:
        return "stalled"
    return attempt.doing.value if attempt.doing else "open"


def _why(attempt: AttemptView) -> str:
    if attempt.notice is not None:
        return " ".join(part for part in (attempt.notice.source, attempt.notice.reason) if part)
    if attempt.outcome is None and attempt.stalled_at is not None:
        return f"no progress since {as_time(attempt.stalled_at)}"
    told = (attempt.outcome_detail or NOTHING).partition("\n")[0][:_SHOWN_LETTERS]
    return told if attempt.error_rank is None else f"rank {attempt.error_rank}: {told}"
