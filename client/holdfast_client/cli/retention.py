"""`holdfast retention plan | apply | policy | presets`: what stays of a run, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from holdfast_client.cli.arguments import JsonOption, RunArgument, connect, read_run
from holdfast_client.cli.output import NOTHING, ExitCode, as_bytes, as_time, show_json, show_table
from holdfast_client.cli.policies import TargetArgument, checked_policy, own_policy, put_own, read_target, show_policy
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.errors import PolicyNotFound
from holdfast_protocol.policies import PolicyKind
from holdfast_protocol.pruning import PlannedCheckpoint, Pruned, RetentionPlan
from holdfast_protocol.retention import PRESETS, Reason, RetentionPolicy
from holdfast_protocol.text import counted


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="What stays of a run, and why.", no_args_is_help=True, rich_markup_mode=None)
    group.command("plan")(with_rules(plan))
    group.command("apply")(apply)
    group.command("policy")(with_rules(policy))
    group.command("presets")(presets)
    app.add_typer(group, name="retention")


# The rules of a retention policy as options of a command: `--keep-last 3 --keep-within-daily 7d --keep-best loss:3`.
#
# They are made of the model, so that a rule is described in one place.

_SEVERAL = ("keep_best", "keep_labels")
_OPTIONS = {"keep_labels": "--keep-label"}
_METAVARS = {"keep_best": "METRIC[:max][:N]", "keep_labels": "LABEL"}


def with_rules(command: Callable[..., None]) -> Callable[..., None]:
    """`command(rules=…)`, as typer sees it: an option per rule instead of `rules`, a document with those given."""

    def run(**given: Any) -> None:
        rules = {name: _value(name, given.pop(name)) for name in RetentionPolicy.model_fields}
        command(rules={name: value for name, value in rules.items() if value is not None}, **given)

    own = inspect.signature(command, eval_str=True)
    parameters = [each for each in own.parameters.values() if each.name != "rules"]
    parameters += [_parameter(name) for name in RetentionPolicy.model_fields]
    run.__signature__ = own.replace(parameters=[_by_keyword(each) for each in parameters])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    return run


def _by_keyword(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _parameter(name: str) -> inspect.Parameter:
    field = RetentionPolicy.model_fields[name]
    option = typer.Option(
        _OPTIONS.get(name, "--" + name.replace("_", "-")),
        help=field.description,
        metavar=_METAVARS.get(name, "SPAN" if "within" in name else "N"),
        show_default=False,
    )
    kind = list[str] | None if name in _SEVERAL else str | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind, option],
    )


def _value(name: str, text: Any) -> Any:
    """As the document has it. What is no number is left to the model, which says what it must be."""
    if text is None or text == []:
        return None
    if name == "keep_best":
        return [_best(each) for each in text]
    if isinstance(text, str) and text.isdecimal():
        return int(text)
    return text


def _best(text: str) -> dict[str, Any]:
    metric, *rest = text.split(":")
    best: dict[str, Any] = {"metric": metric}
    for part in rest:
        best["n" if part.isdecimal() else "mode"] = int(part) if part.isdecimal() else part
    return best


# `holdfast retention plan | apply | policy | presets`: what stays of a run, and why.

Preset = StrEnum("Preset", {name.replace("-", "_").upper(): name for name in PRESETS})  # type: ignore[misc]
PresetOption = Annotated[
    Preset | None, typer.Option(help="The rules of a preset; what else is given is added to them.")
]


class PresetShown(BaseModel):
    name: str
    rules: dict[str, Any]


class Show(StrEnum):
    ALL = "all"
    KEEP = "keep"
    EXPIRE = "expire"
    NONE = "none"


ShowOption = Annotated[Show, typer.Option(help="Which checkpoints are listed.")]


def plan(
    run: RunArgument,
    *,
    preset: PresetOption = None,
    show: ShowOption = Show.ALL,
    json: JsonOption = False,
    rules: dict[str, Any],
) -> None:
    """Show which checkpoints stay and which expire, with every reason. With rules or a preset: what if these held."""
    name = read_run(run)
    asked = _document(preset, rules)
    with connect() as client:
        found = client.retention.plan(name.project, name.run, policy=asked, show=show.value)
    if json:
        show_json(found)
        return
    if found.checkpoints:
        _show_checkpoints(found.checkpoints)
    _tell(found)


def apply(
    run: RunArgument,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it, only show what would expire.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would expire.")] = False,
    json: JsonOption = False,
) -> None:
    """Expire what the run's policy does not keep. The service does this by itself, too; this does it now."""
    name = read_run(run)
    with connect() as client:
        found = client.retention.plan(name.project, name.run, show="expire")
        really = yes and not dry_run and found.policy_digest is not None
        results: list[Pruned] = []
        if really:
            for part in client.retention.apply(found):
                results.append(part)
                if not json and len(found.checkpoints) > len(part.trashed):
                    show_note(f"{sum(len(one.trashed) for one in results)} of {found.expired} expired")
    if not really:
        _only_shown(found, dry_run=dry_run, json=json)
        return
    if json:
        show_json(results)
        return
    show_pruned(results, nothing=f"{name} has nothing that expires.")


