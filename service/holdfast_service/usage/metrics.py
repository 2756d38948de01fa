"""`holdfast_bytes`: what is in the stores, and for what it is kept; true for all processes together, as the catalog's
other numbers are.

Every reference of the catalog is looked at, which takes seconds where there are millions. So it is read in a thread of
its own, at most once in CACHE_SECONDS however many scrapers come, and a scrape that would have to wait for long shows
what was read last.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.stores import StoreSweep
from holdfast_service.context import ServiceContext
from holdfast_service.copies.stored_bytes import count_bytes
from holdfast_service.db.tables.core import Project
from holdfast_service.db.tables.operations import StoreMaintenance
from holdfast_service.errors import ProblemError
from holdfast_service.runs.views import project_label

CACHE_SECONDS = 300.0
_PATIENCE_SECONDS = 2.0

_log = structlog.get_logger("holdfast.metrics")


class ByteNumbers(Collector):
    """Registered once per application."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._reading: threading.Thread | None = None
        self._read_at = float("-inf")
        self._bytes: Counter[tuple[str, str, str]] = Counter()  # by project, kind and store

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the catalog."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        self._read_if_old()
        family = GaugeMetricFamily(
            "holdfast_bytes",
            "Bytes in the stores. committed, arriving, trashed and pending_collection add up to all copies; pinned and "
            "held are parts of committed and trashed; orphaned stands beside them, as the last sweep found it.",
            labels=("project", "kind", "store"),
        )
        for labels, size in sorted(self._bytes.items()):
            family.add_metric(labels, size)
        yield family

    def _read_if_old(self) -> None:
        with self._lock:
            if self._reading is None and time.monotonic() - self._read_at >= CACHE_SECONDS:
                self._reading = threading.Thread(target=self._read, name="holdfast-byte-numbers", daemon=True)
                self._reading.start()
            reading = self._reading
        if reading is not None:
            reading.join(_PATIENCE_SECONDS)

    def _read(self) -> None:
        try:
            with self._context.database.read() as session:
                self._bytes = _count(session, self._context)
        except ProblemError as error:
            _log.warning("bytes_not_counted", error=error.detail)
            self._bytes = Counter()
        finally:
            with self._lock:
                self._reading, self._read_at = None, time.monotonic()


def _count(session: Session, context: ServiceContext) -> Counter[tuple[str, str, str]]:
    counted = count_bytes(session)
    # After them, so that no project is missing that was made meanwhile.
    names = dict(session.execute(select(Project.id, Project.name)).all())
    roles = {attached.store_id: attached.role.value for attached in context.stores}
    size: Counter[tuple[str, str, str]] = Counter()
    for each in counted:
        project, store = project_label(names[each.project_id]), roles.get(each.store_id, "detached")
        size[project, each.kept_for.value, store] += each.bytes
        size[project, "pinned", store] += each.pinned_bytes
        size[project, "held", store] += each.held_bytes
    for sweep in session.scalars(select(StoreMaintenance.sweep).where(StoreMaintenance.sweep.is_not(None))):
        found = StoreSweep.model_validate(sweep)
        for one in found.projects:
            size[project_label(one.project), "orphaned", found.store.value] += one.orphan_bytes
    return size
