"""How the controllers are doing, for `/metrics`: true for all processes together, so take `max` and not `sum`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast_protocol.service import ControllerView
from holdfast_service.background.controllers import controller_views
from holdfast_service.context import ServiceContext
from holdfast_service.db.cached_read import CachedRead
from holdfast_service.work.report import MOST_COUNTED, ControllerLoop

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
        self._views: CachedRead[list[ControllerView]] = CachedRead(
            context.database, lambda session: controller_views(session, context, loops), []
        )

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the catalog."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        views = self._views()
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
