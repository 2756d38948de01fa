"""Which stores cannot be used, for `/metrics`: as all processes together see it, so take `max` and not `sum`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_service.context import ServiceContext
from holdfast_service.db.cached_read import CachedRead
from holdfast_service.db.tables.core import Store


class StoreNumbers(Collector):
    """Registered once per application."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._unavailable: CachedRead[dict[str, bool]] = CachedRead(context.database, self._read, {})  # by role

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the catalog."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            "holdfast_store_unavailable",
            "1 if a living process has had no answer from the store for HOLDFAST_STORE_UNAVAILABLE_SECONDS.",
            labels=("store",),
        )
        for role, told in self._unavailable().items():
            gauge.add_metric([role], told)
        yield gauge

    def _read(self, session: Session) -> dict[str, bool]:
        told = dict(session.execute(select(Store.id, Store.unavailable_as)).all())
        return {each.role.value: told[each.store_id] is not None for each in self._context.stores}
