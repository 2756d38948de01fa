"""One staged save and its memory: the whole shard at once, or a window if memory is short. Slabs are made once and
kept.
"""

from __future__ import annotations

import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Self

import torch

from holdfast.layout.plan import LocalPlan
from holdfast.staging.copy import (
    Copier,
    Copy,
    Copying,
    FrozenPieces,
    Slab,
    bits_view,
    on_page,
    range_copies,
    whole_copy,
)
from holdfast.staging.overlap import LateCopy, Overlap
from holdfast.staging.places import Place, Places
from holdfast.state.tensors import TensorPiece, torch_dtype
from holdfast_client.agent.link import NodeAgent
from holdfast_client.agent.shared_memory import SharedMemory
from holdfast_client.chunks.workers import WorkerThreads
from holdfast_client.transport import check_stop


class StagedShard(ABC):
    """The bytes of each chunk. Chunks have the ordinals 0 to chunk_count - 1 and are taken in this order."""

    def __init__(self, plan: LocalPlan, late: LateCopy | None = None) -> None:
        self.plan = plan
        self.late = late
        """The copies that training does not wait for."""

    @property
    @abstractmethod
    def can_repeat(self) -> bool:
        """Whether every chunk can be taken again until release(), and training does not wait for the upload."""

    @property
    def room_bytes(self) -> int | None:
        """Bytes that are staged at once, if chunk() waits for the room of earlier chunks; None: the whole shard."""
        return None

    def in_shared_memory(self) -> tuple[SharedMemory, Sequence[int]] | None:
        """The memory that a node agent can read until release(), and where each chunk begins; None if it cannot."""
        return None

    @property
    def chunk_count(self) -> int:
        return len(self.plan.shard.chunks)

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(self.plan.shard.chunks)

    @abstractmethod
    def chunk(self, ordinal: int, stop: threading.Event | None = None) -> memoryview:
        """The chunk's bytes: contiguous, read-only, no copy. They do not change until done_with() or release().

        May wait until they are staged. Raises TransferStopped soon after `stop` is set, the error of a failed staging,
        and RuntimeError after release().
        """

    @abstractmethod
    def digest(self, ordinal: int) -> str | None:
        """The chunk's digest, if an earlier save has found it and no byte has changed since."""

    @abstractmethod
    def hashed(self, digests: Sequence[str]) -> None:
        """Takes the digests of the chunks, by ordinal."""

    @abstractmethod
    def done_with(self, ordinal: int) -> None:
        """The chunk's readers have ended."""

    @abstractmethod
    def give_up(self) -> None:
        """No more chunks will be taken: if training waits for room, it goes on at once. May be called twice."""

    @abstractmethod
    def release(self) -> None:
        """Returns the memory for the next save. All readers of its chunks must have ended. May be called twice."""


@dataclass(frozen=True)
class WholeLayout:
    """A plan laid out over a slab: the views are made once and used by every save with that plan."""

    plan: LocalPlan
    slab: Slab
    starts: tuple[int, ...]
    views: Mapping[str, torch.Tensor]
    frozen: FrozenPieces

    @classmethod
    def over(cls, slab: Slab, plan: LocalPlan, distrusted: set[str]) -> Self:
        """The slab must be large enough. It may hold bytes of an earlier layout."""
        starts, _ = chunk_starts(plan)
        specs = {spec.name: spec for spec in plan.specs}
        views = {}
        filled: Counter[int] = Counter()
        for piece in plan.shard.pieces:
            spec = specs[piece.tensor]
            start = starts[piece.segments[0].ordinal] + piece.segments[0].offset
            views[piece.tensor] = bits_view(
                slab.tensor[start : start + spec.bytes], torch_dtype(spec.dtype), spec.shape
            )
            for segment in piece.segments:
                filled[segment.ordinal] += segment.bytes
        # The gaps are part of the chunk: the same state, the same digest. Only packs have gaps, and training waits.
        for ordinal, (start, size) in enumerate(zip(starts, plan.shard.chunks, strict=True)):
            if filled[ordinal] < size:
                slab.tensor[start : start + size].zero_()
        return cls(plan, slab, starts, views, FrozenPieces(plan, views, distrusted))

    def fill(
        self,
        copier: Copier,
        stored: Sequence[TensorPiece],
        meanwhile: Callable[[], object],
        overlap: Overlap | None,
    ) -> LateCopy | None:
        """Returns when everything is copied; with `overlap` all but what the returned copy still brings."""
        now: list[TensorPiece] = []
        later: list[TensorPiece] = []
        for piece in self.frozen.changed(stored):
            (later if overlap is not None and overlap.takes(piece) else now).append(piece)
        copying = copier.start(self._copy(piece) for piece in now)
        late: LateCopy | None = None
        try:
            if overlap is not None:
                late = overlap.begin(later, self._copy, now)
            meanwhile()
        except BaseException:
            if overlap is not None:
                overlap.wait()
            raise
        finally:
            copying.wait()  # the slab must not be used earlier
        self.frozen.staged(now)
        return late

    def _copy(self, piece: TensorPiece) -> Copy:
        return whole_copy(self.views[piece.spec.name], piece.local)


