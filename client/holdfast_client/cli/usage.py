"""`holdfast usage`, `costs`, `prices` and `tiers`: the bytes of checkpoints, their cost, and when they get cold.

`holdfast checkpoints thaw` makes a cold checkpoint readable.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast_client.cli.arguments import (
    JsonOption,
    LimitOption,
    RunArgument,
    SelectorArgument,
    TargetArgument,
    WaitOption,
    connect,
    first,
    read_run,
    read_target,
    select,
)
from holdfast_client.cli.checkpoints import checkpoints
from holdfast_client.cli.main import noun
from holdfast_client.cli.output import NOTHING, as_bytes, as_time, show_facts, show_json, show_table
from holdfast_client.cli.policies import check_policy, read_document
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.client import Client
from holdfast_protocol.policies.policy import PolicyKind
from holdfast_protocol.policies.retention import PRESETS
from holdfast_protocol.text import counted
from holdfast_protocol.tiers import LONGEST_THAW_DAYS, ThawSpeed, ThawState, ThawView, TierPlan
from holdfast_protocol.usage import CostView, ForecastCost, PriceList, PriceListView, StoreBytes, UsageView

usage = noun("usage")
costs = noun("costs")
prices = noun("prices")
tiers = noun("tiers")


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
    _say_unpriced(found.unpriced_bytes)
    show_line(
        f"By its last {counted(found.based_on_saves, 'save')}: one each {found.save_interval_seconds:.0f} s with "
        f"{as_bytes(found.bytes_per_save)}, beside {as_bytes(found.shared_bytes)} that all share."
    )
    for limit in found.limits:
        show_line(f"- {limit}")


def _say_prices(found: CostView) -> None:
    show_line(f"Prices of {found.as_of:%Y-%m-%d}; `holdfast prices show` tells them and their source.")
    _say_unpriced(found.unpriced_bytes)


def _say_unpriced(size: int) -> None:
    if size:
        show_line(f"{as_bytes(size)} have no price and are not counted.")


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


# --- tiers

_LOOK_SECONDS = 5.0


@checkpoints.command()
def thaw(
    selector: SelectorArgument,
    *,
    days: Annotated[int, typer.Option(min=1, max=LONGEST_THAW_DAYS, help="How long it can be read.")] = 3,
    speed: Annotated[ThawSpeed, typer.Option(help="The faster, the dearer.")] = ThawSpeed.STANDARD,
    status: Annotated[
        bool, typer.Option("--status", "--dry-run", help="Only tell how far it is, or what it would take and cost.")
    ] = False,
    wait: WaitOption = False,
    json: JsonOption = False,
) -> None:
    """Make a cold checkpoint readable for some days. It takes minutes to days; repeat it to prolong."""
    with connect() as client:
        checkpoint_id = select(client, selector).id
        view = (
            client.tiers.thaw_status(checkpoint_id)
            if status
            else client.tiers.thaw(checkpoint_id, days=days, speed=speed)
        )
        if wait:
            view = _until_thawed(client, view)
    if json:
        show_json(view)
    else:
        show_facts(_facts(view))


def _until_thawed(client: Client, view: ThawView) -> ThawView:
    told = -1
    while view.state is ThawState.THAWING:
        if view.readable_chunks != told:
            told = view.readable_chunks
            show_note(f"{told} of {counted(view.chunks, 'chunk')} can be read")
        time.sleep(_LOOK_SECONDS)
        view = client.tiers.thaw_status(view.checkpoint_id)
    return view


def _facts(view: ThawView) -> list[tuple[str, str]]:
    takes = ", ".join(
        f"{_span(seconds)} ({speed}, ${view.costs_dollars.get(speed, 0):.2f})"
        for speed, seconds in view.takes_seconds.items()
    )
    facts = [
        ("checkpoint", f"{view.project}/{view.run}@{view.step}#{view.attempt}"),
        ("tier", view.tier.value),
        ("thaw", view.state.value.replace("_", " ")),
        ("chunks", f"{view.readable_chunks} of {view.chunks} can be read, {view.thawing_chunks} being thawed"),
        ("cold", as_bytes(view.cold_bytes) if view.cold_bytes else ""),
        ("takes at most", takes if view.state is not ThawState.THAWED else ""),
        ("asked for", f"{as_time(view.requested_at)} UTC" if view.requested_at else ""),
        ("expected", f"{as_time(view.expected_at)} UTC" if view.expected_at else ""),
        ("readable until", f"{as_time(view.readable_until)} UTC at least" if view.readable_until else ""),
    ]
    return [(name, value) for name, value in facts if value]


@tiers.command()
def plan(run: RunArgument, json: JsonOption = False) -> None:
    """Tell what the policy would move when, and how many bytes. Nothing moves by it."""
    name = read_run(run)
    with connect() as client:
        found = client.tiers.plan(name.project, name.run)
    if json:
        show_json(found)
        return
    show_table(
        [">step", ">attempt", "tier", "goes to", "from (UTC)", ">bytes", "stays hot because"],
        (
            (
                str(row.step),
                str(row.attempt),
                row.tier.value,
                row.target or NOTHING,
                as_time(row.moves_at),
                as_bytes(row.moves_bytes) if row.target else NOTHING,
                row.stays or "",
            )
            for row in found.rows
        ),
        nothing=f"{name} has no committed checkpoints: there is nothing to move yet.",
    )
    _show_totals(found)


def _show_totals(found: TierPlan) -> None:
    for total in found.totals:
        terms = [f"{as_bytes(total.due_bytes)} now and {as_bytes(total.later_bytes)} later"]
        if total.minimum_days is not None:
            terms.append(f"paid for at least {counted(total.minimum_days, 'day')}")
        if total.takes_seconds:
            spans = ", ".join(f"{_span(seconds)} {speed}" for speed, seconds in total.takes_seconds.items())
            terms.append(f"to be thawed first ({spans})")
        if total.retrieval_dollars:
            terms.append(f"reading all of it costs ${total.retrieval_dollars:.2f} or more")
        show_line(f"to {total.target}: {'; '.join(terms)}")
    if found.kept_hot_by_others_bytes:
        show_line(f"kept hot by other runs: {as_bytes(found.kept_hot_by_others_bytes)}")
    if found.policy_level is None:
        show_line("There is no tiers policy: all of it stays hot. `holdfast policies put tiers` makes one.")


def _span(seconds: int) -> str:
    return f"{seconds // 3600} h" if seconds >= 3600 else f"{seconds // 60} min"
