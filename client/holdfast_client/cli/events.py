"""`holdfast events` tells what happens, and `holdfast audit` who changed what; `holdfast webhooks` has a URL called."""

from __future__ import annotations

import json as json_lines
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast_client.cli.arguments import (
    DryRunOption,
    JsonOption,
    LimitedOption,
    LimitOption,
    OnlyOf,
    ProjectArgument,
    SinceOption,
    UntilOption,
    YesOption,
    connect,
    exit_unless_meant,
    first,
    read_past,
    read_selector,
    say_if_cut,
)
from holdfast_client.cli.main import noun
from holdfast_client.cli.output import NOTHING, ExitCode, as_time, show_json, show_table
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.client import Client
from holdfast_client.resources.base import all_items
from holdfast_protocol.base import Page
from holdfast_protocol.events import EventData, EventType, EventView
from holdfast_protocol.runs import ById
from holdfast_protocol.service import ActorKind, AuditEventView
from holdfast_protocol.webhooks import CreateWebhook, DeliveryView, WebhookFormat

audit = noun("audit")
events = noun("events")
webhooks = noun("webhooks")


_FOLLOW_SECONDS = 2.0
_LONGEST_WRITE = timedelta(minutes=2)
"""An event has its id and its time before its transaction commits. It may be seen so much later, behind newer ones."""


ActorOption = Annotated[str | None, typer.Option(help="Only by this token's name or controller.")]
PeopleOption = Annotated[bool, typer.Option("--people", help="Only changes by people, not by controllers.")]
ActionOption = Annotated[
    list[str] | None, typer.Option(help="Only actions with this prefix: hold., checkpoint.trash; or several times.")
]
_ReadPage = Callable[[datetime | None, str | None], Page[AuditEventView]]
"""From a time on, a page."""


@audit.command("list")
def list_audit_events(
    what: OnlyOf = None,
    *,
    actor: ActorOption = None,
    people: PeopleOption = False,
    action: ActionOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: LimitedOption = 50,
    json: JsonOption = False,
) -> None:
    """List who changed what and why, the newest first."""
    with connect() as client:
        page = _pages(client, what, actor=actor, people=people, action=action, until=until, limit=limit)
        found = first(all_items(partial(page, read_past(since))), limit)
    if json:
        show_json(found)
        return
    say_if_cut(found, limit)
    show_table(
        ["when (UTC)", "who", "what", "of", "why", "changed"],
        (
            (as_time(one.at), one.actor, one.action, _of(one) or NOTHING, one.reason or NOTHING, _changed(one))
            for one in found
        ),
        nothing="There are no such events. With fewer conditions there may be some.",
    )


@audit.command()
def follow(
    what: OnlyOf = None,
    *,
    actor: ActorOption = None,
    people: PeopleOption = False,
    action: ActionOption = None,
    since: SinceOption = None,
    limit: LimitedOption = 50,
    json: JsonOption = False,
) -> None:
    """Show the newest events, and go on as events come.

    The oldest of them comes first. With --json each is one line.
    """
    with connect() as client:
        page = _pages(client, what, actor=actor, people=people, action=action, until=None, limit=500)
        for event in _followed(page, read_past(since), limit, lambda: client.service.info().now):
            show_line(json_lines.dumps(event.model_dump(mode="json")) if json else _line(event))


def _pages(
    client: Client,
    what: str | None,
    *,
    actor: str | None,
    people: bool,
    action: list[str] | None,
    until: str | None,
    limit: int,
) -> _ReadPage:
    chosen = _chosen(client, what)
    kind: ActorKind | None = "person" if people else None
    ends = read_past(until)

    def page(since: datetime | None, cursor: str | None) -> Page[AuditEventView]:
        return client.audit.list(
            **chosen,
            actor=actor,
            actor_kind=kind,
            action=action,
            since=since,
            until=ends,
            cursor=cursor,
            limit=min(limit, 500),
        )

    return page


def _chosen(client: Client, what: str | None) -> dict[str, Any]:
    if what is None:
        return {}
    if "/" not in what:
        return {"project": what}
    if "@" not in what:
        # The name is not checked as a run's, because a purged one is called demo/gpt~<id>.
        project, _, run = what.partition("/")
        return {"project": project, "run": run}
    name, point = read_selector(what)
    if isinstance(point, ById):  # its row may be gone, and its events are not
        return {"checkpoint": point.checkpoint_id}
    return {"checkpoint": client.checkpoints.select(name.project, name.run, str(point)).id}


