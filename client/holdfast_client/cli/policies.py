"""`holdfast policies`: what a project or a run wants; `holdfast retention`: what stays of a run by it, and why."""

from __future__ import annotations

import inspect
import json as json_module
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from holdfast_client.cli.arguments import (
    DryRunOption,
    JsonOption,
    LimitOption,
    RunArgument,
    TargetArgument,
    YesOption,
    connect,
    exit_unless_meant,
    first,
    read_run,
    read_target,
)
from holdfast_client.cli.main import noun
from holdfast_client.cli.output import NOTHING, as_bytes, as_time, show_facts, show_json, show_table
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.client import Client
from holdfast_client.errors import PolicyNotFound
from holdfast_protocol.policies.policy import PolicyError, PolicyKind, PolicyView, read_policy
from holdfast_protocol.policies.retention import PRESETS, Reason, RetentionPolicy
from holdfast_protocol.pruning import PlannedCheckpoint, Pruned, RetentionPlan
from holdfast_protocol.text import counted

policies = noun("policies")
retention = noun("retention")


_SEVERAL = ("keep_best", "keep_labels")
_OPTIONS = {"keep_labels": "--keep-label"}
_METAVARS = {"keep_best": "METRIC[:max][:N]", "keep_labels": "LABEL"}


def with_rules(command: Callable[..., None]) -> Callable[..., None]:
    """`command(rules=…)` for typer: an option per rule (`--keep-last 3 --keep-best loss:3`) instead of `rules`, a
    document of the given ones. The options are made from the model, so that a rule is described in one place."""

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
    """As in the document. A text that is no number is left to the model, which says what it must be."""
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


Preset = StrEnum("Preset", {name.replace("-", "_").upper(): name for name in PRESETS})  # type: ignore[misc]
PresetOption = Annotated[
    Preset | None, typer.Option(help="The rules of a preset; what else is given is added to them.")
]


class PresetShown(BaseModel):
    name: str
    rules: dict[str, Any]


def retention_rules(preset: Preset | None, rules: dict[str, Any]) -> dict[str, Any] | None:
    """None if neither was given."""
    document = ({} if preset is None else PRESETS[preset.value].rules()) | rules
    if not document:
        return None
    check_policy(PolicyKind.RETENTION, document)
    return document


KindArgument = Annotated[PolicyKind, typer.Argument(metavar="KIND", help="retention, copies, tiers or objectives.")]


@policies.command()
def show(kind: KindArgument, target: TargetArgument, json: JsonOption = False) -> None:
    """Show the policy that holds, and where it comes from."""
    project, run = read_target(target)
    with connect() as client:
        view = client.policies.get(kind, project, run)
    _show(view, json=json)


@policies.command()
@with_rules
def put(
    kind: KindArgument,
    target: TargetArgument,
    *,
    file: Annotated[str | None, typer.Option("--file", help="The policy as JSON; - reads stdin.")] = None,
    preset: PresetOption = None,
    json: JsonOption = False,
    rules: dict[str, Any],
) -> None:
    """Put a policy in place of the target's own.

    From a file; a retention policy also from a preset and rules.
    """
    project, run = read_target(target)
    if kind is not PolicyKind.RETENTION and (preset is not None or rules):
        raise typer.BadParameter(f"A preset and rules make a retention policy. Give the {kind} policy as --file.")
    document = retention_rules(preset, rules)
    if (file is None) is (document is None):
        raise typer.BadParameter("Give the policy as --file FILE, or a retention policy as --preset and rules.")
    if file is not None:
        document = read_document(file)
        check_policy(kind, document)
    assert document is not None
    with connect() as client:
        own = _own_policy(client, kind, project, run)
        view = client.policies.put(kind, project, run, document, etag=None if own is None else own.etag)
    _show(view, json=json)
    of_run = target if run else f"{target}/RUN"
    plans = {
        PolicyKind.RETENTION: f"`holdfast retention plan {of_run}` shows what will expire.",
        PolicyKind.TIERS: f"`holdfast tiers plan {of_run}` shows what will move.",
        PolicyKind.COPIES: f"`holdfast copies list {target}` shows how far the second store is behind.",
        PolicyKind.OBJECTIVES: f"`holdfast copies list {target}` and each drill compare with it.",
    }
    if not json:
        show_note(f"It holds from now on. {plans[kind]}")


