"""`holdfast checkpoints list | show | diff | edit | pin | unpin`; `copies`, `usage` and `trash` have others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast_client.cli.arguments import (
    WHICH,
    DeletedOption,
    DryRunOption,
    JsonOption,
    LimitedOption,
    LimitOption,
    OnlyTarget,
    ReasonOption,
    SelectorArgument,
    SinceOption,
    connect,
    first,
    read_lifetime,
    read_past,
    read_target,
    select,
)
from holdfast_client.cli.holds import hold_in_words
from holdfast_client.cli.main import noun
from holdfast_client.cli.operations import run_to_end
from holdfast_client.cli.output import NOTHING, as_bytes, as_metric, as_time, show_facts, show_json, show_table
from holdfast_client.cli.runs import config_side, taken_by
from holdfast_client.cli.say import show_line
from holdfast_protocol.attempts import CheckpointDiff, ConfigDifference
from holdfast_protocol.checkpoints import (
    CheckpointView,
    Component,
    EditCheckpoint,
    HealthVerdict,
    MetricValue,
    ShardSummary,
    ShardView,
)
from holdfast_protocol.comparison.values import MOST_TENSORS, Measured, ValuesCompared
from holdfast_protocol.states import CheckpointState, Health
from holdfast_protocol.text import counted, printable

if TYPE_CHECKING:
    from holdfast_protocol.comparison.tensors import TensorDiff

checkpoints = noun("checkpoints")


@checkpoints.command("list")
def list_checkpoints(
    target: OnlyTarget = None,
    *,
    state: Annotated[CheckpointState | None, typer.Option(help="Only in this state.")] = None,
    health: Annotated[Health | None, typer.Option(help="Only of this health.")] = None,
    min_step: Annotated[int | None, typer.Option(min=0, help="From this step on.")] = None,
    max_step: Annotated[int | None, typer.Option(min=0, help="Up to this step.")] = None,
    since: SinceOption = None,
    before: Annotated[str | None, typer.Option(help="Committed before then, likewise.")] = None,
    label: Annotated[str | None, typer.Option(help="Only with this label.")] = None,
    deleted: DeletedOption = False,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """List checkpoints, those of one run together, newest step first."""
    if deleted and state is not None:
        raise typer.BadParameter("--deleted is --state trashed: give one of them.")
    state = CheckpointState.TRASHED if deleted else state
    project, run = (None, None) if target is None else read_target(target)
    begins, ends = read_past(since), read_past(before)
    with connect() as client:
        found = first(
            client.checkpoints.all(
                project,
                run,
                state=state,
                health=health,
                min_step=min_step,
                max_step=max_step,
                committed_since=begins,
                committed_before=ends,
                label=label,
            ),
            limit,
        )
    if json:
        show_json(found)
    elif state is CheckpointState.TRASHED:
        _show_trashed(target or "this service", found)
    else:
        _show_list(target or "this service", found)


def _show_list(target: str, found: list[CheckpointView]) -> None:
    show_table(
        ["checkpoint", "state", "health", ">size", "committed (UTC)", "labels"],
        (
            (
                _name(one),
                ", ".join(
                    word for word in (one.state.value, lateness(one), "unproven" if one.unproven else "") if word
                ),
                one.health.value,
                as_bytes(one.logical_bytes),
                as_time(one.committed_at),
                ", ".join(one.labels) or NOTHING,
            )
            for one in found
        ),
        nothing=f"{target} has no such checkpoints. `holdfast runs list` shows which runs have any.",
    )


def _show_trashed(target: str, found: list[CheckpointView]) -> None:
    show_table(
        ["checkpoint", ">size", "until (UTC)", "by", "why"],
        (
            (
                _name(one),
                as_bytes(one.logical_bytes),
                as_time(one.purge_at),
                one.trashed_by or NOTHING,
                one.trash_reason or NOTHING,
            )
            for one in found
        ),
        nothing=f"The trash is empty: {target} has no deleted checkpoints to take back.",
    )


def _name(one: CheckpointView) -> str:
    """As every other command accepts it."""
    return f"{one.project}/{one.run}@{one.step}#{one.attempt}"


@checkpoints.command()
def show(
    selector: SelectorArgument,
    *,
    shards: Annotated[bool, typer.Option("--shards", help="Each rank's report on its shard; once committed.")] = False,
    json: JsonOption = False,
) -> None:
    """Show one checkpoint, whatever its state."""
    with connect() as client:
        found = select(client, selector)
        if shards:
            _show_shards(client.checkpoints.manifest(found.id).shards, json=json)
            return
        of_run = client.runs.get(found.project, found.run)
        holds = [] if json else list(client.holds.all_on(found.id))
        environment = {} if json else client.attempts.get(found.project, found.run, found.attempt).environment
    if json:
        show_json(found)
        return
    facts = [*_facts(found), ("made with", _made_with(environment)), *(("held", hold_in_words(one)) for one in holds)]
    show_facts([*((name, value) for name, value in facts if value), ("whole run", taken_by(of_run))])


def _made_with(environment: dict[str, str]) -> str:
    """The attempt's environment, as far as it makes a difference."""
    facts = dict(environment)
    commit, dirty = facts.pop("git_commit", ""), facts.pop("git_dirty", "no") == "yes"
    facts.pop("platform", None)
    known = [f"{name} {value}" for name, value in sorted(facts.items())]
    return ", ".join([*known, *([f"git {commit[:12]}{', changed' if dirty else ''}"] if commit else [])])


