"""`holdfast runs` and `attempts`: their restore points, and where their time went. `trash` deletes and undeletes."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import JsonValue, ValidationError
from pydantic_core import to_json

from holdfast_client.cli.arguments import (
    DeletedOption,
    JsonOption,
    LimitedOption,
    LimitOption,
    OnlyProject,
    RunArgument,
    SelectorArgument,
    SinceOption,
    UntilOption,
    connect,
    first,
    read_past,
    read_run,
    read_selector,
    say_if_cut,
)
from holdfast_client.cli.main import noun
from holdfast_client.cli.output import (
    NOTHING,
    ExitCode,
    as_bytes,
    as_time,
    show_facts,
    show_json,
    show_plot,
    show_table,
)
from holdfast_client.cli.projects import EveryOption, show_deleted, show_samples
from holdfast_client.cli.say import show_line, show_note
from holdfast_protocol.attempts import AttemptView, ConfigDifference, config_differences
from holdfast_protocol.restores import Skipped, skipped_in_words
from holdfast_protocol.runs import AdviceView, EditRun, MetricCurve, MetricPoint, RunView, SpentTime
from holdfast_protocol.states import RunStatus
from holdfast_protocol.text import counted
from holdfast_protocol.usage import SampledEvery

runs = noun("runs")
attempts = noun("attempts")


@runs.command("list")
def list_runs(
    project: OnlyProject = None,
    *,
    status: Annotated[
        list[RunStatus] | None, typer.Option(help="Only runs with this status; several times: with one of them.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Only runs with this tag.")] = None,
    forked_from: Annotated[
        str | None, typer.Option(metavar="RUN", help="Only forks of this run of PROJECT, or of this checkpoint (ck_…).")
    ] = None,
    deleted: DeletedOption = False,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """List runs, how they fare, and their newest restore points.

    A job is lost once it was not heard of for the service's HOLDFAST_LOST_AFTER_SECONDS.
    """
    if forked_from is not None and project is None:
        raise typer.BadParameter("Give the project as well: forks are within one.")
    forked_from = None if forked_from is None else forked_from.removeprefix(f"{project}/")
    with connect() as client:
        runs_of = client.runs.all(project, status=status or None, tag=tag, forked_from=forked_from, deleted=deleted)
        found = first(runs_of, limit)
    if json:
        show_json(found)
        return
    if deleted:
        show_deleted((f"{run.project}/{run.name}", run.in_trash) for run in found)
        return
    show_table(
        ["run", "status", "last heard (UTC)", ">attempts", ">saved", ">restore", "committed (UTC)"],
        (
            (
                f"{run.project}/{run.name}",
                run.status.value if run.status else NOTHING,
                as_time(run.last_heard_at),
                str(run.latest_attempt),
                str(run.committed_checkpoints),
                str(run.restore_point.step) if run.restore_point else NOTHING,
                as_time(run.restore_point.committed_at if run.restore_point else None),
            )
            for run in found
        ),
        nothing=f"No run is {' or '.join(status)}. `holdfast runs list` shows how all of them fare."
        if status
        else f"No run has the tag {tag}. `holdfast runs edit PROJECT/RUN --tag {tag}` gives it to one."
        if tag
        else f"Nothing was forked from {forked_from}. `holdfast runs fork {project}/{forked_from} PROJECT/NEW` does."
        if forked_from
        else "There are no runs yet. A training job makes one when it starts.",
    )


@runs.command()
def show(run: RunArgument, json: JsonOption = False) -> None:
    """Show how a run fares, and what its checkpoints take."""
    name = read_run(run)
    with connect() as client:
        found = client.runs.get(name.project, name.run)
    if json:
        show_json(found)
        return
    point = found.restore_point
    facts = [
        ("run", str(name)),
        ("status", found.status.value if found.status else ""),
        ("why", found.status_detail or ""),
        ("last heard", f"{as_time(found.last_heard_at)} UTC" if found.last_heard_at else ""),
        ("last step", "" if found.last_step is None else str(found.last_step)),
        ("attempts", str(found.latest_attempt)),
        ("checkpoints", f"{found.committed_checkpoints} committed"),
        ("restore point", "none" if point is None else f"{name}@{point.step}#{point.attempt}"),
        ("takes", taken_by(found)),
        ("forked from", "" if found.forked_from is None else str(found.forked_from)),
        ("created", f"{as_time(found.created_at)} UTC"),
        ("tags", ", ".join(found.tags)),
        ("note", found.note),
    ]
    show_facts((fact, value) for fact, value in facts if value)


@runs.command()
def edit(
    run: RunArgument,
    *,
    tag: Annotated[list[str] | None, typer.Option(help="Give it this tag.")] = None,
    untag: Annotated[list[str] | None, typer.Option(help="Take this tag away.")] = None,
    note: Annotated[str | None, typer.Option(help='Free text in place of the note; "" takes it away.')] = None,
    json: JsonOption = False,
) -> None:
    """Tag a run, or note something on it.

    `holdfast runs list --tag NAME` finds it again.
    """
    if not tag and not untag and note is None:
        raise typer.BadParameter("Give --tag, --untag or --note.")
    name = read_run(run)
    with connect() as client:
        found = client.runs.get(name.project, name.run)
        said: dict[str, object] = {} if note is None else {"note": note}
        if tag or untag:
            said["tags"] = sorted({*found.tags, *(tag or ())} - set(untag or ()))
        edited = client.runs.edit(name.project, name.run, _edit_of(said), found.etag)
    if json:
        show_json(edited)
        return
    show_facts([("tags", ", ".join(edited.tags) or NOTHING), ("note", edited.note or NOTHING)])


def _edit_of(said: dict[str, object]) -> EditRun:
    try:
        return EditRun.model_validate(said)
    except ValidationError as error:
        raise typer.BadParameter(
            f"{error.errors()[0]['msg']}. A tag is letters, digits and ._:/- without blanks."
        ) from None


@runs.command()
def fork(
    selector: SelectorArgument,
    new: Annotated[str, typer.Argument(metavar="PROJECT/NEW", help="The run that it makes, in the same project.")],
    json: JsonOption = False,
) -> None:
    """Make a run that begins with a checkpoint of another.

    No byte is copied. The two runs go on without each other: either may be deleted. Labels, pins and holds do not come
    along.
    """
    source, point = read_selector(selector)
    name = read_run(new)
    if name.project != source.project:
        raise typer.BadParameter(
            f"{source} and {name} are of two projects, which share no chunks. Take the model there as a file: "
            f"`holdfast checkpoints pull {source}@{point} FOLDER`, then `holdfast import FOLDER/model.pt {name}@STEP`."
        )
    with connect() as client:
        made = client.runs.fork(source, name.run, str(point))
    if json:
        show_json(made)
        return
    at = made.restore_point
    show_facts(
        [
            ("run", str(name)),
            ("forked from", str(made.forked_from)),
            ("restore point", NOTHING if at is None else f"{name}@{at.step}#{at.attempt}"),
        ]
    )


def taken_by(run: RunView) -> str:
    """The bytes of all its committed checkpoints. Their bytes in the store may serve other runs too."""
    figures = {"logical": run.logical_bytes, "stored": run.stored_bytes, "deduplicated": run.deduplicated_bytes}
    return ", ".join(f"{name} {as_bytes(count)}" for name, count in figures.items() if count is not None)


_SHOWN_LETTERS = 200


@attempts.command("list")
def list_attempts(run: RunArgument, *, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List the attempts of a run, the newest first.

    A job is lost once it was not heard of for the service's HOLDFAST_LOST_AFTER_SECONDS. The last column tells why an
    attempt began no later: the newer checkpoints that could not be restored then.
    """
    name = read_run(run)
    with connect() as client:
        found = first(client.attempts.all(name.project, name.run), limit)
    if json:
        show_json(found)
        return
    show_table(
        [">attempt", "last heard (UTC)", ">step", "outcome", "host", "why", "skipped"],
        (
            (
                str(attempt.number),
                as_time(attempt.heartbeat_at or attempt.opened_at),
                NOTHING if attempt.last_step is None else str(attempt.last_step),
                _outcome(attempt),
                attempt.host or NOTHING,
                _why(attempt),
                skipped_in_words(attempt.skipped or ())[:_SHOWN_LETTERS] or NOTHING,
            )
            for attempt in found
        ),
        nothing=f"{name} has no attempts yet. A training job opens one when it starts.",
    )