class WholeShard(StagedShard):
    """The whole shard, copied at once: training goes on after the copy, however long the upload takes. No call waits,
    except for a copy beside training."""

    def __init__(self, layout: WholeLayout, give_back: Callable[[], None], late: LateCopy | None) -> None:
        super().__init__(layout.plan, late)
        self._layout: WholeLayout | None = layout
        self._give_back = give_back

    @property
    def can_repeat(self) -> bool:
        return True

    def in_shared_memory(self) -> tuple[SharedMemory, Sequence[int]] | None:
        layout = self._layout
        return (layout.slab.shared, layout.starts) if layout is not None and layout.slab.shared is not None else None

    def chunk(self, ordinal: int, stop: threading.Event | None = None) -> memoryview:
        if self._layout is None:
            raise RuntimeError("this save was released: its slab may hold another one by now")
        if self.late is not None:
            self.late.settle()
        start = self._layout.starts[ordinal]
        return self._layout.slab.view[start : start + self.plan.shard.chunks[ordinal]].toreadonly()

    def digest(self, ordinal: int) -> str | None:
        return None if self._layout is None else self._layout.frozen.digests.get(ordinal)

    def hashed(self, digests: Sequence[str]) -> None:
        if self._layout is not None:
            self._layout.frozen.remember(digests)

    def done_with(self, ordinal: int) -> None:
        """Nothing to do: the slab is released as a whole."""

    def give_up(self) -> None:
        """Nothing to do: training does not wait."""

    def release(self) -> None:
        layout, self._layout = self._layout, None
        if layout is not None:
            if self.late is not None:
                self.late.end()
            self._give_back()


def chunk_starts(plan: LocalPlan) -> tuple[tuple[int, ...], int]:
    """The start of each chunk in a slab that holds them all, and the bytes of that slab."""
    # Chunks begin on a page, unless one continues the tensor of the chunk before: then both are one copy.
    going_on = {segment.ordinal for piece in plan.shard.pieces for segment in piece.segments[1:]}
    starts, end = [], 0
    for ordinal, size in enumerate(plan.shard.chunks):
        start = end if ordinal in going_on else on_page(end)
        starts.append(start)
        end = start + size
    return tuple(starts), end


_LOOK_SECONDS = 0.05
"""How often a thread that waits for a chunk checks whether it must stop."""


class Room:
    """The taken bytes of the window. First fit; returned room joins its neighbours."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """The start of `size` bytes, on a page; None if no gap is large enough."""
        start = 0
        for taken in sorted(self._taken):
            if start + size <= taken:
                break
            start = on_page(taken + self._taken[taken])
        if start + size > self.capacity_bytes:
            return None
        self._taken[start] = size
        return start

    def give(self, start: int) -> None:
        del self._taken[start]


@dataclass(frozen=True)
class _Part:
    """The bytes of one tensor in one chunk."""

    tensor: str
    start: int
    """In the tensor."""
    offset: int
    """In the chunk."""
    bytes: int


class WindowLayout:
    """The slab of the window, and the parts of each chunk; the same for every save with that plan."""

    def __init__(self, plan: LocalPlan, slab: Slab) -> None:
        self.plan = plan
        self.slab = slab
        self._parts: dict[int, list[_Part]] = defaultdict(list)
        for piece in plan.shard.pieces:
            start = 0
            for segment in piece.segments:
                self._parts[segment.ordinal].append(_Part(piece.tensor, start, segment.offset, segment.bytes))
                start += segment.bytes

    def copies(self, ordinal: int, at: int, stored: Mapping[str, TensorPiece]) -> Iterator[Copy]:
        """The copies that fill the chunk's room, which begins at `at`."""
        parts = self._parts[ordinal]
        size = self.plan.shard.chunks[ordinal]
        if sum(part.bytes for part in parts) < size:
            self.slab.tensor[at : at + size].zero_()  # the gaps are part of the chunk: the same state, the same digest
        for part in parts:
            start = at + part.offset
            room = self.slab.tensor[start : start + part.bytes]
            yield from range_copies(room, stored[part.tensor].local, part.start)


@dataclass(frozen=True)
class _Staged:
    start: int
    copying: Copying


