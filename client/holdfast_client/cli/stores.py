"""`holdfast store list | adopt`."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast_client.cli.arguments import JsonOption, LimitOption, first
from holdfast_client.cli.connect import connect
from holdfast_client.cli.show import NOTHING, as_time, show_facts, show_json, show_table
from holdfast_protocol.states import StoreRole
from holdfast_protocol.stores import AdoptStore, StoreView


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Where the bytes are, and whose the stores are.", no_args_is_help=True, rich_markup_mode=None
    )
    group.command("list")(list_stores)
    group.command("adopt")(adopt)
    app.add_typer(group, name="store")


def list_stores(*, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List the attached stores: whether each is this catalog's, and when it was last checked."""
    with connect() as client:
        found = first(client.stores(), limit)
    if json:
        show_json(found)
        return
    _show(found)


def adopt(
    store: Annotated[StoreRole | None, typer.Option(help="Only the store of this role; without it: every one.")] = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Give up what the check found that the catalog does not know.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """After a restore, a rebuild or a clone, and a check: take the stores for this catalog's; deleting goes on."""
    with connect() as client:
        roles = [each.role for each in client.stores()] if store is None else [store]
        adopted = [client.adopt_store(role, AdoptStore(accept_loss=accept_loss)) for role in roles]
    if json:
        show_json(adopted)
        return
    _show(adopted)


def _show(stores: list[StoreView]) -> None:
    show_table(
        ["store", "kind", "URL", "this catalog's", "checked (UTC)", "whole", "probed (UTC)", "changed (UTC)"],
        (
            (
                each.role.value,
                each.kind,
                each.url,
                "yes" if each.adopted else f"no: {each.problem}",
                as_time(each.checked_at),
                NOTHING if each.checked_whole is None else ("yes" if each.checked_whole else "no"),
                as_time(each.probed_at),
                as_time(each.changed_at),
            )
            for each in stores
        ),
        nothing="There are no stores.",
    )
    show_facts([(f"{each.role.value} store", told) for each in stores for told in each.weaknesses])