@attempts.command("show-config")
def show_config(
    run: RunArgument,
    *,
    attempt: Annotated[int | None, typer.Option(min=1, help="In place of the newest.")] = None,
    against: Annotated[int | None, typer.Option(min=1, help="Compare with this attempt, not the one before.")] = None,
    json: JsonOption = False,
) -> None:
    """Show what a job was told to train, and what changed.

    A job tells it by `Checkpointer(config=…)`.
    """
    name = read_run(run)
    with connect() as client:
        number = attempt or client.runs.get(name.project, name.run).latest_attempt
        found = client.attempts.config(name.project, name.run, number, against=against)
    if json:
        show_json(found)
        return
    if found.config is None:
        show_line(f"Attempt {number} of {name} gave no configuration. Give it: `Checkpointer(config=…)`.")
        return
    show_facts((leaf.path, _value(leaf.after)) for leaf in config_differences({}, found.config))
    if found.compared_with is None:
        return
    show_line("")
    show_table(
        ["value", f"attempt {found.compared_with}", f"attempt {number}"],
        (
            (each.path, config_side(each, "added", each.before), config_side(each, "removed", each.after))
            for each in found.differences
        ),
        nothing=f"Attempt {found.compared_with} had the same.",
    )
    if found.differences_left_out:
        show_note(f"holdfast: {found.differences_left_out} differences more")