@policies.command()
def delete(
    kind: KindArgument,
    target: TargetArgument,
    *,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Delete the target's own policy. A run has its project's from then on."""
    project, run = read_target(target)
    with connect() as client:
        own = _own_policy(client, kind, project, run)
        if own is None:
            raise PolicyNotFound(f"{target} has no {kind} policy of its own.")
        if yes and not dry_run:
            own = client.policies.delete(kind, project, run, etag=own.etag) or own
    _show(own, json=json)
    exit_unless_meant("deleted", yes=yes, dry_run=dry_run)


@policies.command("list-presets")
def list_presets(*, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List the presets of retention policies, and their rules."""
    found = first(PRESETS.items(), limit)
    if json:
        show_json(PresetShown(name=name, rules=each.rules()) for name, each in found)
        return
    show_table(
        ["preset", "rules"],
        ((name, " ".join(_option(rule, value) for rule, value in each.rules().items())) for name, each in found),
        nothing="There are no presets.",
    )


def _option(rule: str, value: Any) -> str:
    if rule == "keep_best":
        return " ".join(f"--keep-best {one['metric']}:{one.get('mode', 'min')}:{one.get('n', 1)}" for one in value)
    if rule == "keep_labels":
        return " ".join(f"--keep-label {one}" for one in value)
    return f"--{rule.replace('_', '-')} {value}"


def _own_policy(client: Client, kind: PolicyKind, project: str, run: str | None) -> PolicyView | None:
    """The target's own; None if it has none, whatever its project has."""
    try:
        view = client.policies.get(kind, project, run)
    except PolicyNotFound:
        return None
    return view if run is None or view.level == "run" else None


def check_policy(kind: PolicyKind, document: dict[str, Any]) -> None:
    """Reports errors of the document before it is sent."""
    try:
        read_policy(kind, document)
    except PolicyError as error:
        raise typer.BadParameter(str(error)) from None


def _show(view: PolicyView, *, json: bool) -> None:
    if json:
        show_json(view)
        return
    target = view.project if view.run is None else f"{view.project}/{view.run}"
    show_facts(
        [
            (f"{view.kind} policy", f"of {target}, version {view.version}"),
            ("put", f"{as_time(view.updated_at)} UTC by {view.updated_by}"),
            *((name, _shown(value)) for name, value in view.document.items()),
        ]
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(item) for item in value)
    if isinstance(value, dict):
        return " ".join(f"{name}={_shown(item)}" for name, item in value.items())
    return str(value)


def read_document(file: str) -> dict[str, Any]:
    text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    try:
        document = json_module.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{file} is not JSON: {error}.") from None
    if not isinstance(document, dict):
        raise typer.BadParameter(f"{file} must hold a JSON object.")
    return document


class Show(StrEnum):
    ALL = "all"
    KEEP = "keep"
    EXPIRE = "expire"
    NONE = "none"


ShowOption = Annotated[Show, typer.Option(help="Which checkpoints are listed.")]


@retention.command()
@with_rules
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
    asked = retention_rules(preset, rules)
    with connect() as client:
        found = client.retention.plan(name.project, name.run, policy=asked, show=show.value)
    if json:
        show_json(found)
        return
    if found.checkpoints:
        _show_checkpoints(found.checkpoints)
    _tell(found)


@retention.command()
def apply(
    run: RunArgument,
    *,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Expire the checkpoints that the run's policy does not keep, now. The service does it by itself later."""
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
        _only_shown(found, json=json)
        if found.expired:
            exit_unless_meant("expired", yes=yes, dry_run=dry_run)
        return
    if json:
        show_json(results)
        return
    show_pruned(results, nothing=f"{name} has nothing that expires.", by_policy=True)


def show_pruned(results: Sequence[Pruned], *, nothing: str, by_policy: bool = False) -> None:
    """The deleted and the remaining checkpoints, why they remain, and the bytes. `by_policy`: what is purged before its
    time while room is short."""
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
        + (f", until {as_time(until)} UTC" if until is not None else "")
        + (", or until a disk or the quota is short." if until is not None and by_policy else ".")
    )
    show_line(f"{_bytes(freed)} {'would be' if dry else 'will be'} freed, net of what others share.")


def _bytes(count: int) -> str:
    return f"{counted(count, 'byte')} ({as_bytes(count)})"


def words(reasons: Sequence[Reason]) -> str:
    return "; ".join(f"{reason.kind.replace('_', ' ')}: {reason.detail}" for reason in reasons)


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


def _only_shown(found: RetentionPlan, *, json: bool) -> None:
    if json:
        show_json(found)
    else:
        if found.checkpoints:
            _show_checkpoints(found.checkpoints)
        _tell(found)
