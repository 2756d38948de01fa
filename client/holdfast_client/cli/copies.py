"""`holdfast copies` tells how far the second store is behind; `holdfast drill` restores from it alone."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast_client.cli.arguments import JsonOption, LimitOption, first, read_run, read_selector
from holdfast_client.cli.connect import connect
from holdfast_client.cli.operations import exit_unless_done, follow
from holdfast_client.cli.say import show_line
from holdfast_client.cli.show import NOTHING, as_bytes, show_facts, show_json, show_table
from holdfast_protocol.copies import DrillResult, RunCopies
from holdfast_protocol.counted import counted
from holdfast_protocol.states import StoreRole


def register(app: typer.Typer) -> None:
    app.command("copies")(copies)
    app.command("drill")(drill)


def copies(
    which: Annotated[str, typer.Argument(metavar="PROJECT[/RUN]", help="A project, or one run of it.")],
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """Tell how far the second store is behind: what would be lost with the first."""
    with connect() as client:
        if "/" in which:
            name = read_run(which)
            found = [client.copies(name.project, name.run)]
        else:
            found = first(client.all_copies(which), limit)
    if json:
        show_json(found[0] if "/" in which else found)
        return
    show_table(
        ["run", "policy", ">newest", ">copied", ">behind", ">steps", ">to copy", ">waiting", "last problem"],
        (
            (
                f"{one.project}/{one.run}",
                _policy(one),
                _step(one.newest_step),
                _step(one.copied_step),
                _duration(one.lag_seconds),
                str(one.lag_steps),
                as_bytes(one.lag_bytes),
                str(one.waiting),
                one.error or NOTHING,
            )
            for one in found
        ),
        nothing=f"{which} has no runs.",
    )


def drill(
    selector: Annotated[
        str,
        typer.Argument(
            metavar="PROJECT/RUN[@WHICH]",
            help="latest (the default), a step (1200), a step of an attempt (1200#3), best:METRIC[:max], or an id.",
        ),
    ],
    *,
    store: Annotated[StoreRole, typer.Option(help="The only store that is read.")] = StoreRole.SECOND,
    wait: Annotated[bool, typer.Option(help="Wait for the result, with progress on stderr.")] = True,
    json: JsonOption = False,
) -> None:
    """Restore a checkpoint from one store alone and verify every byte: says how long that takes (RTO), and how far
    behind the newest one it is (RPO).

    Exit code 1 if it cannot be restored.
    """
    name, point = read_selector(selector)
    with connect() as client:
        started = client.drill(name.project, name.run, str(point), store)
        if not wait:
            if json:
                show_json(started)
            else:
                show_line(f"{started.id} is under way. `holdfast operations wait {started.id}` waits for it.")
            return
        ended = follow(client, started)
    if json:
        show_json(ended)
    exit_unless_done(ended)
    if not json:
        _show(DrillResult.model_validate(ended.result))


def _show(result: DrillResult) -> None:
    show_facts(
        [
            (
                "restored",
                f"{result.project}/{result.run}@{result.step}#{result.attempt}, from the {result.store} store",
            ),
            ("checkpoint", result.checkpoint_id),
            (
                "verified",
                f"{as_bytes(result.bytes)} in {counted(result.chunks, 'chunk')}, {counted(result.tensors, 'tensor')}, "
                "each byte",
            ),
            ("RTO", f"{result.seconds:.1f} s, {as_bytes(round(result.bytes_per_second))}/s"),
            ("RPO", _behind(result)),
        ]
    )
    if result.passed_over:
        show_line("\npassed over:")
        show_table(
            [">step", ">attempt", "reason", "detail"],
            ((str(one.step), str(one.attempt), one.reason.value, one.detail) for one in result.passed_over),
            nothing="",
        )


def _behind(result: DrillResult) -> str:
    if not result.rpo_seconds and not result.rpo_steps:
        return "nothing: it is the newest committed checkpoint"
    return f"{_duration(result.rpo_seconds)}, {counted(result.rpo_steps, 'step')} behind step {result.newest_step}"


def _policy(one: RunCopies) -> str:
    if one.store is None:
        return "no second store"
    return "yes" if one.policy else "none"


def _step(step: int | None) -> str:
    return NOTHING if step is None else str(step)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"