def lateness(one: CheckpointView) -> str:
    """A late save's result, in a word; nothing for a save in time."""
    return "detached" if one.detached else "" if one.pushed_by is None else "late"


def _pushed(one: CheckpointView) -> str:
    if one.pushed_by is None:
        return ""
    late = f"late, by attempt {one.pushed_by}"
    if not one.detached:
        return late
    return f"{late}, detached: restored as {one.step}#{one.attempt} and never as latest"


def _pin(one: CheckpointView) -> str:
    if one.pinned_at is None:
        return ""
    return f"by {one.pinned_by}{pinned_until(one)}: {one.pin_reason}"


def _trash(one: CheckpointView) -> str:
    if one.trashed_at is None:
        return ""
    why = f": {one.trash_reason}" if one.trash_reason else ""
    return f"until {as_time(one.purge_at)} UTC, by {one.trashed_by}{why}"


def _chunks(one: CheckpointView) -> str:
    """Stored bytes beside the chunks' own, if they differ."""
    size = as_bytes(one.chunk_bytes)
    if one.stored_bytes is None or one.stored_bytes in (0, one.chunk_bytes):
        return size
    return f"{size}, stored in {as_bytes(one.stored_bytes)} ({one.stored_bytes / one.chunk_bytes:.0%})"


def _facts(one: CheckpointView) -> list[tuple[str, str]]:
    facts = [
        ("checkpoint", one.id),
        ("run", f"{one.project}/{one.run}"),
        ("step", str(one.step)),
        ("attempt", str(one.attempt)),
        ("state", one.state.value),
        ("pushed", _pushed(one)),
        ("forked from", "" if one.forked_from is None else str(one.forked_from)),
        (
            "proven",
            "not yet: the service has still to read back chunks that the store has not hashed" if one.unproven else "",
        ),
        ("health", one.health.value),
        ("why", one.health_reason or ""),
        ("kind", one.kind.value),
        ("tier", one.tier.value),
        ("world size", str(one.world_size)),
        ("sealed", f"{one.sealed_ranks} of {counted(one.world_size, 'rank')}"),
        ("missing ranks", ", ".join(map(str, one.missing_ranks))),
        ("aborted", as_time(one.aborted_at) if one.aborted_at else ""),
        ("abort reason", one.abort_reason or ""),
        ("abort rank", "" if one.abort_rank is None else str(one.abort_rank)),
        ("size", as_bytes(one.logical_bytes)),
        ("chunks", _chunks(one)),
        ("sent", f"{as_bytes(one.uploaded_bytes)}, deduplicated {as_bytes(one.deduplicated_bytes)}"),
        ("blocked", "" if one.blocked_seconds is None else f"training for {one.blocked_seconds:.2f} s"),
        ("digest", one.digest or ""),
        ("created", f"{as_time(one.created_at)} UTC"),
        ("committed", f"{as_time(one.committed_at)} UTC" if one.committed_at else ""),
        ("labels", ", ".join(one.labels)),
        ("pinned", _pin(one)),
        ("in the trash", _trash(one)),
        ("deleted", f"{as_time(one.deleted_at)} UTC" if one.deleted_at else ""),
        ("metrics", ", ".join(f"{name}={as_metric(value)}" for name, value in sorted(one.metrics.items()))),
        (
            "components",
            ", ".join(f"{name} ({as_bytes(part.logical_bytes)})" for name, part in sorted(one.components.items())),
        ),
        ("lacks", ", ".join(one.missing_components)),
    ]
    return [(name, value) for name, value in facts if value]


