"""Which stores cannot be used, for `/metrics`: as all processes together see it, so take `max` and not `sum`.

Read at most once in CACHE_SECONDS, however many scrapers come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import select

from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Store
from holdfast_service.errors import ProblemError

CACHE_SECONDS = 10.0


class StoreNumbers(Collector):
    """Registered once per application."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._unavailable: dict[str, bool] = {}  # by role

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the catalog."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            if time.monotonic() - self._read_at >= CACHE_SECONDS:
                self._unavailable = self._read()
                self._read_at = time.monotonic()
            unavailable = self._unavailable
        gauge = GaugeMetricFamily(
            "holdfast_store_unavailable",
            "1 if a living process has had no answer from the store for HOLDFAST_STORE_UNAVAILABLE_SECONDS.",
            labels=("store",),
        )
        for role, told in unavailable.items():
            gauge.add_metric([role], told)
        yield gauge

    def _read(self) -> dict[str, bool]:
        try:
            with self._context.database.read() as session:
                told = dict(session.execute(select(Store.id, Store.unavailable_as)).all())
        except ProblemError:  # the process's own metrics must still be shown
            return {}
        return {each.role.value: told[each.store_id] is not None for each in self._context.stores}
