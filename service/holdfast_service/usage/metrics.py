"""`holdfast_bytes`: what is in the stores, and for what it is kept; true for all processes together, as the catalog's
other numbers are: take `max` and not `sum`. The sums are kept (`tallies/`): a scrape reads a few rows for each project.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_service.context import ServiceContext
from holdfast_service.copies.stored_bytes import sweeps_of
from holdfast_service.db.cached_read import CachedRead
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Project
from holdfast_service.db.tables.tallies import TallyComparison
from holdfast_service.runs.views import project_label
from holdfast_service.tallies.sums import counted_bytes, counted_until


@dataclass(frozen=True)
class _Numbers:
    size: Counter[tuple[str, str, str]]
    """By project, kind and store."""
    lag_seconds: float | None = None
    drifted: int | None = None


class ByteNumbers(Collector):
    """Registered once per application."""

    def __init__(self, context: ServiceContext) -> None:
        self._numbers = CachedRead(context.database, functools.partial(_read, context=context), _Numbers(Counter()))

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the catalog."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        numbers = self._numbers()
        family = GaugeMetricFamily(
            "holdfast_bytes",
            "Bytes in the stores. committed, arriving, trashed and pending_collection add up to all copies; pinned and "
            "held are parts of committed and trashed; orphaned stands beside them, as the last sweep left it.",
            labels=("project", "kind", "store"),
        )
        for labels, value in sorted(numbers.size.items()):
            family.add_metric(labels, value)
        yield family
        since = GaugeMetricFamily(
            "holdfast_tally_lag_seconds",
            "How long ago the oldest change was that is not in holdfast_bytes by kind. After an upgrade there is no "
            "value until all copies are counted.",
        )
        if numbers.lag_seconds is not None:
            since.add_metric([], numbers.lag_seconds)
        yield since
        drift = CounterMetricFamily(
            "holdfast_tally_drift",
            "Sums and copies that were found to be counted wrongly, and were put right, since the catalog was made. "
            "It must stay 0.",
        )
        if numbers.drifted is not None:
            drift.add_metric([], numbers.drifted)
        yield drift


def _read(session: Session, context: ServiceContext) -> _Numbers:
    size = _count(session, context)
    until = counted_until(session)
    return _Numbers(
        size,
        lag_seconds=None if until is None else max(0.0, (database_now(session) - until).total_seconds()),
        drifted=int(session.scalar(select(func.sum(TallyComparison.drifted))) or 0),
    )


def _count(session: Session, context: ServiceContext) -> Counter[tuple[str, str, str]]:
    counted = counted_bytes(session)
    # After them, so that no project is missing that was made meanwhile.
    names = dict(session.execute(select(Project.id, Project.name)).all())
    roles = {attached.store_id: attached.role.value for attached in context.stores}
    size: Counter[tuple[str, str, str]] = Counter()
    for each in counted:
        project, store = project_label(names[each.project_id]), roles.get(each.store_id, "detached")
        size[project, each.kept_for.value, store] += each.bytes
        size[project, "pinned", store] += each.pinned_bytes
        size[project, "held", store] += each.held_bytes
    for found in sweeps_of(session, context):
        for one in found.projects:
            size[project_label(one.project), "orphaned", found.store.value] += one.orphan_bytes - one.deleted_bytes
    return size