def _show_shards(shards: list[ShardView], *, json: bool) -> None:
    """A row for each rank, and a column for each field that any of them has."""
    if json:
        show_json(shards)
        return
    said = [[_in_words(name, getattr(shard, name)) for name in ShardSummary.model_fields] for shard in shards]
    names = [name.replace("_", " ") for name in ShardSummary.model_fields]
    told = [column for column in range(len(names)) if any(row[column] for row in said)]
    show_table(
        [">rank", *(names[column] for column in told)],
        ([str(shard.rank), *(row[column] for column in told)] for shard, row in zip(shards, said, strict=True)),
        nothing="It has no shards.",
    )


def _in_words(name: str, value: Any) -> str:
    """A field of a ShardSummary, by its type and the unit that its name ends with."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{key} {_in_words(key, value[key])}" for key in sorted(value))
        case list():
            return ", ".join(map(str, value))
        case Component():
            return f"({as_bytes(value.logical_bytes)})"
        case MetricValue():
            return as_metric(value)
        case HealthVerdict():
            return "healthy" if value.healthy else value.reason or "diverged"
    return as_bytes(value) if name.endswith("_bytes") else f"{value:.2f} s" if name.endswith("_seconds") else str(value)


@checkpoints.command()
def diff(
    before: Annotated[str, typer.Argument(metavar="A", help=f"PROJECT/RUN[@WHICH]. {WHICH} Without it: latest.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Likewise, of the same run or of any other.")],
    *,
    values: Annotated[
        bool,
        typer.Option("--values", help="Have a worker read the tensors that differ: norms, largest difference, cosine."),
    ] = False,
    dry_run: DryRunOption = False,
    limit: LimitedOption = 10,
    json: JsonOption = False,
) -> None:
    """Compare two checkpoints, tensor by tensor.

    Tensors are compared by the digests of their chunks, and none is read without --values; with --dry-run that tells
    how many bytes it would read. --limit is for each kind of difference; --json has them all, but of --values the 1000
    tensors that changed most.
    """
    from holdfast_client.comparison import compare

    if dry_run and not values:
        raise typer.BadParameter("--dry-run is for --values: without it no tensor is read.")
    with connect() as client:
        found = compare(client, select(client, before).id, select(client, after).id)
        if values:
            most = MOST_TENSORS if json else max(1, min(limit, MOST_TENSORS))
            pair = (found.before.id, found.after.id)
            started = client.checkpoints.compare_values(*pair, most_tensors=most, dry_run=dry_run)
            ended = run_to_end(client, started, wait=True, json=False)
            if ended is not None:
                found = found.model_copy(update={"values": ValuesCompared.model_validate(ended.result)})
    if json:
        show_json(found)
        return
    show_table(["", "A", "B"], [*_sides(found), *_config_sides((found.config or [])[:limit])], nothing="")
    if found.config is None:
        show_line("The configurations are not compared: not both attempts have given one.")
    elif not found.config:
        show_line("The configurations are the same.")
    elif (left := len(found.config[limit:]) + found.config_left_out) > 0:
        show_line(f"The configurations have {counted(left, 'more difference')}.")
    _show_tensors(found.tensors, limit)
    if not found.other_values:
        show_line("")
        show_line("The values that are no tensors are the same.")
    _show_names("other values that are no tensors", found.other_values, limit)
    if found.values is not None:
        _show_values(found.values, dry_run=dry_run)


def _sides(found: CheckpointDiff) -> Iterator[Sequence[str]]:
    both = (found.before, found.after)
    shared = f"{counted(found.shared_chunks, 'chunk')}, {as_bytes(found.shared_bytes)}"
    yield "checkpoint", *map(_name, both)
    yield "id", *(one.id for one in both)
    yield "committed (UTC)", *(as_time(one.committed_at) for one in both)
    yield "health", *(one.health.value for one in both)
    yield "world size", *(str(one.world_size) for one in both)
    yield "size", *(as_bytes(one.logical_bytes) for one in both)
    yield "chunks", *(as_bytes(one.chunk_bytes) for one in both)
    yield "in both", shared, shared
    for part in found.components:
        sizes = (NOTHING if one is None else as_bytes(one.logical_bytes) for one in (part.before, part.after))
        yield f"component {part.name}", *sizes
    for metric in found.metrics:
        values = (NOTHING if one is None else as_metric(one) for one in (metric.before, metric.after))
        yield f"metric {metric.name}", *values


def _config_sides(found: Sequence[ConfigDifference]) -> Iterator[Sequence[str]]:
    for each in found:
        yield f"config {each.path}", config_side(each, "added", each.before), config_side(each, "removed", each.after)


def _show_tensors(found: TensorDiff, limit: int) -> None:
    """How many there are of each kind, and the first names of each that is not equal."""
    kinds = {
        "only in A": found.only_before,
        "only in B": found.only_after,
        "other shape or dtype": [f"{each.name}: {each.before}, {each.after}" for each in found.other_form],
        "other bytes": found.other_bytes,
        "undecided: in a chunk that differs, with other tensors": found.undecided,
        "cut differently: not compared by digest": found.cut_differently,
    }
    counts = [(str(len(names)), kind) for kind, names in kinds.items() if names]
    show_line("")
    show_table([">count", "tensors"], [*counts, (str(len(found.equal)), "equal")], nothing="")
    for kind, names in kinds.items():
        _show_names(kind, names, limit)


def _show_names(kind: str, names: Sequence[str], limit: int) -> None:
    if not names:
        return
    show_line("")
    show_line(f"{kind}:")
    for name in names[:limit]:
        show_line(f"  {printable(name, one_line=True)}")
    if len(names) > limit:
        show_line(f"  and {len(names) - limit} more: --limit shows more of them, --json all")


def _show_values(found: ValuesCompared, *, dry_run: bool) -> None:
    """The tensors that changed most, and each component as a whole."""
    show_line("")
    if dry_run:
        show_line(f"{counted(found.differing, 'tensor')} would be read: {as_bytes(found.bytes_to_read)} of chunks.")
    else:
        show_line(f"{as_bytes(found.read_bytes)} of chunks were read.")
        show_table(
            ["changed most", ">relative", ">|B - A|", ">|A|", ">|B|", ">largest", ">cosine", "not finite"],
            [
                *((each.name, *_measured(each)) for each in found.tensors),
                *((f"all that differ in {each.name}", *_measured(each)) for each in found.components),
            ],
            nothing="All the tensors that could differ are equal.",
        )
        if left := found.differing - len(found.tensors):
            show_line(f"and {left} more: --limit shows more of them")
    for reason, why in _NOT_COMPARED.items():
        names = [each.name for each in found.not_compared if each.reason == reason]
        _show_names(f"not compared: {why}", names, len(names))
    if found.not_compared_left_out:
        show_line(f"and {found.not_compared_left_out} more are not compared")


_NOT_COMPARED = {
    "dtype": "no real numbers of a known kind",
    "damaged": "a chunk of them cannot be read now, and is read again",
    "layout": "cut so differently that it takes too much memory or too many reads",
}


def _measured(each: Measured) -> Iterator[str]:
    numbers = (each.relative_change, each.norm_difference, each.norm_before, each.norm_after)
    yield from (_number(value) for value in (*numbers, each.largest_difference, each.cosine))
    before, after = each.nan_before + each.infinite_before, each.nan_after + each.infinite_after
    yield f"{before}, then {after}" if before or after else NOTHING


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.6g}"


class Said(StrEnum):
    """`corrupt` is missing: only the service sets and clears it."""

    OK = "ok"
    DIVERGED = "diverged"
    QUARANTINED = "quarantined"


@checkpoints.command()
def edit(
    selector: SelectorArgument,
    *,
    health: Annotated[
        Said | None, typer.Option(help="Whether jobs may resume from it; ok releases it from quarantine.")
    ] = None,
    reason: ReasonOption = "",
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A metric that was measured later; NAME= takes it away."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Quarantine a checkpoint, release it, or give it a metric.

    Each health but ok needs a reason. `best:` and policies use the metric like one of the save.
    """
    if health is None and not metric:
        raise typer.BadParameter("Give --health, or --metric, or both.")
    said = {
        "health": None if health is None else health.value,
        "health_reason": reason or None,
        "metrics": dict(map(_metric, metric)) if metric else None,
    }
    request = EditCheckpoint.model_validate({name: value for name, value in said.items() if value is not None})
    with connect() as client:
        found = select(client, selector)
        edited = client.checkpoints.edit(found.id, request, found.etag)
    if json:
        show_json(edited)
        return
    if health is not None:
        before = "" if found.health == edited.health else f", and was {found.health}"
        show_line(f"{_name(edited)} is {edited.health}{before}.")
    for name in request.metrics or ():
        value = as_metric(edited.metrics[name]) if name in edited.metrics else "taken away"
        show_line(f"{_name(edited)} {name}: {value}")