def _followed(
    read_page: _ReadPage, begins: datetime | None, limit: int, now: Callable[[], datetime]
) -> Iterator[AuditEventView]:
    """First the newest ones, then each new one, the oldest first; until the user ends it. `now`: by the service's
    clock, which dates the events and may be put back."""
    since = now() - _LONGEST_WRITE
    # Before the newest: what commits in between is told, and older ones are not taken for new.
    seen = {event.id: event.at for event in all_items(partial(read_page, since))}
    fresh = first(all_items(partial(read_page, begins)), limit)
    while True:
        for event in reversed(fresh):
            seen[event.id] = event.at
            yield event
        time.sleep(_FOLLOW_SECONDS)
        since = now() - _LONGEST_WRITE
        seen = {each: at for each, at in seen.items() if at >= since}
        fresh = [event for event in all_items(partial(read_page, since)) if event.id not in seen]


def _of(event: AuditEventView) -> str:
    name = "/".join(part for part in (event.project, event.run) if part)
    return f"{name}@{event.step}" if event.step is not None else name


def _changed(event: AuditEventView) -> str:
    before, after = event.before or {}, event.after or {}
    return (
        ", ".join(
            f"{name}: {before[name]} -> {after[name]}"
            if name in before and name in after
            else f"{name}: {after.get(name, before.get(name))}"
            for name in {**before, **after}
            if before.get(name) != after.get(name)
        )
        or NOTHING
    )


def _line(event: AuditEventView) -> str:
    parts = (f"{event.at:%Y-%m-%d %H:%M:%S}", event.actor, event.action, _of(event), _changed(event), event.reason)
    return "  ".join(part for part in parts if part and part != NOTHING)


OfRun = Annotated[str | None, typer.Argument(metavar="[PROJECT[/RUN]]", help="Only of this project, or of this run.")]
TypesOption = Annotated[str | None, typer.Option("--type", help="Only such, with commas: checkpoint.committed,…")]


@events.command("list")
def list_events(
    what: OfRun = None,
    *,
    types: TypesOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: LimitedOption = 50,
    json: JsonOption = False,
) -> None:
    """List what has happened, the newest first."""
    project, run = _project_and_run(what)
    begins, ends = read_past(since), read_past(until)
    with connect() as client:
        every = client.events.all(project=project, run=run, types=_types(types), since=begins, until=ends)
        found = first(every, limit)
    if json:
        show_json(found)
        return
    say_if_cut(found, limit)
    show_table(
        ["id", "when (UTC)", "event", "of", "why"],
        ((one.id, as_time(one.timestamp), one.type, _subject(one.data), one.data.reason or NOTHING) for one in found),
        nothing="There are no such events. They are kept for HOLDFAST_KEEP_EVENTS_DAYS.",
    )


@events.command("follow")
def follow_events(
    what: OfRun = None,
    *,
    types: TypesOption = None,
    after: Annotated[str | None, typer.Option(help="From the event with this id on, in place of now.")] = None,
    json: JsonOption = False,
) -> None:
    """Show events as they happen, until you end it.

    Waits for a service that is away, and misses none. With --json each is one line.
    """
    project, run = _project_and_run(what)
    with connect(retry_seconds=float("inf")) as client:
        for event in client.events.follow(project=project, run=run, types=_types(types), after=after):
            show_line(json_lines.dumps(event.model_dump(mode="json")) if json else _told(event))


def _project_and_run(what: str | None) -> tuple[str | None, str | None]:
    project, _, run = (what or "").partition("/")
    return project or None, run or None


def _types(names: str | None) -> list[EventType]:
    return [_event(name.strip()) for name in (names or "").split(",") if name.strip()]


def _subject(data: EventData) -> str:
    if data.store is not None:
        return f"the {data.store} store"
    name = "/".join(part for part in (data.project, data.run) if part)
    if data.quota is not None:
        return f"{name} (quota of {data.quota})"
    return f"{name}@{data.step}" if data.step is not None else name


def _told(event: EventView) -> str:
    when = f"{event.timestamp:%Y-%m-%d %H:%M:%S}"
    parts = (event.id, when, event.type, _subject(event.data), event.data.reason)
    return "  ".join(part for part in parts if part)


_WAITS_SECONDS = 30.0
_ASKS_EVERY_SECONDS = 0.5

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="As `holdfast webhooks list` shows it.")]


