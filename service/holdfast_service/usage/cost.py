"""Bytes times prices. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_protocol.usage import GIB, CostLine, CostView, PriceList, StoreBytes, UsageView


def price_of(prices: PriceList, store_kind: str, storage_class: str | None) -> float | None:
    """For a GiB and a month; None where the list has none, and nothing is guessed."""
    wanted = None if storage_class == "STANDARD" else storage_class  # S3's name for its default class
    return next(
        (
            price.per_gib_month
            for price in prices.prices
            if (price.store_kind, price.storage_class) in ((store_kind, storage_class), (store_kind, wanted))
        ),
        None,
    )


def cost_line(prices: PriceList, stored: StoreBytes) -> CostLine:
    price = price_of(prices, stored.store_kind, stored.storage_class)
    return CostLine(
        store=stored.store,
        store_kind=stored.store_kind,
        storage_class=stored.storage_class,
        stored_bytes=stored.stored_bytes,
        per_gib_month=price,
        per_month=(price or 0.0) * stored.stored_bytes / GIB,
    )


def cost_of(prices: PriceList, usage: UsageView) -> CostView:
    lines = [cost_line(prices, stored) for stored in usage.stores]
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
