"""How the controllers are doing, for `/metrics`: true for all processes together, so take `max` and not `sum`.

Read at most once in CACHE_SECONDS, however many scrapers come: counting what is due reads the catalog.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast_protocol.service import ControllerView
from holdfast_service.background.controllers import controller_views
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.work.report import MOST_COUNTED, ControllerLoop

CACHE_SECONDS = 10.0

_GAUGES: tuple[tuple[str, str, Callable[[ControllerView], float | None]], ...] = (
    ("due", f"Rows that wait for the controller, counted up to {MOST_COUNTED}.", lambda view: view.due),
    ("leased", "Rows that a process works on.", lambda view: view.leased),
    ("lag_seconds", "How long the oldest row waits for the controller.", lambda view: view.lag_seconds),
    ("paused", "1 if an operator has paused the controller.", lambda view: float(view.paused_at is not None)),
)
_COUNTERS: tuple[tuple[str, str, Callable[[ControllerView], float]], ...] = (
    ("done", "Rows that the controller has settled, since the catalog was made.", lambda view: view.done),
    ("failed", "How often a row or a pass of the controller failed.", lambda view: view.failed),
)


class ControllerNumbers(Collector):
    """Registered once per application."""

    def __init__(self, context: ServiceContext, loops: Sequence[ControllerLoop]) -> None:
        self._context = context
        self._loops = loops
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._views: list[ControllerView] = []

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the catalog."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        views = self._current()
        for name, text, value_of in _GAUGES:
            gauge = GaugeMetricFamily(f"holdfast_controller_{name}", text, labels=("controller",))
            for view in views:
                value = value_of(view)
                if value is not None:
                    gauge.add_metric([view.name], value)
            yield gauge
        for name, text, count_of in _COUNTERS:
            counter = CounterMetricFamily(f"holdfast_controller_{name}", text, labels=("controller",))
            for view in views:
                counter.add_metric([view.name], count_of(view))
            yield counter

    def _current(self) -> list[ControllerView]:
        with self._lock:
            if time.monotonic() - self._read_at >= CACHE_SECONDS:
                try:
                    with self._context.database.read() as session:
                        self._views = controller_views(session, self._context, self._loops)
                except ProblemError:  # the process's own metrics must still be shown
                    self._views = []
                self._read_at = time.monotonic()
            return self._views