@webhooks.command()
def create(
    project: ProjectArgument,
    *,
    url: Annotated[str, typer.Option(help="Where to call: https://…")],
    events: Annotated[str, typer.Option(help="The events, with commas: attempt.lost,attempt.failed,run.stalled,…")],
    form: Annotated[
        WebhookFormat, typer.Option("--format", help="The form of a call's body.")
    ] = WebhookFormat.STANDARD,
    routing_key_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with PagerDuty's integration key, for --format pagerduty.", exists=True, dir_okay=False
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Have a URL called when something happens to a project's runs.

    The secret that signs the calls of the standard format is shown once.
    """
    if (form is WebhookFormat.PAGERDUTY) != (routing_key_file is not None):
        raise typer.BadParameter("--format pagerduty and --routing-key-file go together.")
    request = CreateWebhook(
        url=url,
        events=[_event(name.strip()) for name in events.split(",") if name.strip()],
        format=form,
        routing_key=None if routing_key_file is None else routing_key_file.read_text("utf-8", "replace").strip(),
    )
    with connect() as client:
        made = client.webhooks.create(project, request)
    if json:
        show_json(made)
        return
    if made.secret is not None:
        show_line(made.secret)
    kept = " Its secret is not shown again." if made.secret is not None else ""
    show_note(f"Webhook {made.id} calls {made.url}.{kept}")


@webhooks.command("list")
def list_webhooks(project: ProjectArgument, *, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List a project's webhooks, and how many of their calls wait."""
    with connect() as client:
        found = first(client.webhooks.list(project), limit)
    if json:
        show_json(found)
        return
    show_table(
        ["id", "url", "format", "events", ">waiting", ">given up"],
        ((one.id, one.url, one.format, " ".join(one.events), str(one.waiting), str(one.given_up)) for one in found),
        nothing=f"{project} has no webhooks. `holdfast webhooks create {project}` makes one.",
    )


@webhooks.command()
def delete(
    webhook: IdArgument,
    *,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Delete a webhook: its URL is not called any more."""
    done = yes and not dry_run
    with connect() as client:
        view = client.webhooks.delete(webhook) if done else client.webhooks.get(webhook)
    if json:
        show_json(view)
    else:
        show_line(f"{view.id}, which calls {view.url}, {'is' if done else 'would be'} deleted.")
    exit_unless_meant("deleted", yes=yes, dry_run=dry_run)


@webhooks.command("test")
def have_tested(webhook: IdArgument, json: JsonOption = False) -> None:
    """Have a call made, and tell what the receiver answers."""
    with connect() as client:
        _tell_answer(client, webhook, client.webhooks.test(webhook), json=json)


@webhooks.command()
def redeliver(
    webhook: IdArgument,
    call: Annotated[str, typer.Argument(metavar="CALL", help="As `holdfast webhooks deliveries` shows it: msg_….")],
    json: JsonOption = False,
) -> None:
    """Have a call made again, and tell what the receiver answers.

    It has the same webhook-id, also if it has arrived before.
    """
    with connect() as client:
        _tell_answer(client, webhook, client.webhooks.redeliver(webhook, call), json=json)


def _tell_answer(client: Client, webhook: str, call: DeliveryView, *, json: bool) -> None:
    until = time.monotonic() + _WAITS_SECONDS
    # Until there has been a try: its status or its error is there.
    while call.last_status is None and call.last_error is None and time.monotonic() < until:
        time.sleep(_ASKS_EVERY_SECONDS)
        call = client.webhooks.delivery(webhook, call.id)
    if json:
        show_json(call)
    elif call.delivered_at is not None:
        show_line(f"{call.id} has arrived: the receiver has answered {call.last_status}.")
    else:
        show_line(f"{call.id} has not arrived: {_answer(call)}.")
    if call.delivered_at is None:
        raise typer.Exit(ExitCode.FAILED)


@webhooks.command()
def deliveries(
    webhook: IdArgument,
    *,
    limit: LimitedOption = 50,
    json: JsonOption = False,
) -> None:
    """List a webhook's calls and their answers, the newest first."""
    with connect() as client:
        found = first(client.webhooks.all_deliveries(webhook), limit)
    if json:
        show_json(found)
        return
    say_if_cut(found, limit)
    show_table(
        ["id", "event", "since (UTC)", ">tries", "state", "answer"],
        (
            (one.id, one.event.value, as_time(one.created_at), str(one.tries), _state(one), _answer(one))
            for one in found
        ),
        nothing=f"{webhook} was not called yet. `holdfast webhooks test {webhook}` calls it now.",
    )


def _event(name: str) -> EventType:
    try:
        return EventType(name)
    except ValueError:
        known = ", ".join(event.value for event in EventType)
        raise typer.BadParameter(f"There is no event {name!r}; there are {known}.") from None


def _state(call: DeliveryView) -> str:
    if call.delivered_at is not None:
        return "delivered"
    return "given up" if call.given_up_at is not None else f"again {as_time(call.next_try_at)}"


def _answer(call: DeliveryView) -> str:
    return call.last_error or (NOTHING if call.last_status is None else f"the receiver answers {call.last_status}")
