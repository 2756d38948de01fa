"""`holdfast webhook add | list | delete | test | deliveries`: whom a project wants to be called."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast_client.cli.arguments import JsonOption, LimitedOption, LimitOption, first
from holdfast_client.cli.connect import connect
from holdfast_client.cli.exit_codes import ExitCode
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.cli.show import NOTHING, as_time, show_json, show_table
from holdfast_protocol.webhooks import CreateWebhook, DeliveryView, WebhookEvent

_WAITS_SECONDS = 30.0
_ASKS_EVERY_SECONDS = 0.5

ProjectArgument = Annotated[str, typer.Argument(metavar="PROJECT")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="As `holdfast webhook list` shows it.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Make, list, try and delete webhooks.", no_args_is_help=True, rich_markup_mode=None)
    group.command("add")(add)
    group.command("list")(list_webhooks)
    group.command("delete")(delete)
    group.command("test")(have_tested)
    group.command("deliveries")(deliveries)
    app.add_typer(group, name="webhook")


def add(
    project: ProjectArgument,
    url: Annotated[str, typer.Option(help="Where to call: https://…")],
    events: Annotated[str, typer.Option(help="What for, with commas: attempt.lost,attempt.failed,run.stalled,…")],
    json: JsonOption = False,
) -> None:
    """Have a URL called when something happens to a project's runs. The secret that signs the calls is shown once."""
    request = CreateWebhook(url=url, events=[_event(name.strip()) for name in events.split(",") if name.strip()])
    with connect() as client:
        made = client.create_webhook(project, request)
    if json:
        show_json(made)
        return
    show_line(made.secret)
    show_note(f"Webhook {made.id} calls {made.url}. Its secret is not shown again.")


def list_webhooks(project: ProjectArgument, *, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List a project's webhooks, with the calls that wait or were given up."""
    with connect() as client:
        found = first(client.webhooks(project).items, limit)
    if json:
        show_json(found)
        return
    show_table(
        ["id", "url", "events", ">waiting", ">given up"],
        ((one.id, one.url, " ".join(one.events), str(one.waiting), str(one.given_up)) for one in found),
        nothing=f"{project} has no webhooks.",
    )


def delete(project: ProjectArgument, webhook: IdArgument, json: JsonOption = False) -> None:
    """Delete a webhook: nothing is called any more."""
    with connect() as client:
        view = client.delete_webhook(project, webhook)
    if json:
        show_json(view)
    else:
        show_line(f"{view.id} is deleted.")


def have_tested(project: ProjectArgument, webhook: IdArgument, json: JsonOption = False) -> None:
    """Have a call made, and tell what the receiver answers."""
    with connect() as client:
        call = client.test_webhook(project, webhook)
        until = time.monotonic() + _WAITS_SECONDS
        # Tried, and no try under way: its status or its error is there.
        while call.last_status is None and call.last_error is None and time.monotonic() < until:
            time.sleep(_ASKS_EVERY_SECONDS)
            call = next(one for one in client.all_webhook_deliveries(project, webhook) if one.id == call.id)
    if json:
        show_json(call)
    elif call.delivered_at is not None:
        show_line(f"{call.id} has arrived: the receiver has answered {call.last_status}.")
    else:
        show_line(f"{call.id} has not arrived: {_answer(call)}.")
    if call.delivered_at is None:
        raise typer.Exit(ExitCode.FAILED)


def deliveries(
    project: ProjectArgument,
    webhook: IdArgument,
    *,
    limit: LimitedOption = 50,
    json: JsonOption = False,
) -> None:
    """List a webhook's calls and what became of them, the newest first."""
    with connect() as client:
        found = first(client.all_webhook_deliveries(project, webhook), limit)
    if json:
        show_json(found)
        return
    show_table(
        ["id", "event", "since (UTC)", ">tries", "state", "answer"],
        (
            (one.id, one.event.value, as_time(one.created_at), str(one.tries), _state(one), _answer(one))
            for one in found
        ),
        nothing=f"{webhook} was not called yet.",
    )


def _event(name: str) -> WebhookEvent:
    try:
        return WebhookEvent(name)
    except ValueError:
        known = ", ".join(event.value for event in WebhookEvent)
        raise typer.BadParameter(f"There is no event {name!r}; there are {known}.") from None


def _state(call: DeliveryView) -> str:
    if call.delivered_at is not None:
        return "delivered"
    return "given up" if call.given_up_at is not None else f"again {as_time(call.next_try_at)}"


def _answer(call: DeliveryView) -> str:
    return call.last_error or (NOTHING if call.last_status is None else f"the receiver answers {call.last_status}")
