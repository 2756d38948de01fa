"""`holdfast restore-point PROJECT/RUN`: what a relaunch would resume from, and why not from something newer."""

from __future__ import annotations

import typer

from holdfast_client.cli.arguments import JsonOption, SelectorArgument, read_selector
from holdfast_client.cli.connect import connect
from holdfast_client.cli.exit_codes import ExitCode
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.cli.show import as_bytes, as_time, show_facts, show_json, show_table
from holdfast_protocol.restore import PassedOver


def register(app: typer.Typer) -> None:
    app.command("restore-point")(restore_point)


def restore_point(selector: SelectorArgument, json: JsonOption = False) -> None:
    """Tell which checkpoint would be restored, and which newer ones are passed over, and why.

    Exit code 3 if there is none.
    """
    name, point = read_selector(selector)
    with connect() as client:
        decision = client.restore_point(name.project, name.run, str(point))
    found = decision.restore_point
    if decision.note and not json:
        show_note(f"holdfast: {decision.note}")
    if json:
        show_json(decision)
    elif found is not None:
        show_facts(
            [
                ("restore point", f"{name}@{found.step}#{found.attempt}"),
                ("checkpoint", found.checkpoint_id),
                ("world size", str(found.world_size)),
                ("size", as_bytes(found.logical_bytes)),
                ("committed", f"{as_time(found.committed_at)} UTC"),
                ("digest", found.digest),
            ]
        )
        _show_passed_over(decision.passed_over)
    else:
        _show_passed_over(decision.passed_over)
        why = "none of its checkpoints can be restored now" if decision.ever_committed else "nothing was ever committed"
        show_note(f"holdfast: {name} has no restore point at {point}: {why}.")
    if found is None:
        raise typer.Exit(ExitCode.NOT_FOUND)


def _show_passed_over(passed_over: list[PassedOver]) -> None:
    if passed_over:
        show_line("\npassed over:")
        show_table(
            [">step", ">attempt", "reason", "detail"],
            ((str(one.step), str(one.attempt), one.reason.value, one.detail) for one in passed_over),
            nothing="",
        )
