"""What `/metrics` tells of the catalog: how long a read is kept, and what is told while there is no catalog."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast_protocol.problems import ProblemCode
from holdfast_service.db import cached_read
from holdfast_service.db.cached_read import LONGEST_SECONDS, CachedRead
from holdfast_service.errors import ProblemError


class Catalog:
    """Reads take `takes` seconds on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.takes, self.reads, self.is_there = 1000.0, 0.01, 0, True
        monkeypatch.setattr(cached_read, "time", SimpleNamespace(monotonic=lambda: self.now))
        database: Any = SimpleNamespace(read=self._session)
        self.told = CachedRead(database, self._read, -1)

    @contextmanager
    def _session(self, *, snapshot: bool):
        assert snapshot, "what moves from one table to another while it is read counts once"
        if not self.is_there:
            raise ProblemError(ProblemCode.DATABASE_UNAVAILABLE, "The database does not answer.")
        yield None

    def _read(self, _session: object) -> int:
        self.now += self.takes
        self.reads += 1
        return self.reads


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Catalog:
    return Catalog(monkeypatch)


@pytest.mark.parametrize(("takes", "kept"), [(0.01, 0.2), (0.5, 10.0), (60.0, LONGEST_SECONDS)])
def test_a_read_is_kept_for_as_long_as_it_is_dear(catalog: Catalog, takes: float, kept: float) -> None:
    catalog.takes = takes
    assert catalog.told() == 1
    catalog.now += 0.9 * kept
    assert catalog.told() == 1
    catalog.now += 0.2 * kept
    assert catalog.told() == 2


def test_without_a_catalog_it_tells_nothing_and_asks_again(catalog: Catalog) -> None:
    assert catalog.told() == 1
    catalog.now += 1
    catalog.is_there = False
    assert catalog.told() == -1
    catalog.is_there = True
    assert catalog.told() == 2
