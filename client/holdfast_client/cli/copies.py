"""`holdfast copies`, `drills`, `scrubs`, `chunks`, and `checkpoints impact`: copies, and which of them are good."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from holdfast_client.cli.arguments import (
    WHICH,
    JsonOption,
    LimitOption,
    ProjectArgument,
    SelectorArgument,
    TargetArgument,
    WaitOption,
    connect,
    first,
    read_run,
    read_selector,
    read_target,
    select,
)
from holdfast_client.cli.checkpoints import checkpoints
from holdfast_client.cli.main import noun
from holdfast_client.cli.operations import run_to_end
from holdfast_client.cli.output import NOTHING, ExitCode, as_bytes, as_time, show_facts, show_json, show_table
from holdfast_client.cli.runs import show_skipped
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.client import Client
from holdfast_protocol.copies import CopyView, DrillResult, GoodStep, Impact, RunCopies, ScrubMode, ScrubResult
from holdfast_protocol.service import OperationView
from holdfast_protocol.states import StoreRole
from holdfast_protocol.text import counted

copies = noun("copies")
drills = noun("drills")
scrubs = noun("scrubs")
chunks = noun("chunks")


def _compared(one: RunCopies) -> str:
    """`5 h of 1 h, late`."""
    if one.rpo_objective_seconds is None or one.rpo_seconds is None:
        return NOTHING
    late = ", late" if _is_late(one) else ""
    return f"{_duration(one.rpo_seconds)} of {_duration(one.rpo_objective_seconds)}{late}"


def _is_late(one: RunCopies) -> bool:
    return one.rpo_objective_seconds is not None and (one.rpo_seconds or 0) > one.rpo_objective_seconds


@copies.command("list")
def list_copies(
    target: TargetArgument,
    *,
    late: Annotated[bool, typer.Option("--late", help="Only runs that miss their objective (RPO).")] = False,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """Tell run by run how far the second store is behind."""
    with connect() as client:
        project, run = read_target(target)
        if run is None:
            found = first(client.copies.all(project, late=late), limit)
        else:
            found = [one for one in [client.copies.of_run(project, run)] if _is_late(one) or not late]
    if json:
        show_json(found)
        return
    show_table(
        [
            *("run", "policy", ">newest", ">copied", ">behind", ">objective", ">steps", ">to copy", ">waiting"),
            "last problem",
        ],
        (
            (
                f"{one.project}/{one.run}",
                _policy(one),
                _step(one.newest_step),
                _step(one.copied_step),
                _duration(one.lag_seconds),
                _compared(one),
                str(one.lag_steps),
                as_bytes(one.lag_bytes),
                str(one.waiting),
                one.error or NOTHING,
            )
            for one in found
        ),
        nothing=f"{target} misses no objective (RPO)."
        if late
        else f"{target} has no runs yet. A training job makes one when it starts.",
    )


@drills.command("start")
def start_drill(
    selector: SelectorArgument,
    *,
    store: Annotated[StoreRole, typer.Option(help="The only store that is read.")] = StoreRole.SECOND,
    wait: WaitOption = True,
    json: JsonOption = False,
) -> None:
    """Restore from one store alone, and verify every byte.

    It says how long that takes (RTO), and how far behind the newest checkpoint it is (RPO). A step or an id that is
    named is restored, and no other one instead.
    Exit code 1 if it cannot be restored, or an objective of the project or run is not met.
    """
    name, point = read_selector(selector)
    with connect() as client:
        started = client.copies.drill(name.project, name.run, str(point), store)
        ended = run_to_end(client, started, wait=wait, json=json)
    if ended is None:
        return
    result = DrillResult.model_validate(ended.result)
    if not json:
        _show(result)
    if result.missed:
        show_note(f"It was restored, and misses the objective: {' and '.join(result.missed)}.")
        raise typer.Exit(ExitCode.FAILED)


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
            (
                "RTO",
                f"{result.seconds:.1f} s, {as_bytes(round(result.bytes_per_second))}/s"
                + _objective(result.rto_objective_seconds),
            ),
            ("RPO", _behind(result) + _objective(result.rpo_objective_seconds)),
        ]
    )
    show_skipped(result.skipped)


def _objective(seconds: float | None) -> str:
    return "" if seconds is None else f"; the objective is {_duration(seconds)}"


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


_DIGEST = re.compile(r"[0-9a-f]{64}")


@scrubs.command("start")
def start_scrub(
    selector: Annotated[
        str, typer.Argument(metavar="PROJECT/RUN[@WHICH]", help=f"A whole run; with @ one checkpoint: {WHICH}")
    ],
    *,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Only compare sizes and checksums that the stores report: cheap.")
    ] = False,
    wait: WaitOption = True,
    json: JsonOption = False,
) -> None:
    """Read stored bytes again, repair bad copies, report lost chunks.

    Exit code 6 if a chunk is lost or a store could not be read.
    """
    with connect() as client:
        started = _start(client, selector, ScrubMode.METADATA if metadata else ScrubMode.READ)
        ended = run_to_end(client, started, wait=wait, json=json)
    if ended is None:
        return
    result = ScrubResult.model_validate(ended.result)
    if not json:
        show_facts(_facts(result))
    if result.lost or result.unread or result.marked:
        raise typer.Exit(ExitCode.INTEGRITY)


@chunks.command("impact")
def impact_of_chunk(
    digest: Annotated[str, typer.Argument(metavar="DIGEST", help="The chunk's SHA-256.")],
    json: JsonOption = False,
) -> None:
    """Tell who needs a bad chunk, and the nearest good steps."""
    if not _DIGEST.fullmatch(digest):
        raise typer.BadParameter(
            "A digest has 64 hexadecimal digits. For a checkpoint there is `holdfast checkpoints impact`."
        )
    with connect() as client:
        _show_impact(client.scrubs.impact_of_chunk(digest), json=json)


@checkpoints.command("impact")
def impact_of_checkpoint(selector: SelectorArgument, json: JsonOption = False) -> None:
    """Tell what its bad chunks mean, and the nearest good steps."""
    with connect() as client:
        chosen = select(client, selector)
        _show_impact(client.scrubs.impact_of_checkpoint(chosen.id), json=json)


@copies.command("list-bad")
def list_bad_copies(
    project: ProjectArgument,
    *,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """List the copies that are bad or suspect, oldest finding first."""
    with connect() as client:
        found = first(client.scrubs.all_bad_copies(project), limit)
    if json:
        show_json(found)
        return
    show_table(
        ["chunk", "store", "state", "found", ">size", ">checkpoints", "lost"],
        (
            (
                one.digest[:12],
                _store(one),
                one.state.value,
                one.finding or NOTHING,
                as_bytes(one.bytes),
                str(one.checkpoints),
                "lost" if one.lost else NOTHING,
            )
            for one in found
        ),
        nothing=f"Nothing in {project} is known to be bad. `holdfast scrubs start {project}/RUN` reads a run again.",
    )


def _start(client: Client, selector: str, mode: ScrubMode) -> OperationView:
    if "@" not in selector:
        run = read_run(selector)
        return client.scrubs.run(run.project, run.run, mode)
    return client.scrubs.checkpoint(select(client, selector).id, mode)


def _facts(result: ScrubResult) -> list[tuple[str, str]]:
    counted = [
        ("copies", result.copies),
        ("good", result.good),
        ("bad", result.bad),
        ("missing", result.missing),
        ("repaired", result.repaired),
        ("cold, left out", result.cold),
        ("not read", result.unread),
        ("chunks lost", result.lost),
    ]
    facts = [(name, str(count)) for name, count in counted if count or name in ("copies", "good", "chunks lost")]
    facts.insert(1, ("read", as_bytes(result.read_bytes)))
    facts += [(f"{role} store", why) for role, why in result.problems.items()]
    return [*facts, *(("corrupt", name) for name in result.marked)]


def _show_impact(found: Impact, *, json: bool) -> None:
    if json:
        show_json(found)
        return
    if not found.chunks:
        show_line("Nothing is known to be bad: every chunk of it has a good copy and no bad one.")
        return
    show_table(
        ["chunk", ">size", "store", "state", "found", "last proven (UTC)"],
        (
            (chunk.digest[:12], as_bytes(chunk.bytes), _store(copy), copy.state.value, _finding(copy), _proven(copy))
            for chunk in found.chunks
            for copy in chunk.copies
        ),
        nothing="No copy of it is left.",
    )
    lost = [chunk.digest[:12] for chunk in found.chunks if chunk.lost]
    show_line("")
    show_facts([("lost", ", ".join(lost) or _why_none(found))])
    if found.chunks_left_off:
        show_line(f"and {counted(found.chunks_left_off, 'bad chunk')} more, and what else they concern")
    show_line("")
    show_table(
        ["run", ">checkpoints", ">lost", ">good step before", ">good step after"],
        (
            (
                f"{run.project}/{run.run}",
                str(run.checkpoints),
                str(run.lost_checkpoints),
                _good_step(run.good_before),
                _good_step(run.good_after),
            )
            for run in found.runs
        ),
        nothing="No checkpoint needs it.",
    )
    if found.checkpoints:
        show_line("")
        show_table(
            ["checkpoint", "state", "health", "lost", ">good before", ">good after"],
            (
                (
                    f"{one.project}/{one.run}@{one.step}#{one.attempt}",
                    one.state.value,
                    one.health.value,
                    "lost" if one.lost else NOTHING,
                    _good_step(one.good_before),
                    _good_step(one.good_after),
                )
                for one in found.checkpoints
            ),
            nothing="",
        )
    if found.left_off:
        show_line(f"and {found.left_off} more checkpoints")


def _why_none(found: Impact) -> str:
    """Of chunks that all have a good copy. It may be good for the attempt alone that sent it, and for no other."""
    if found.lost:
        return "what is marked below: the copies that are left are another attempt's, and nobody has read them"
    return "nothing: an attached store keeps each of them"


def _store(copy: CopyView) -> str:
    return "not attached" if copy.store is None else copy.store.value


def _finding(copy: CopyView) -> str:
    return f"{copy.finding}, repaired" if copy.repaired_at is not None else copy.finding or NOTHING


def _proven(copy: CopyView) -> str:
    return as_time(copy.verified_at)


def _good_step(good: GoodStep | None) -> str:
    return NOTHING if good is None else f"{good.step}#{good.attempt}"
