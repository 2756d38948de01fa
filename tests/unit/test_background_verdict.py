"""The verdict of all ranks on background work: what waiting for it costs, and how long a rank is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.distributed import background_verdict
from holdfast.distributed.background_verdict import BackgroundVerdict
from holdfast.errors import RankLost

TIMEOUT_SECONDS = 600.0


class Store:
    """The job's store, in which time passes only while somebody waits. `meanwhile(seconds)` is what others do then."""

    def __init__(self, meanwhile: Callable[[float], object]) -> None:
        self.seconds = 0.0
        self.values: dict[str, Any] = {}
        self.calls = 0
        self._meanwhile = meanwhile

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return self.values.keys() >= set(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.calls += 1
        self.seconds += timeout.total_seconds()
        self._meanwhile(self.seconds)
        if not self.values.keys() >= set(keys):
            raise dist.DistStoreError("wait timeout")

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return str(self.values[key]).encode()

    def add(self, key: str, amount: int) -> int:
        self.values[key] = self.values.get(key, 0) + amount
        return int(self.values[key])


def of_rank(rank: int, store: Store) -> BackgroundVerdict:
    ranks: Any = SimpleNamespace(
        rank=rank, is_first=rank == 0, world_size=2, timeout_seconds=TIMEOUT_SECONDS, store=lambda purpose: store
    )
    return BackgroundVerdict(ranks, "test")


def verdict_of_two(monkeypatch: pytest.MonkeyPatch, store: Store) -> BaseException | None:
    """Rank 0's."""
    monkeypatch.setattr(background_verdict, "time", SimpleNamespace(monotonic=lambda: store.seconds))
    return of_rank(0, store).reach(None, lambda: None, threading.Event())


def test_a_rank_waits_in_the_store_and_does_not_ask_it_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(lambda seconds: seconds >= 60 and store.set("1", ""))
    assert verdict_of_two(monkeypatch, store) is None
    assert store.calls < 2.5 * store.seconds


def test_a_rank_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(lambda seconds: None)
    assert isinstance(verdict_of_two(monkeypatch, store), RankLost)
    assert TIMEOUT_SECONDS < store.seconds <= TIMEOUT_SECONDS + 2


def test_a_rank_that_reads_for_longer_than_the_time_out_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(seconds: float) -> None:
        if seconds < 3 * TIMEOUT_SECONDS:
            slow.show_life()
        else:
            store.set("1", "")

    store = Store(read)
    slow = of_rank(1, store)
    assert verdict_of_two(monkeypatch, store) is None
    assert store.values["signs"] <= 31, "not with each chunk"
    store = Store(lambda seconds: seconds < TIMEOUT_SECONDS and slow.show_life())
    slow = of_rank(1, store)
    assert isinstance(verdict_of_two(monkeypatch, store), RankLost), "it died while it read"
    assert store.seconds <= 2 * TIMEOUT_SECONDS + 2
