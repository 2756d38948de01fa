"""Device and host tensors -> a host slab laid out in chunk order. The only part of a save that training waits for.

Flow: capture -> plan -> **stage** -> hash -> upload. A slab is allocated once, reused by every save with room in it,
page-locked where CUDA is there. Each chunk is one contiguous slice of it: hashing and PUT read it without a copy.
Everything that touches the slab's memory is in Slab, so that it can live in shared memory one day.
"""

import mmap
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.layout.plan import LocalPlan
from holdfast.state.tensors import TensorPiece

_PAGE_BYTES = 4096
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StagingBusyError(RuntimeError):
    """Every slab still holds a save that is not released. Wait for it, or decline this save."""


class Slab:
    """Page-aligned host memory; page-locked and mapped for the device's copy engine where CUDA is in use."""

    def __init__(self, capacity_bytes: int) -> None:
        """Raises MemoryError or OSError when the host has not that much, RuntimeError when it cannot be locked."""
        self.capacity_bytes = capacity_bytes
        self._memory = mmap.mmap(-1, max(capacity_bytes, _PAGE_BYTES))
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


class StagedShard:
    """One staged save: the bytes of each chunk, unchanged until release()."""

    def __init__(self, area: "StagingArea", binding: "_Binding") -> None:
        self._area = area
        self._binding: _Binding | None = binding
        self.plan = binding.plan

    @property
    def chunk_count(self) -> int:
        """Chunks have the ordinals 0 to chunk_count - 1."""
        return len(self.plan.shard.chunks)

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(self.plan.shard.chunks)

    def chunk(self, ordinal: int) -> memoryview:
        """The chunk's bytes: contiguous, read-only, no copy. Raises RuntimeError after release()."""
        if self._binding is None:
            raise RuntimeError("this save was released: its slab may hold another one by now")
        start = self._binding.starts[ordinal]
        return self._binding.slab.view[start : start + self.plan.shard.chunks[ordinal]].toreadonly()

    def release(self) -> None:
        """Give the slab back for the next save. All readers of its chunks must have ended. May be called twice."""
        binding, self._binding = self._binding, None
        if binding is not None:
            self._area._return(binding)


@dataclass(frozen=True)
class _Binding:
    """A plan laid out over a slab: the views are made once and used by every save with that plan."""

    plan: LocalPlan
    slab: Slab
    starts: tuple[int, ...]
    views: Mapping[str, torch.Tensor]


class StagingArea:
    """Owns the slabs. `stage` runs on the training thread; `release` on any."""

    def __init__(self, slabs: int = 1) -> None:
        """`slabs`: saves that may be held at once; each costs the rank's share of the state in host memory."""
        if slabs < 1:
            raise ValueError(f"a staging area needs at least one slab, not {slabs}")
        if sys.byteorder != "little":
            raise RuntimeError("chunks hold little-endian bytes, and this machine is big-endian")
        self._lock = threading.Lock()
        self._free: list[_Binding | None] = [None] * slabs
        self._held = 0
        self._closed = False
        self._stream: torch.cuda.Stream | None = None

    @property
    def free(self) -> int:
        """Slabs that stage() could use now."""
        with self._lock:
            return len(self._free)

    def stage(self, plan: LocalPlan, pieces: Sequence[TensorPiece]) -> StagedShard:
        """Copy the pieces that the plan stores. When it returns, training may change the tensors.

        `pieces` are those that were planned; the ones that other ranks store are ignored. Bits are copied, never
        values: NaN payloads survive. Allocates nothing when an earlier slab has room and the plan is the same.
        Raises StagingBusyError when no slab is free.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("this staging area is closed")
            if not self._free:
                raise StagingBusyError("every staging slab holds a save that is still uploading")
            binding = self._free.pop()
        try:
            fresh = _bind(plan, binding)
        except BaseException:
            self._return(binding)
            raise
        try:
            self._copy(fresh, pieces)
        except BaseException:
            self._return(fresh)
            raise
        return StagedShard(self, fresh)

    def close(self) -> None:
        """Release the memory: free slabs now, held ones when their save is released. No stage() after this."""
        with self._lock:
            self._closed = True
            bindings, self._free = self._free, []
        for binding in bindings:
            if binding is not None:
                binding.slab.release()

    def _return(self, binding: _Binding | None) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(binding)
                return
        if binding is not None:
            binding.slab.release()

    def _copy(self, binding: _Binding, pieces: Sequence[TensorPiece]) -> None:
        stored = [piece for piece in pieces if piece.spec.name in binding.views]
        if len(stored) != len(binding.views):
            missing = sorted(binding.views.keys() - {piece.spec.name for piece in stored})
            raise ValueError(f"the plan stores {missing[0]!r}, which is not among the pieces")
        targets = [binding.views[piece.spec.name] for piece in stored]
        if not torch.cuda.is_available():
            _copy_bits(targets, stored, non_blocking=False)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())  # what training has queued comes first
        with torch.cuda.stream(self._stream):
            _copy_bits(targets, stored, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        done.synchronize()


@torch.no_grad()
def _copy_bits(targets: list[torch.Tensor], pieces: list[TensorPiece], *, non_blocking: bool) -> None:
    if targets:
        torch._foreach_copy_(targets, [_as_bits(piece.local) for piece in pieces], non_blocking=non_blocking)


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    elif tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.view(_BITS[tensor.element_size()])


def _bind(plan: LocalPlan, binding: _Binding | None) -> _Binding:
    if binding is not None and binding.plan.digest == plan.digest:
        return binding
    starts, total_bytes = _chunk_starts(plan)
    slab = None if binding is None else binding.slab
    if slab is None or slab.capacity_bytes < total_bytes:
        if slab is not None:
            slab.release()  # before the larger one is made: the host may not have room for both
        slab = Slab(total_bytes)
    else:
        slab.tensor.zero_()  # the gaps between small tensors are part of the chunk: the same state, the same digest
    specs = {spec.name: spec for spec in plan.specs}
    views = {}
    for piece in plan.shard.pieces:
        spec = specs[piece.tensor]
        start = starts[piece.segments[0].ordinal] + piece.segments[0].offset
        views[piece.tensor] = _bits_view(slab.tensor[start : start + spec.bytes], spec.dtype, spec.shape)
    return _Binding(plan, slab, starts, views)


def _chunk_starts(plan: LocalPlan) -> tuple[tuple[int, ...], int]:
    # Chunks begin on a page, except where one goes on with the tensor of the chunk before: that is one copy.
    going_on = {segment.ordinal for piece in plan.shard.pieces for segment in piece.segments[1:]}
    starts, end = [], 0
    for ordinal, size in enumerate(plan.shard.chunks):
        start = end if ordinal in going_on else -(-end // _PAGE_BYTES) * _PAGE_BYTES
        starts.append(start)
        end = start + size
    return tuple(starts), end


def _bits_view(flat: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    elements = 1
    for size in shape:
        elements *= size
    item = flat.numel() // elements
    if dtype.startswith("complex"):
        return flat.view(_BITS[item // 2]).view(*shape, 2)
    return flat.view(_BITS[item]).view(shape)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check_cuda(error: object) -> None:
    code = int(getattr(error, "value", error))  # type: ignore[call-overload]
    if code != 0:
        raise RuntimeError(f"the staging slab cannot be page-locked (CUDA error {code}); raise the memlock limit")
