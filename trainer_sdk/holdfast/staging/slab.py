"""The memory that is staged into. Everything that touches it is in here, so that it can be shared memory one day."""

import mmap
from typing import Any

import torch

PAGE_BYTES = 4096


class Slab:
    """Page-aligned host memory; page-locked and mapped for the device's copy engine where CUDA is in use."""

    def __init__(self, capacity_bytes: int) -> None:
        """Raises MemoryError or OSError when the host has not that much, RuntimeError when it cannot be locked."""
        self.capacity_bytes = capacity_bytes
        self._memory = mmap.mmap(-1, max(capacity_bytes, PAGE_BYTES))
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.view = memoryview(self._memory)
        self._locked = torch.cuda.is_available()
        if self._locked:
            _check_cuda(_runtime().cudaHostRegister(self.tensor.data_ptr(), self.tensor.numel(), 0))

    def release(self) -> None:
        """Unlock and let go. The memory itself ends with its last reader."""
        if self._locked:
            self._locked = False
            _check_cuda(_runtime().cudaHostUnregister(self.tensor.data_ptr()))
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.view = memoryview(b"")


def on_page(position: int) -> int:
    """The first page's start at or behind `position`."""
    return -(-position // PAGE_BYTES) * PAGE_BYTES


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check_cuda(error: object) -> None:
    code = int(getattr(error, "value", error))  # type: ignore[call-overload]
    if code != 0:
        raise RuntimeError(f"the staging slab cannot be page-locked (CUDA error {code}); raise the memlock limit")
