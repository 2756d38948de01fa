"""`holdfast usage`, `costs` and `prices`: the bytes of checkpoints, and their cost."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast_client.cli.arguments import (
    JsonOption,
    LimitOption,
    RunArgument,
    TargetArgument,
    connect,
    first,
    read_run,
    read_target,
)
from holdfast_client.cli.main import noun
from holdfast_client.cli.output import NOTHING, as_bytes, as_time, show_facts, show_json, show_table
from holdfast_client.cli.policies import check_policy, read_document
from holdfast_client.cli.say import show_line
from holdfast_protocol.policies.policy import PolicyKind
from holdfast_protocol.policies.retention import PRESETS
from holdfast_protocol.text import counted
from holdfast_protocol.usage import CostView, ForecastCost, PriceList, PriceListView, StoreBytes, UsageView

usage = noun("usage")
costs = noun("costs")
prices = noun("prices")


@usage.command("list")
def list_usage(*, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List what each project takes up, figure by figure."""
    with connect() as client:
        found = first(client.usage.all(), limit)
    if json:
        show_json(found)
    else:
        _show_projects(found)


@usage.command()
def show(target: TargetArgument, json: JsonOption = False) -> None:
    """Show what a project or run takes up, by store and class."""
    project, run = read_target(target)
    with connect() as client:
        found = client.usage.get(project, run)
    if json:
        show_json(found)
    else:
        _show_one(found)


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
        nothing="There are no projects yet. `holdfast projects create NAME` makes one.",
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
            ("  as of", as_time(one.counted_until) if one.counted_until else "the copies are still being counted"),
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
        nothing="Nothing is stored yet.",
    )


def _store(stored: StoreBytes) -> str:
    return stored.store.value if stored.store else f"(detached) {stored.store_url}"


@costs.command("show")
def show_cost(target: TargetArgument, json: JsonOption = False) -> None:
    """Show what storing a project or run costs a month, as it is now."""
    project, run = read_target(target)
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
        nothing="Nothing is stored yet.",
    )
    show_line(f"{target}: {money(found.per_month, found.currency)} a month, for storing alone.")
    _say_prices(found)


@costs.command()
def forecast(
    run: RunArgument,
    *,
    retention: Annotated[
        str | None, typer.Option(help="Under this policy: a preset's name, or a file. Without it: the one in force.")
    ] = None,
    tiers: Annotated[str | None, typer.Option(metavar="FILE", help="The same for a tiers policy.")] = None,
    json: JsonOption = False,
) -> None:
    """Show what a run would cost a month under a policy."""
    name = read_run(run)
    rules = None
    if retention is not None:
        rules = PRESETS[retention].rules() if retention in PRESETS else read_document(retention)
        check_policy(PolicyKind.RETENTION, rules)
    classes = None if tiers is None else read_document(tiers)
    if classes is not None:
        check_policy(PolicyKind.TIERS, classes)
    with connect() as client:
        found = client.usage.forecast(name.project, name.run, ForecastCost(retention=rules, tiers=classes))
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
        f"{name} after {counted(round(found.after_days), 'day')}: {money(found.per_month, found.currency)} a "
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


@prices.command("show")
def show_prices(json: JsonOption = False) -> None:
    """Show the prices, their date and source."""
    with connect() as client:
        found = client.usage.prices()
    if json:
        show_json(found)
        return
    _show_prices(found)


@prices.command("put")
def put_prices(
    file: Annotated[
        str, typer.Option("--file", help="JSON, as `holdfast prices show --json` has `prices`; - reads stdin.")
    ],
    json: JsonOption = False,
) -> None:
    """Replace the prices."""
    document = read_document(file)
    # The whole output of `prices show --json` is as good as its part.
    whole = isinstance(document.get("prices"), dict)
    given = PriceList.model_validate(document["prices"] if whole else document)
    with connect() as client:
        found = client.usage.put_prices(given, client.usage.prices().etag)
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
        nothing="There are no prices. `holdfast prices put --file FILE` sets them.",
    )
    who = "the defaults" if found.is_default else f"put by {found.updated_by} at {as_time(found.updated_at)} UTC"
    show_line(f"Of {found.prices.as_of:%Y-%m-%d}, {who}. Source: {found.prices.source}")


def money(amount: float, currency: str) -> str:
    return f"{amount:.2f} {currency}" if amount >= 1 or amount == 0 else f"{amount:.4f} {currency}"
