"""How the scrubbing is doing, for `/metrics`: true for all processes together, so take `max` and not `sum`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_service.context import ServiceContext
from holdfast_service.db.cached_read import CachedRead
from holdfast_service.db.tables.operations import ScrubTotal
from holdfast_service.scrub.controller import oldest_seconds

_COUNTERS = (
    ("read_bytes", "Bytes that were read back to prove, scrub and repair, since the catalog was made."),
    ("read_copies", "Copies whose reading was settled."),
    ("bad_copies", "Copies that were found bad or missing."),
    ("repaired_copies", "Bad copies whose store has another one that was read."),
)

_Numbers = tuple[Mapping[int, ScrubTotal], Mapping[int, float]]
"""By store: the totals, and for how many seconds the oldest proof has waited."""


class ScrubNumbers(Collector):
    """Registered once per application. Everything is told by the store's role."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._numbers: CachedRead[_Numbers] = CachedRead(context.database, self._read, ({}, {}))

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the catalog."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        totals, oldest = self._numbers()
        gauge = GaugeMetricFamily(
            "holdfast_scrub_oldest_seconds",
            "How long ago the copy was proven that has waited the longest to be read again.",
            labels=("store",),
        )
        for attached in self._context.stores:
            if attached.store_id in oldest:
                gauge.add_metric([attached.role.value], oldest[attached.store_id])
        yield gauge
        for name, text in _COUNTERS:
            counter = CounterMetricFamily(f"holdfast_scrub_{name}", text, labels=("store",))
            for attached in self._context.stores:
                total = totals.get(attached.store_id)
                counter.add_metric([attached.role.value], 0 if total is None else getattr(total, name))
            yield counter

    def _read(self, session: Session) -> _Numbers:
        totals = {total.store_id: total for total in session.scalars(select(ScrubTotal))}
        return totals, oldest_seconds(session, self._context)
