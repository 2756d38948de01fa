"""A device of the tests: torch's "meta", which computes nothing. A dispatch mode makes its copies, and a test says when
they have arrived."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Device(TorchDispatchMode):
    """The copy of number n has the values 100 n, 100 n + 1 and so on, once it has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.copies: list[torch.Tensor] = []
        self.arrived = 0
        """How many copies have."""
        self.events = 0
        self.has_events = True
        self.error: Exception | None = None
        self.captures = False
        self.asked_by: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._to_copy.default or args[0].device.type != "meta":
            return func(*args, **(kwargs or {}))
        self.done.append("copy")
        self.copies.append(torch.full(args[0].shape, torch.nan))
        return self.copies[-1]

    def arrive(self, copies: int) -> None:
        for number in range(self.arrived, copies):
            self.copies[number].copy_(100.0 * number + torch.arange(self.copies[number].numel()))
        self.arrived = copies

    def event(self) -> Event:
        if not self.has_events:
            raise RuntimeError("this device has no events")
        self.done.append("event")
        self.events += 1
        return Event(self, self.events)

    def is_current_stream_capturing(self) -> bool:
        self._ask()
        return self.captures

    def query(self, number: int) -> bool:
        self._ask()
        assert not self.captures, "the query would invalidate the graph"
        return number <= self.arrived

    def _ask(self) -> None:
        self.asked_by.add(threading.get_ident())
        if self.error is not None:
            raise self.error


class Event:
    def __init__(self, device: Device, number: int) -> None:
        self._device = device
        self._number = number

    def record(self, stream: str) -> None:
        assert stream == "stream of meta"
        self._device.done.append("record")

    def query(self) -> bool:
        return self._device.query(self._number)


@contextmanager
def meta_device() -> Iterator[Device]:
    """The device, for this thread."""
    device, real = Device(), torch.get_device_module
    module = SimpleNamespace(
        Event=device.event,
        current_stream=lambda of: f"stream of {of.type}",
        is_current_stream_capturing=device.is_current_stream_capturing,
    )
    with pytest.MonkeyPatch.context() as patch, device:
        patch.setattr(torch, "get_device_module", lambda of=None: module if str(of) == "meta" else real(of))
        yield device


def on_device(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One element."""
    return torch.empty((), device="meta", dtype=dtype)
