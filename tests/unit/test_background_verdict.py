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


def verdict_of_two(monkeypatch: pytest.MonkeyPatch, store: Store) -> BaseException | None:
    """Rank 0's."""
    ranks: Any = SimpleNamespace(
        rank=0, is_first=True, world_size=2, timeout_seconds=TIMEOUT_SECONDS, store=lambda purpose: store
    )
    monkeypatch.setattr(background_verdict, "time", SimpleNamespace(monotonic=lambda: store.seconds))
    return BackgroundVerdict(ranks, "test").reach(None, lambda: None, threading.Event())


def test_a_rank_waits_in_the_store_and_does_not_ask_it_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(lambda seconds: seconds >= 60 and store.set("1", ""))
    assert verdict_of_two(monkeypatch, store) is None
    assert store.calls < 2.5 * store.seconds


def test_a_rank_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(lambda seconds: None)
    assert isinstance(verdict_of_two(monkeypatch, store), RankLost)
    assert TIMEOUT_SECONDS < store.seconds <= TIMEOUT_SECONDS + 2
