"""Bytes times prices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.states import StoreRole
from holdfast_protocol.usage import (
    DEFAULT_PRICES,
    GIB,
    CostLine,
    CostView,
    PriceList,
    PriceListView,
    StoreBytes,
    UsageView,
)
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import CatalogIdentity
from holdfast_service.db.tables.operations import PriceList as PriceRow
from holdfast_service.errors import refuse_unless_seen
from holdfast_service.usage.show_usage import show_usage


def price_of(prices: PriceList, store_kind: str, storage_class: str | None) -> float | None:
    """For a GiB and a month; None if the list has no price, and nothing is guessed. Pure."""
    return next(
        (
            price.per_gib_month
            for price in prices.prices
            if (price.store_kind, price.storage_class) == (store_kind, storage_class)
        ),
        None,
    )


def cost_line(prices: PriceList, stored: Sequence[StoreBytes]) -> CostLine:
    """`stored`: of one store and storage class. What is being thawed there costs what it did."""
    size = sum(each.stored_bytes for each in stored)
    price = price_of(prices, stored[0].store_kind, stored[0].storage_class)
    return CostLine(
        store=stored[0].store,
        store_kind=stored[0].store_kind,
        storage_class=stored[0].storage_class,
        stored_bytes=size,
        per_gib_month=price,
        per_month=(price or 0.0) * size / GIB,
    )


def cost_of(prices: PriceList, usage: UsageView) -> CostView:
    places: dict[tuple[StoreRole | None, str, str | None], list[StoreBytes]] = {}
    for stored in usage.stores:
        places.setdefault((stored.store, stored.store_kind, stored.storage_class), []).append(stored)
    lines = [cost_line(prices, each) for each in places.values()]
    return CostView(
        project=usage.project,
        run=usage.run,
        at=usage.at,
        currency=prices.currency,
        as_of=prices.as_of,
        per_month=total_of(lines),
        lines=lines,
        unpriced_bytes=sum(line.stored_bytes for line in lines if line.per_gib_month is None),
    )


def total_of(lines: Iterable[CostLine]) -> float:
    return sum(line.per_month for line in lines)


def show_prices(context: ServiceContext) -> PriceListView:
    """The newest price list that an administrator has put, else the defaults with their date and source."""
    with context.database.read() as session:
        return current_prices(session)


def put_prices(context: ServiceContext, caller: Principal, wanted: PriceList, if_match: str | None) -> PriceListView:
    """The same again is fine. Raises `edit_needs_version` and `edit_conflict`."""
    with context.database.transaction() as session:
        # A lock for every put: two at once must not both replace the list that both have seen.
        session.execute(select(CatalogIdentity).with_for_update())
        before = current_prices(session)
        if before.prices == wanted:
            return before
        refuse_unless_seen("the price list", before.etag, if_match)
        now = database_now(session)
        session.add(PriceRow(document=wanted.model_dump(mode="json"), updated_at=now, updated_by=caller.name))
        record_event(
            session,
            Actor.person(caller),
            "prices.put",
            before=before.prices.model_dump(mode="json"),
            after=wanted.model_dump(mode="json"),
        )
        session.flush()
        return current_prices(session)


def current_prices(session: Session) -> PriceListView:
    row = session.scalar(select(PriceRow).order_by(PriceRow.id.desc()).limit(1))
    if row is None:
        return PriceListView(prices=DEFAULT_PRICES, is_default=True, etag='"default"', updated_at=None, updated_by=None)
    return PriceListView(
        prices=PriceList.model_validate(row.document),
        is_default=False,
        etag=f'"{row.id}"',
        updated_at=row.updated_at,
        updated_by=row.updated_by,
    )


def show_cost(context: ServiceContext, caller: Principal, project: str, run: str | None = None) -> CostView:
    """What storing a project or a run costs a month, as it is now. Raises `forbidden`, `project_not_found` and
    `run_not_found`."""
    usage = show_usage(context, caller, project, run)
    return cost_of(show_prices(context).prices, usage)
