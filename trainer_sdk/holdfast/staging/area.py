"""Which memory a save is staged into: slabs that are made once and kept. A shard that may not take as much memory as it
has bytes is staged through a window."""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.layout.plan import LocalPlan
from holdfast.staging.bits import Copier
from holdfast.staging.shard import StagedShard
from holdfast.staging.slab import Slab
from holdfast.staging.whole import WholeLayout, WholeShard, chunk_starts
from holdfast.staging.window import WindowedShard, WindowLayout
from holdfast.state.tensors import TensorPiece
from holdfast_client.chunks.workers import WorkerThreads

log = logging.getLogger("holdfast")


class StagingBusyError(RuntimeError):
    """Every slab still holds a save that is not released. Wait for it, or decline this save."""


@dataclass
class _Place:
    """A slab, and what is laid out over it. Belongs to one save at a time."""

    slab: Slab | None = None
    layout: WholeLayout | WindowLayout | None = None

    def with_room(self, capacity_bytes: int) -> Slab:
        """Of this size at least; zero, for the gaps between small tensors are part of the chunk."""
        self.layout = None
        if self.slab is not None and self.slab.capacity_bytes >= capacity_bytes:
            self.slab.tensor.zero_()
            return self.slab
        self.release()  # before the larger one is made: the host may not have room for both
        self.slab = Slab(capacity_bytes)
        return self.slab

    def release(self) -> None:
        slab, self.slab, self.layout = self.slab, None, None
        if slab is not None:
            slab.release()


class StagingArea:
    """Owns the slabs. `stage` runs on the training thread; a shard's `release` on any."""

    def __init__(
        self, slabs: int = 1, *, window_bytes: int | None = None, helpers: WorkerThreads | None = None
    ) -> None:
        """`slabs`: saves that may be held at once; each costs the rank's share of the state in host memory, or
        `window_bytes` where that is less. A window must have room for the largest chunk.
        `helpers`: threads that may be free while training waits; they copy as well."""
        if slabs < 1:
            raise ValueError(f"a staging area needs at least one slab, not {slabs}")
        if sys.byteorder != "little":
            raise RuntimeError("chunks hold little-endian bytes, and this machine is big-endian")
        self._window_bytes = window_bytes
        self._lock = threading.Lock()
        self._places = [_Place() for _ in range(slabs)]
        self._free = list(self._places)
        self._closed = False
        self._copier = Copier(helpers)
        self._distrusted: set[str] = set()

    @property
    def free(self) -> int:
        """Slabs that stage() could use now."""
        with self._lock:
            return len(self._free)

    @torch.inference_mode(mode=False)  # slabs that are made in that mode could not be written to outside of it
    def stage(
        self, plan: LocalPlan, pieces: Sequence[TensorPiece], *, meanwhile: Callable[[], object] = lambda: None
    ) -> StagedShard:
        """Copy the pieces that the plan stores. When it returns, training may change the tensors; but a WindowedShard
        has yet to be filled, on this thread, while its chunks are taken on others.

        `pieces` are those that were planned; the ones that other ranks store are ignored. Bits are copied, never
        values: NaN payloads survive. Allocates nothing when an earlier slab has room and the plan is the same.
        `meanwhile` is called once, while a device's copies are under way.
        Raises StagingBusyError when no slab is free.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("this staging area is closed")
            if not self._free:
                raise StagingBusyError("every staging slab holds a save that is still uploading")
            place = self._free.pop()
        try:
            stored = _stored(plan, pieces)
            layout = place.layout
            if layout is None or layout.plan.digest != plan.digest:
                layout = place.layout = self._laid_out(place, plan)
            if isinstance(layout, WholeLayout):
                layout.fill(self._copier, stored, meanwhile)
                return WholeShard(layout, lambda: self._return(place))
            meanwhile()
            return WindowedShard(layout, self._copier, stored, lambda: self._return(place))
        except BaseException:
            self._return(place)
            raise

    def forget_frozen(self) -> None:
        """The tensors were loaded anew: stage also those that are declared frozen, at the next save."""
        for place in self._places:
            if isinstance(layout := place.layout, WholeLayout):
                layout.frozen.forget()

    def close(self) -> None:
        """Release the memory: free slabs now, held ones when their save is released. No stage() after this."""
        with self._lock:
            self._closed = True
            places, self._free = self._free, []
        for place in places:
            place.release()

    def _laid_out(self, place: _Place, plan: LocalPlan) -> WholeLayout | WindowLayout:
        _, size = chunk_starts(plan)
        if self._window_bytes is not None and size > self._window_bytes:
            if any(spec.pack == "declared" for spec in plan.specs):
                log.warning("the state is larger than host_memory: what is declared frozen is staged at every save too")
            return WindowLayout(plan, place.with_room(self._window_bytes))
        return WholeLayout.over(place.with_room(size), plan, self._distrusted)

    def _return(self, place: _Place) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(place)
                return
        place.release()


def _stored(plan: LocalPlan, pieces: Sequence[TensorPiece]) -> list[TensorPiece]:
    names = {piece.tensor for piece in plan.shard.pieces}
    stored = [piece for piece in pieces if piece.spec.name in names]
    if len(stored) != len(names):
        missing = sorted(names - {piece.spec.name for piece in stored})
        raise ValueError(f"the plan stores {missing[0]!r}, which is not among the pieces")
    return stored