def policy(
    target: TargetArgument,
    *,
    preset: PresetOption = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the target's own policy.")] = False,
    json: JsonOption = False,
    rules: dict[str, Any],
) -> None:
    """Show the retention policy that holds; with rules or a preset, put these in its place."""
    project, run = read_target(target)
    document = _document(preset, rules)
    if delete and document is not None:
        raise typer.BadParameter("--delete goes without rules.")
    with connect() as client:
        if delete:
            own = own_policy(client, PolicyKind.RETENTION, project, run)
            if own is None:
                raise PolicyNotFound(f"{target} has no retention policy of its own.")
            view = client.policies.delete(PolicyKind.RETENTION, project, run, etag=own.etag)
        elif document is not None:
            view = put_own(client, PolicyKind.RETENTION, project, run, document)
        else:
            view = client.policies.get(PolicyKind.RETENTION, project, run)
    show_policy(view, json=json)
    if document is not None and not json:
        of_run = f"holdfast retention plan {target}" if run else f"holdfast retention plan {target}/RUN"
        show_note(f"It holds from now on. `{of_run}` shows what will expire.")


def presets(json: JsonOption = False) -> None:
    """List the presets and their rules."""
    if json:
        show_json(PresetShown(name=name, rules=each.rules()) for name, each in PRESETS.items())
        return
    show_table(
        ["preset", "rules"],
        (
            (name, " ".join(_option(rule, value) for rule, value in each.rules().items()))
            for name, each in PRESETS.items()
        ),
        nothing="There are no presets.",
    )


def show_pruned(results: Sequence[Pruned], *, nothing: str) -> None:
    """What went, what stays and why, and the bytes."""
    trashed = [each for one in results for each in one.trashed]
    left = [each for one in results for each in one.left]
    for each in left:
        show_note(f"step {each.step} of attempt {each.attempt} stays: {words(each.reasons)}")
    if not trashed:
        show_note(nothing)
        return
    freed = sum(one.freed.bytes for one in results)
    dry = any(one.dry_run for one in results)
    until = min((one.purge_at for one in results if one.purge_at is not None), default=None)
    show_line(
        counted(len(trashed), "checkpoint")
        + (" would go to the trash" if dry else " went to the trash")
        + (f", until {as_time(until)} UTC." if until is not None else ".")
    )
    show_line(f"{_bytes(freed)} {'would be' if dry else 'will be'} freed, net of what others share.")


def _bytes(count: int) -> str:
    return f"{counted(count, 'byte')} ({as_bytes(count)})"


def words(reasons: Sequence[Reason]) -> str:
    return "; ".join(f"{reason.kind.replace('_', ' ')}: {reason.detail}" for reason in reasons)


def _document(preset: Preset | None, rules: dict[str, Any]) -> dict[str, Any] | None:
    """None where neither was given."""
    document = ({} if preset is None else PRESETS[preset.value].rules()) | rules
    if not document:
        return None
    checked_policy(PolicyKind.RETENTION, document)
    return document


def _option(rule: str, value: Any) -> str:
    if rule == "keep_best":
        return " ".join(f"--keep-best {one['metric']}:{one.get('mode', 'min')}:{one.get('n', 1)}" for one in value)
    if rule == "keep_labels":
        return " ".join(f"--keep-label {one}" for one in value)
    return f"--{rule.replace('_', '-')} {value}"


def _show_checkpoints(checkpoints: Sequence[PlannedCheckpoint]) -> None:
    show_table(
        [">step", ">attempt", "committed (UTC)", "", "reasons"],
        (
            (
                str(one.step),
                str(one.attempt),
                as_time(one.at),
                "keep" if one.keep else "expire",
                "; ".join(reason.detail for reason in one.reasons),
            )
            for one in checkpoints
        ),
        nothing=NOTHING,
    )


def _tell(found: RetentionPlan) -> None:
    for note in found.notes:
        show_note(note)
    show_line(f"{counted(found.kept, 'stays', 'stay')}, {counted(found.expired, 'expires', 'expire')}.")
    show_line(f"{_bytes(found.freed.bytes)} would be freed, net of what others share.")


def _only_shown(found: RetentionPlan, *, dry_run: bool, json: bool) -> None:
    if json:
        show_json(found)
    else:
        if found.checkpoints:
            _show_checkpoints(found.checkpoints)
        _tell(found)
    if found.expired and not dry_run:
        show_note("Nothing was expired. Say --yes if you mean it.")
        raise typer.Exit(ExitCode.USAGE)