class WindowedShard(StagedShard):
    """A shard that is larger than the memory it may take, staged through a window: training waits for the upload.

        training thread   [room for the next chunk?] -> copy -> … until the last chunk is staged
        other threads     chunk() -> hash, offer, send, verified -> done_with() returns the room

    No thread can wait for ever. Chunks are taken in the order in which they are staged, and a chunk's room comes back
    without further staging, because the uploader offers its chunks when no more come. An upload that ends gives up, and
    training goes on; a failed staging raises in the threads that wait for its chunks.

    `fill` is for the training thread; all else is for the threads of the upload."""

    def __init__(
        self,
        layout: WindowLayout,
        copier: Copier,
        stored: Sequence[TensorPiece],
        give_back: Callable[[], None],
    ) -> None:
        super().__init__(layout.plan)
        self._layout = layout
        self._copier = copier
        self._stored = {piece.spec.name: piece for piece in stored}
        self._give_back = give_back
        self._changed = threading.Condition()
        self._room = Room(layout.slab.capacity_bytes)
        self._staged: dict[int, _Staged] = {}
        self._copying: list[Copying] = []
        self._failure: BaseException | None = None
        self._given_up = False
        self._filling = True
        self._released = False

    def fill(self) -> bool:
        """Stages chunk after chunk, and waits for room before each. Once it returns, the state may change again.

        True when all was staged, to the last byte. False when the upload has given up, or when staging has failed: the
        upload then fails with the same error. KeyboardInterrupt and the like are raised as well.
        """
        try:
            for ordinal in range(self.chunk_count):
                self._fill_next(ordinal)
            self._wait_for_copies()
            return True
        except _GivenUpError:
            return False
        except Exception as error:  # the other ranks have voted for this save and must hear that it failed
            self._fail(error)
            return False
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._leave()

    @property
    def can_repeat(self) -> bool:
        return False

    @property
    def room_bytes(self) -> int | None:
        return self._room.capacity_bytes

    def chunk(self, ordinal: int, stop: threading.Event | None = None) -> memoryview:
        with self._changed:
            while (staged := self._staged.get(ordinal)) is None:
                if self._failure is not None:
                    raise self._failure
                if self._given_up or self._released:
                    raise RuntimeError("this save was released or given up before the chunk was staged")
                check_stop(stop)
                self._changed.wait(_LOOK_SECONDS)
        staged.copying.wait()
        size = self.plan.shard.chunks[ordinal]
        return self._layout.slab.view[staged.start : staged.start + size].toreadonly()

    def digest(self, ordinal: int) -> str | None:
        """None: a window keeps no bytes from one save to the next."""
        return None

    def hashed(self, digests: Sequence[str]) -> None:
        """Nothing to do, for the same reason."""

    def done_with(self, ordinal: int) -> None:
        with self._changed:
            if (staged := self._staged.pop(ordinal, None)) is not None:
                self._room.give(staged.start)
                self._changed.notify_all()

    def give_up(self) -> None:
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            if self._released:
                return
            self._released = self._given_up = True
            self._staged.clear()
            self._changed.notify_all()
            filling = self._filling
        if not filling:
            self._give_back()

    def _fill_next(self, ordinal: int) -> None:
        size = self.plan.shard.chunks[ordinal]
        with self._changed:
            while (start := self._room.take(size)) is None and not self._given_up:
                self._changed.wait()
            if start is None or self._given_up:
                raise _GivenUpError
        copying = self._copier.start(self._layout.copies(ordinal, start, self._stored))
        self._copying.append(copying)
        with self._changed:
            self._staged[ordinal] = _Staged(start, copying)
            self._changed.notify_all()

    def _wait_for_copies(self) -> None:
        for copying in self._copying:
            copying.wait()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _leave(self) -> None:
        """The later of this and release() returns the slab: until here, copies were on their way into it."""
        with suppress(Exception):  # the upload knows of a failed copy already
            self._wait_for_copies()
        with self._changed:
            self._filling = False
            released = self._released
        self._stored = {}
        if released:
            self._give_back()


class _GivenUpError(Exception):
    """The upload takes no more chunks."""


log = logging.getLogger("holdfast")


_RESERVE = 64
"""One part in so many, of the memory that is made before the first save."""