def config_side(difference: ConfigDifference, absent_if: str, value: JsonValue) -> str:
    return NOTHING if difference.change == absent_if else _value(value)


def _value(value: JsonValue) -> str:
    return value if isinstance(value, str) and value else to_json(value).decode()


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


@runs.command("restore-point")
def restore_point(selector: SelectorArgument, json: JsonOption = False) -> None:
    """Tell what would be restored, and why nothing newer.

    Exit code 3 if there is none.
    """
    name, point = read_selector(selector)
    with connect() as client:
        decision = client.restores.restore_point(name.project, name.run, str(point))
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
        show_skipped(decision.skipped)
    else:
        show_skipped(decision.skipped)
        why = "none of its checkpoints can be restored now" if decision.ever_committed else "nothing was ever committed"
        show_note(f"holdfast: {name} has no restore point at {point}: {why}.")
    if found is None:
        raise typer.Exit(ExitCode.NOT_FOUND)


def show_skipped(skipped: list[Skipped]) -> None:
    if skipped:
        show_line("\nskipped:")
        show_table(
            [">step", ">attempt", "reason", "detail"],
            ((str(one.step), str(one.attempt), one.reason.value, one.detail) for one in skipped),
            nothing="",
        )


@runs.command()
def goodput(run: RunArgument, json: JsonOption = False) -> None:
    """Show where a run's time went, and how much of it was lost."""
    name = read_run(run)
    with connect() as client:
        found = client.insights.goodput(name.project, name.run)
    if json:
        show_json(found)
        return
    show_table(
        [">attempt", "outcome", ">steps", ">lost", ">wall", ">kept", ">lost s", ">save", ">restore", ">start", ">idle"],
        (
            *(_row(str(one.attempt), one.outcome.value if one.outcome else "open", one) for one in found.attempts),
            *([_row("all", "", found)] if found.attempts else []),
        ),
        nothing=f"{name} has no attempts yet. A training job opens one when it starts.",
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


_PLOTTED = 3
_PLOT_LETTERS, _PLOT_LINES = 72, 12


@runs.command()
def history(
    run: RunArgument,
    *,
    metric: Annotated[list[str] | None, typer.Option(help="Only this metric; may be given again.")] = None,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="All that this attempt measured, not only what the run still has.")
    ] = None,
    from_step: Annotated[int | None, typer.Option(min=0, help="The first step.")] = None,
    to_step: Annotated[int | None, typer.Option(min=0, help="The last step.")] = None,
    points: Annotated[int | None, typer.Option(min=4, max=2000, help="Of each metric, at most.")] = None,
    json: JsonOption = False,
) -> None:
    """Plot what a run's jobs measured, step by step.

    A job tells it by `ckpt.step(step, state, metrics={"loss": loss})`. What a rollback has left behind is not shown;
    `--attempt` shows it. A `+` on the axis is where another attempt begins, a `!` a value that is not finite.
    """
    name = read_run(run)
    with connect() as client:
        found = client.runs.metrics_history(
            name.project,
            name.run,
            names=metric or (),
            from_step=from_step,
            to_step=to_step,
            points=points,
            attempt=attempt,
        )
    if json:
        show_json(found)
        return
    curves = [curve for curve in found.metrics if curve.points]
    if found.names:
        nothing = f"{name} has none of this. It has curves of: {', '.join(found.names)}."
    else:
        nothing = f"{name} has no curves yet. Its job tells them: `ckpt.step(step, state, metrics=…)`."
    show_table(
        ["metric", ">points", ">first step", ">last step", ">last", ">least", ">greatest", "not finite"],
        map(_figures, curves),
        nothing=nothing,
    )
    for curve in curves[:_PLOTTED]:
        show_line(f"\n{curve.name}")
        show_plot(curve.points, width=_PLOT_LETTERS, height=_PLOT_LINES)
    if len(curves) > _PLOTTED:
        show_note(f"holdfast: the first {_PLOTTED} are plotted; --metric NAME plots another")


