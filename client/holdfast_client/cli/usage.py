"""`holdfast usage`, `holdfast cost` and `holdfast prices`: what checkpoints take up, and what that costs."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast_client.cli.arguments import JsonOption, LimitOption, connect, first, read_run
from holdfast_client.cli.output import NOTHING, as_bytes, as_time, show_facts, show_json, show_table
from holdfast_client.cli.policies import checked_policy, read_document
from holdfast_client.cli.say import show_line
from holdfast_protocol.policies import PolicyKind
from holdfast_protocol.retention import PRESETS
from holdfast_protocol.text import counted
from holdfast_protocol.usage import CostView, ForecastCost, PriceList, PriceListView, StoreBytes, UsageView

WhatArgument = Annotated[str, typer.Argument(metavar="PROJECT[/RUN]", help="For example demo or demo/gpt.")]


def register(app: typer.Typer) -> None:
    app.command("usage")(usage)
    app.command("cost")(cost)
    group = typer.Typer(help="The prices that costs are counted with.", no_args_is_help=True, rich_markup_mode=None)
    group.command("show")(show_prices)
    group.command("set")(set_prices)
    app.add_typer(group, name="prices")


def usage(
    what: Annotated[str | None, typer.Argument(metavar="[PROJECT[/RUN]]", help="Without it: every project.")] = None,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """Show what checkpoints take up, figure by figure, by store and storage class."""
    with connect() as client:
        if what is None:
            found = first(client.usage.all(), limit)
        else:
            project, run = read_what(what)
            found = [client.usage.get(project, run)]
    if json:
        if what is None:
            show_json(found)
        else:
            show_json(found[0])
        return
    if what is None:
        _show_projects(found)
    else:
        _show_one(found[0])


def _show_projects(found: list[UsageView]) -> None:
    show_table(
        ["project", ">logical", ">stored", ">committed", ">arriving", ">trashed", ">to collect", ">held", ">orphaned"],
        (
            (
                one.project,
                as_bytes(one.logical_bytes),
                as_bytes(one.stored_bytes),
                as_bytes(one.committed_bytes),
                as_bytes(one.arriving_bytes),
                as_bytes(one.trashed_bytes),
                as_bytes(one.pending_collection_bytes),
                as_bytes(one.held_bytes),
                NOTHING if one.orphaned_bytes is None else as_bytes(one.orphaned_bytes),
            )
            for one in found
        ),
        nothing="There are no projects yet.",
    )


def _show_one(one: UsageView) -> None:
    orphaned = (
        "no sweep yet" if one.orphaned_bytes is None else f"{as_bytes(one.orphaned_bytes)} ({as_time(one.swept_at)})"
    )
    show_facts(
        [
            ("logical", as_bytes(one.logical_bytes)),
            ("deduplicated", as_bytes(one.deduplicated_bytes)),
            ("stored", f"{as_bytes(one.stored_bytes)}, which is the next four together"),
            ("  committed", as_bytes(one.committed_bytes)),
            ("  arriving", as_bytes(one.arriving_bytes)),
            ("  trashed", as_bytes(one.trashed_bytes)),
            ("  pending collection", as_bytes(one.pending_collection_bytes)),
            ("pinned", f"{as_bytes(one.pinned_bytes)} of committed and trashed"),
            ("held", f"{as_bytes(one.held_bytes)} of committed and trashed"),
            *([] if one.run else [("orphaned", f"{orphaned}, beside what is stored")]),
        ]
    )
    show_line("")
    show_table(
        ["store", "class", "tier", ">copies", ">stored", ">committed", ">trashed", ">to collect"],
        (
            (
                _store(stored),
                stored.storage_class or NOTHING,
                stored.tier.value,
                str(stored.copies),
                as_bytes(stored.stored_bytes),
                as_bytes(stored.committed_bytes),
                as_bytes(stored.trashed_bytes),
                as_bytes(stored.pending_collection_bytes),
            )
            for stored in one.stores
        ),
        nothing="Nothing is stored.",
    )


def _store(stored: StoreBytes) -> str:
    return stored.store.value if stored.store else f"(detached) {stored.store_url}"


def cost(
    what: WhatArgument,
    *,
    retention: Annotated[
        str | None, typer.Option(help="What it would cost under this: a preset's name, or a file with the policy.")
    ] = None,
    tiers: Annotated[str | None, typer.Option(metavar="FILE", help="The same for a tiers policy.")] = None,
    json: JsonOption = False,
) -> None:
    """Show what storing a project or run costs a month: as it is now, or as a policy would have it."""
    project, run = read_what(what)
    if retention is not None or tiers is not None:
        if run is None:
            raise typer.BadParameter("a policy is tried on one run: name it as project/run.")
        _forecast(project, run, retention, tiers, json=json)
        return
    with connect() as client:
        found = client.usage.cost(project, run)
    if json:
        show_json(found)
        return
    show_table(
        ["store", "class", ">stored", ">per GiB and month", ">per month"],
        (
            (
                line.store.value if line.store else f"(detached) {line.store_kind}",
                line.storage_class or NOTHING,
                as_bytes(line.stored_bytes),
                "no price" if line.per_gib_month is None else f"{line.per_gib_month:g}",
                f"{line.per_month:.2f}",
            )
            for line in found.lines
        ),
        nothing="Nothing is stored.",
    )
    show_line(f"{what}: {money(found.per_month, found.currency)} a month, for storing alone.")
    _say_prices(found)


def _forecast(project: str, run: str, retention: str | None, tiers: str | None, *, json: bool) -> None:
    rules = None
    if retention is not None:
        rules = PRESETS[retention].rules() if retention in PRESETS else read_document(retention)
        checked_policy(PolicyKind.RETENTION, rules)
    classes = None if tiers is None else read_document(tiers)
    if classes is not None:
        checked_policy(PolicyKind.TIERS, classes)
    with connect() as client:
        found = client.usage.forecast(project, run, ForecastCost(retention=rules, tiers=classes))
    if json:
        show_json(found)
        return
    show_table(
        ["store kind", "class", ">checkpoints", ">stored", ">per GiB and month", ">per month"],
        (
            (
                line.store_kind,
                line.storage_class or NOTHING,
                str(line.checkpoints),
                as_bytes(line.bytes),
                "no price" if line.per_gib_month is None else f"{line.per_gib_month:g}",
                f"{line.per_month:.2f}",
            )
            for line in found.lines
        ),
        nothing="Nothing would be stored.",
    )
    show_line(
        f"{project}/{run} after {counted(round(found.after_days), 'day')}: {money(found.per_month, found.currency)} a "
        "month"
        + (
            f", and {money(found.grows_per_month, found.currency)} more with each further month."
            if found.grows_per_month
            else "."
        )
    )
    show_line(
        f"By its last {counted(found.based_on_saves, 'save')}: one each {found.save_interval_seconds:.0f} s with "
        f"{as_bytes(found.bytes_per_save)}, beside {as_bytes(found.shared_bytes)} that all share."
    )
    for limit in found.limits:
        show_line(f"- {limit}")


def _say_prices(found: CostView) -> None:
    show_line(f"Prices of {found.as_of:%Y-%m-%d}; `holdfast prices show` tells them and their source.")
    if found.unpriced_bytes:
        show_line(f"{as_bytes(found.unpriced_bytes)} have no price and are not counted.")


def show_prices(json: JsonOption = False) -> None:
    """Show the prices, their date and source."""
    with connect() as client:
        found = client.usage.prices()
    if json:
        show_json(found)
        return
    _show_prices(found)


def set_prices(
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON, as `holdfast prices show --json` has `prices`.")],
    json: JsonOption = False,
) -> None:
    """Replace the prices."""
    document = read_document(file)
    # What `prices show --json` has printed as a whole is as good as its part.
    whole = isinstance(document.get("prices"), dict)
    prices = PriceList.model_validate(document["prices"] if whole else document)
    with connect() as client:
        found = client.usage.put_prices(prices)
    if json:
        show_json(found)
    else:
        _show_prices(found)


def _show_prices(found: PriceListView) -> None:
    show_table(
        ["store kind", "storage class", f">{found.prices.currency} per GiB and month"],
        (
            (price.store_kind, price.storage_class or "(default)", f"{price.per_gib_month:g}")
            for price in found.prices.prices
        ),
        nothing="There are no prices.",
    )
    who = "the defaults" if found.is_default else f"put by {found.updated_by} at {as_time(found.updated_at)} UTC"
    show_line(f"Of {found.prices.as_of:%Y-%m-%d}, {who}. Source: {found.prices.source}")


def read_what(text: str) -> tuple[str, str | None]:
    if "/" not in text:
        return text, None
    name = read_run(text)
    return name.project, name.run


def money(amount: float, currency: str) -> str:
    return f"{amount:.2f} {currency}" if amount >= 1 or amount == 0 else f"{amount:.4f} {currency}"
