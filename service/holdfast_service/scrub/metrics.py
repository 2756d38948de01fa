"""How the scrubbing is doing, for `/metrics`: true for all processes together, so take `max` and not `sum`.

Read at most once in CACHE_SECONDS, however many scrapers come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import select

from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.operations import ScrubTotal
from holdfast_service.errors import ProblemError
from holdfast_service.scrub.controller import oldest_seconds

CACHE_SECONDS = 10.0

_COUNTERS = (
    ("read_bytes", "Bytes that were read back to prove, scrub and repair, since the catalog was made."),
    ("read_copies", "Copies whose reading was settled."),
    ("bad_copies", "Copies that were found bad or missing."),
    ("repaired_copies", "Bad copies whose store has another one that was read."),
)


class ScrubNumbers(Collector):
    """Registered once per application. Everything is told by the store's role."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._totals: dict[int, ScrubTotal] = {}
        self._oldest: dict[int, float] = {}

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the catalog."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            self._refresh()
            totals, oldest = self._totals, self._oldest
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

    def _refresh(self) -> None:
        if time.monotonic() - self._read_at < CACHE_SECONDS:
            return
        try:
            with self._context.database.read() as session:
                self._totals = {total.store_id: total for total in session.scalars(select(ScrubTotal))}
                self._oldest = oldest_seconds(session, self._context)
        except ProblemError:  # the process's own metrics must still be shown
            self._totals, self._oldest = {}, {}
        self._read_at = time.monotonic()