class StagingArea:
    """Owns the slabs. `stage` runs on the training thread; a shard's `release` on any."""

    def __init__(
        self,
        slabs: int = 1,
        *,
        window_bytes: int | None = None,
        helpers: WorkerThreads | None = None,
        overlap: bool = False,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        agent: NodeAgent | None = None,
    ) -> None:
        """`slabs`: saves that may be held at once. Each costs host memory: the rank's share of the state, or
        `window_bytes` if that is less. A window must have room for the largest chunk.
        `helpers`: threads that may be idle while training waits; they copy as well.
        `overlap`: what only an optimizer's step changes is copied while training goes on. Of one save at a time: the
        next stage() comes after the release of the last shard. `waiting`: entered while a step waits for that.
        `agent`: the slabs are memory that it can map too, and there are more of them for the states that it keeps."""
        if slabs < 1:
            raise ValueError(f"a staging area needs at least one slab, not {slabs}")
        if sys.byteorder != "little":
            raise RuntimeError("chunks hold little-endian bytes, and this machine is big-endian")
        self._window_bytes = window_bytes
        self._places = Places(slabs, agent)
        self._copier = Copier(helpers)
        self._overlap = Overlap(self._copier, waiting) if overlap else None
        self._distrusted: set[str] = set()

    @property
    def free(self) -> int:
        """Slabs that stage() could use now."""
        return self._places.free

    @torch.inference_mode(mode=False)  # a slab that is made in that mode cannot be written to outside of it
    def stage(
        self, plan: LocalPlan, pieces: Sequence[TensorPiece], *, meanwhile: Callable[[], object] = lambda: None
    ) -> StagedShard:
        """Copies the pieces that the plan stores. When it returns, training may change the tensors (with `overlap` it
        may go on, and the hook lets no step write too early); but a WindowedShard must still be filled, on this thread,
        while other threads take its chunks.

        `pieces` must be the planned ones; pieces that other ranks store are ignored. Bits are copied, never values: NaN
        payloads survive. It allocates nothing if an earlier slab has room and the plan is the same.
        `meanwhile` is called once, while a device's copies are running.
        Raises StagingBusyError if no slab is free.
        """
        place = self._places.take(lambda: self._whole_bytes(plan))
        try:
            stored = _stored(plan, pieces)
            layout = place.layout
            if layout is None or layout.plan.digest != plan.digest:
                layout = place.layout = self._laid_out(place, plan)
            gpu = next((piece.local.device for piece in stored if piece.local.is_cuda), None)
            if gpu is not None:  # else CUDA would make a context, of some hundred MB, for nothing
                place.lock_for(gpu)
            if isinstance(layout, WholeLayout):
                late = layout.fill(self._copier, stored, meanwhile, self._overlap)
                return WholeShard(layout, lambda: self._places.give_back(place), late)
            meanwhile()
            return WindowedShard(layout, self._copier, stored, lambda: self._places.give_back(place))
        except BaseException:
            self._places.give_back(place)
            raise

    def prepare(self, plan: LocalPlan) -> None:
        """A thread makes the memory for the first save, so that training does not wait for it then. That save's plan
        may be a little larger."""
        size = self._whole_bytes(plan)
        self._places.make_first(self._window_bytes or 0 if size is None else size + size // _RESERVE)

    def forget_frozen(self) -> None:
        """The tensors were loaded again: stage those that are declared frozen too, at the next save."""
        for place in self._places:
            if isinstance(layout := place.layout, WholeLayout):
                layout.frozen.forget()

    def wait_for_copies(self) -> None:
        """Returns when no copy reads the tensors any more: call it before something else than a step writes to them."""
        if self._overlap is not None:
            self._overlap.wait()

    def close(self) -> None:
        """Releases the memory: free slabs now, held ones with their save. No stage() after this."""
        if self._overlap is not None:
            self._overlap.close()
        self._places.close()

    def _whole_bytes(self, plan: LocalPlan) -> int | None:
        """Bytes of a slab for all of it; None: it goes through a window."""
        _, size = chunk_starts(plan)
        return None if self._window_bytes is not None and size > self._window_bytes else size

    def _laid_out(self, place: Place, plan: LocalPlan) -> WholeLayout | WindowLayout:
        size = self._whole_bytes(plan)
        if size is None:
            assert self._window_bytes is not None  # it is too small
            if any(spec.pack == "declared" for spec in plan.specs):
                log.warning(
                    "the state is larger than host_memory: tensors declared frozen are staged at every save too"
                )
            return WindowLayout(plan, place.with_room(self._window_bytes))
        return WholeLayout.over(place.with_room(size), plan, self._distrusted)


def _stored(plan: LocalPlan, pieces: Sequence[TensorPiece]) -> list[TensorPiece]:
    names = {piece.tensor for piece in plan.shard.pieces}
    stored = [piece for piece in pieces if piece.spec.name in names]
    if len(stored) != len(names):
        missing = sorted(names - {piece.spec.name for piece in stored})
        raise ValueError(f"the plan stores {missing[0]!r}, which is not among the pieces")
    return stored