def _figures(curve: MetricCurve) -> list[str]:
    values = [point.value for point in curve.points if point.value is not None]
    return [
        curve.name,
        str(len(curve.points)),
        str(curve.points[0].step),
        str(curve.points[-1].step),
        _number(curve.points[-1]),
        *(f"{pick(values):.6g}" if values else NOTHING for pick in (min, max)),
        ", ".join(f"{point.nonfinite} at {point.step}" for point in curve.points if point.nonfinite)[:_SHOWN_LETTERS],
    ]


def _number(point: MetricPoint) -> str:
    return point.nonfinite or f"{point.value:.6g}"


@runs.command()
def samples(
    run: RunArgument,
    *,
    every: EveryOption = SampledEvery.HOUR,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: LimitedOption = 24,
    json: JsonOption = False,
) -> None:
    """Show a run's goodput and restore point over time.

    The newest first, of the hours at whose end it had an open attempt.
    """
    name, begins, ends = read_run(run), read_past(since), read_past(until)
    with connect() as client:
        found = first(
            client.insights.all_run_samples(name.project, name.run, every=every, since=begins, until=ends), limit
        )
    if json:
        show_json(found)
        return
    say_if_cut(found, limit)
    cells = (
        [
            NOTHING if one.restore_point_step is None else str(one.restore_point_step),
            NOTHING if one.last_step is None else str(one.last_step),
            str(one.committed_checkpoints),
            as_bytes(one.logical_bytes),
        ]
        for one in found
    )
    show_samples(every, found, [">its step", ">last step", ">saved", ">logical"], cells)


@runs.command()
def advise(run: RunArgument, json: JsonOption = False) -> None:
    """Say how often a run should save, and why."""
    name = read_run(run)
    with connect() as client:
        found = client.insights.save_interval(name.project, name.run)
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
