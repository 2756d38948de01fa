"""GPUs of the tests: host tensors that say they are on one, and what Holdfast calls of CUDA for them. It is strict: a
call that CUDA would refuse fails the test, and a copy is made when an event is waited for, not earlier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from holdfast.staging import copy

_PAGE = 4096
_PORTABLE = 1


class OnGpu(torch.Tensor):
    """`host`, on the GPU of this number."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, number: int = 1) -> OnGpu:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), dtype=host.dtype, device=f"cuda:{number}"
        )
        made.host = host
        return made

    def __getitem__(self, at: Any) -> OnGpu:  # torch's own looks for the device
        return OnGpu(self.host[at], self.device.index)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            assert (kwargs or {}) == {"non_blocking": True} or args[2:] == (True,)
            targets, sources = ([getattr(each, "host", each) for each in tensors] for tensors in args[:2])
            Gpus.here.queue(lambda: torch._foreach_copy_(targets, sources))
            return None
        number = next(each for each in args if isinstance(each, OnGpu)).device.index
        result = func(*tree_map_only(OnGpu, lambda each: each.host, args), **(kwargs or {}))
        return tree_map_only(torch.Tensor, lambda each: OnGpu(each, number), result)


class Gpus:
    """Two of them. The current one is number 0, as in a process that has chosen none."""

    here: Gpus

    def __init__(self) -> None:
        self.current = 0
        self.contexts: set[int] = set()
        """The GPUs on which CUDA has made one."""
        self.locked: dict[int, int] = {}
        """Page-locked memory: address -> bytes."""
        self.refusal = 0
        """The error that locking returns; 0: it locks."""
        self.taken: set[int] = set()
        """Addresses that were refused with 712, for ever taken for other memory."""
        self.left_error = False
        """The next kernel is told of an error."""
        self.broken = False
        """After an error of CUDA each of its calls returns it."""
        self.captures = False
        """Training captures a graph, which no other thread's question may invalidate."""
        self.calls: list[str] = []
        self._stream: Stream | None = None

    def queue(self, work: Any) -> None:
        assert self._stream is not None, "a copy on the stream of the training would wait for it"
        self._stream.pending.append(work)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self._call("lock")
        assert (address % _PAGE, flags) == (0, _PORTABLE)
        assert size >= _PAGE
        assert all(address >= at + of or address + size <= at for at, of in self.locked.items()), "locked already"
        if self.refusal == 712:
            self.taken.add(address)
        refusal = 712 if address in self.taken else self.refusal
        self.left_error = bool(refusal)
        if not refusal:
            self.locked[address] = size
        return refusal

    def cudaHostUnregister(self, address: int) -> int:
        self._call("unlock")
        if self.broken:
            return 700  # an illegal address
        del self.locked[address]
        return 0

    def zeros(self, *of: Any, device: Any = None, **options: Any) -> Any:
        if torch.device(device or "cpu").type != "cuda":
            return _zeros(*of, device=device, **options)
        if self.left_error:
            self.left_error = False
            raise RuntimeError("CUDA error: an error of an earlier call")
        return None

    @contextmanager
    def device(self, gpu: torch.device) -> Iterator[None]:
        before, self.current = self.current, gpu.index
        yield
        self.current = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        yield
        self._stream = before

    def event(self, enable_timing: bool = False) -> Event:
        return Event(self)

    def _call(self, name: str) -> None:
        assert not self.captures, f"{name} would invalidate the graph"
        self.calls.append(name)
        self.contexts.add(self.current)

    def synchronize(self, event: Event) -> None:
        self.ask("wait", event)
        event.run()

    def ask(self, name: str, event: Event) -> None:
        self._call(name)
        assert self.current == event.device.index


_zeros = torch.zeros


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pending: list[Any] = []
        self.waits_for: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waits_for.append(other)


class TrainingStream:
    """What training has queued on it is done at once, except behind an event: then the work of that comes first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_event(self, event: Event) -> None:
        event.stream_waits = True
        event.run()


class Event:
    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self.before: list[Any] = []
        self.stream_waits = False

    def record(self, stream: Stream | TrainingStream) -> None:
        self.device = stream.device
        if isinstance(stream, Stream):
            assert stream.waits_for, "the work that training has queued comes first"
            self.before = stream.pending

    def synchronize(self) -> None:
        self._gpus.synchronize(self)

    def run(self) -> None:
        while self.before:
            self.before.pop(0)()

    def query(self) -> bool:
        self._gpus.ask("query", self)
        return True

    def elapsed_time(self, later: Event) -> float:
        """Two seconds, if a stream has waited for the later one."""
        self._gpus.ask("elapsed", self)
        return 2000.0 if later.stream_waits else -1.0


@contextmanager
def gpus() -> Iterator[Gpus]:
    """CUDA, as staging calls it."""
    Gpus.here = here = Gpus()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy, "runtime", lambda: here)
        patch.setattr(torch, "zeros", here.zeros)
        for name, stand_in in {
            "is_available": lambda: True,
            "device": here.device,
            "stream": here.stream,
            "current_stream": TrainingStream,
            "Stream": Stream,
            "Event": here.event,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        yield here
