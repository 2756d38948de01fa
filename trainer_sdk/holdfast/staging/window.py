"""A shard that is larger than the memory it may take, staged through a window: training waits for the upload.

    training thread   [room for the next chunk?] -> copy -> … until the last chunk is staged
    other threads     chunk() -> hash, offer, send, verified -> done_with() gives the room back

Nobody can wait for ever. Chunks are taken in the order in which they are staged, and a chunk's room comes back without
anything else being staged: the uploader offers what it has when no more comes. An upload that ends gives up, which lets
training go on; a staging that fails is raised by whoever waits for its chunks.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from holdfast.layout.plan import LocalPlan
from holdfast.staging.bits import Copier, Copying, range_copies
from holdfast.staging.host_copy import Copy
from holdfast.staging.shard import StagedShard
from holdfast.staging.slab import Slab, on_page
from holdfast.state.tensors import TensorPiece
from holdfast_client.chunks.stopping import check_stop

_LOOK_SECONDS = 0.05
"""A thread that waits for a chunk looks so often whether it has been told to stop."""


class Room:
    """Which bytes of the window are taken. First fit; what is given back joins its neighbours."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """The start of `size` bytes, on a page; None while there is no gap for them."""
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
    """The slab that is the window, and what goes into each chunk; the same for every save with that plan."""

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
        """Those that fill the chunk's room, which begins at `at`."""
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
    """`fill` is for the training thread; all else is for the threads of the upload."""

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

        True when all was staged, and copied to the last byte. False when the upload has given up, or when staging has
        failed: then the upload fails with that. What ends the program (KeyboardInterrupt) is raised as well.
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
        """None: a window keeps nothing from one save to the next."""
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
        """Whoever comes last, this or release(), gives the slab back: until here, copies were on their way into it."""
        with suppress(Exception):  # a copy that failed has been told to the upload
            self._wait_for_copies()
        with self._changed:
            self._filling = False
            released = self._released
        self._stored = {}
        if released:
            self._give_back()


class _GivenUpError(Exception):
    """The upload takes no more chunks."""