def _metric(text: str) -> tuple[str, MetricValue | None]:
    name, is_there, value = text.partition("=")
    try:
        if not name or not is_there:
            raise ValueError
        return name, MetricValue.of(float(value)) if value else None
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no metric; give NAME=VALUE, such as eval_loss=0.25.") from None


@checkpoints.command()
def pin(
    selector: SelectorArgument,
    *,
    reason: ReasonOption,
    until: Annotated[str, typer.Option(help="For so long, such as 30d, or never to end.")] = "never",
    json: JsonOption = False,
) -> None:
    """Keep a checkpoint from every policy and from prune."""
    with connect() as client:
        found = select(client, selector)
        view = client.checkpoints.pin(found.id, reason, expires_in_seconds=read_lifetime(until), etag=found.etag)
    if json:
        show_json(view)
        return
    show_line(f"{_name(view)} is pinned{pinned_until(view)}.")


@checkpoints.command()
def unpin(selector: SelectorArgument, json: JsonOption = False) -> None:
    """Take a checkpoint's pin away."""
    with connect() as client:
        found = select(client, selector)
        view = client.checkpoints.unpin(found.id, found.etag)
    if json:
        show_json(view)
        return
    show_line(f"{_name(view)} is not pinned.")


def pinned_until(view: CheckpointView) -> str:
    return "" if view.pinned_until is None else f" until {as_time(view.pinned_until)} UTC"
