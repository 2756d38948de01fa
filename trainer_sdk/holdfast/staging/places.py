"""The slabs of a staging area, and which one the next save gets: with a node agent, one whose state need not stay."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from holdfast.staging.copy import PAGE_BYTES, AddressTakenError, Slab
from holdfast_client.agent.link import NodeAgent
from holdfast_client.agent.shared_memory import SharedMemory

if TYPE_CHECKING:
    from holdfast.staging.shard import WholeLayout, WindowLayout


class StagingBusyError(RuntimeError):
    """Every slab still holds a save that is not released. Wait for it, or decline this save."""


class Place:
    """A slab and its layout. Belongs to one save at a time."""

    def __init__(self, agent: NodeAgent | None, spare: SharedMemory | None = None) -> None:
        """`agent`: can map its memory. `spare`: memory that it has room for beside that of the other places."""
        self._agent = agent
        self.is_spare = spare is not None
        self.slab: Slab | None = None if spare is None else Slab(spare.bytes, memory=spare)
        self.layout: WholeLayout | WindowLayout | None = None
        self._unusable: list[Slab] = []

    @property
    def kept(self) -> SharedMemory | None:
        """Its memory, if a node agent keeps the state in it."""
        memory = None if self.slab is None else self.slab.shared
        return memory if memory is not None and memory.is_kept else None

    def with_room(self, capacity_bytes: int) -> Slab:
        """A slab of at least this size, with whatever an earlier layout has left in it."""
        self.layout = None
        if self.slab is not None and self.slab.capacity_bytes >= capacity_bytes:
            return self.slab
        self.release()  # first: the host may not have room for both slabs
        if self._agent is not None:
            self._agent.make_room(max(capacity_bytes, PAGE_BYTES))
        self.slab = Slab(capacity_bytes, shared=self._agent is not None)
        return self.slab

    def lock_for(self, gpu: torch.device) -> None:
        """As Slab's. The next save has another slab if this one's address is taken."""
        assert self.slab is not None  # the layout is over it
        try:
            self.slab.lock_for(gpu)
        except AddressTakenError:
            # Kept, or the system would give its address to the next slab.
            self._unusable.append(self.slab)
            self.slab = self.layout = None
            raise

    def release(self) -> None:
        slab, self.slab, self.layout = self.slab, None, None
        if slab is not None:
            slab.release()


log = logging.getLogger("holdfast")


class Places:
    """`take` is for the training thread; all else for any. Threads make memory that the next save will need: else that
    save would hold training until the system has found it."""

    def __init__(self, count: int, agent: NodeAgent | None) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._making = threading.Lock()
        """Around the choice to make one more. A thread that has both locks took this one first."""
        self._all = [Place(agent) for _ in range(count)]
        self._free = list(self._all)
        """Kept states in the order of their saves."""
        self._closed = False

    def __iter__(self) -> Iterator[Place]:
        return iter([*self._all])

    def __getitem__(self, number: int) -> Place:
        return self._all[number]

    @property
    def free(self) -> int:
        """Places that `take` could give now."""
        with self._lock:
            return len(self._free)

    def take(self, spare_bytes: Callable[[], int | None]) -> Place:
        """One without a kept state, else a new one, if the agent and the memory limits allow, else the one with the
        oldest state. `spare_bytes`: of a new one; None: there can be none. Raises StagingBusyError if none is free."""
        with self._making:
            with self._lock:
                if self._closed:
                    raise RuntimeError("this staging area is closed")
                if not self._free:
                    raise StagingBusyError("every staging slab holds a save that is still uploading")
                place = self._without_state()
                if place is not None:
                    self._free.remove(place)
                    return place
            if (spare := self._spare(spare_bytes)) is not None:
                return spare
        with self._lock:
            place = self._free.pop(0)
        if self._agent is not None and (memory := place.kept) is not None:
            self._agent.reclaim(memory)
            if memory.may_be_read:
                place.release()
        return place

    def give_back(self, place: Place) -> None:
        """Its save is released."""
        slab = place.slab
        if slab is not None and slab.may_be_read:
            place.release()
        if slab is not None and place.is_spare and slab.is_lock_refused and self._agent is not None:
            self._agent.keep_less("the staging memory for one more state cannot be page-locked")
            self._all.remove(place)
            place.release()
            return
        with self._lock:
            if not self._closed:
                self._free.append(place)
                kept = place.kept
                if kept is not None and self._without_state() is None and self._may_have_more:
                    self._start(self._make_spare, kept.bytes)
                return
        place.release()

    def make_first(self, size_bytes: int) -> None:
        """A thread makes the first save's memory, if there is none yet. It only logs what goes wrong: that save tries
        again, and says it."""
        if all(place.slab is None for place in self._all):
            self._start(self._make_first, size_bytes)

    def close(self) -> None:
        """Releases the memory: of free places now, of held ones with their save."""
        with self._lock:
            self._closed = True
            places, self._free = self._free, []
        for place in places:
            place.release()

    def _without_state(self) -> Place | None:
        return next((place for place in reversed(self._free) if place.kept is None), None)

    @property
    def _may_have_more(self) -> bool:
        return self._agent is not None and len(self._all) <= self._agent.keeps

    def _spare(self, spare_bytes: Callable[[], int | None]) -> Place | None:
        if self._agent is None or not self._may_have_more:
            return None
        size = spare_bytes()
        memory = None if size is None else self._agent.spare_memory(max(size, PAGE_BYTES))
        if memory is None:
            return None
        spare = Place(self._agent, memory)
        self._all.append(spare)
        return spare

    def _start(self, make: Callable[[int], Slab | None], size_bytes: int) -> None:
        def run() -> None:
            try:
                slab = make(size_bytes)
                if slab is not None:
                    slab.populate()
            except Exception as error:
                log.debug("no staging memory before the next save: %s", error)

        threading.Thread(target=run, name="holdfast-memory", daemon=True).start()

    def _make_first(self, size_bytes: int) -> Slab | None:
        with self._making:
            with self._lock:  # a save may have been quicker
                if self._closed or not self._free or any(place.slab is not None for place in self._all):
                    return None
                place = self._free.pop()
            try:
                return place.with_room(size_bytes)
            finally:
                self.give_back(place)

    def _make_spare(self, size_bytes: int) -> Slab | None:
        with self._making:
            with self._lock:
                if self._closed or self._without_state() is not None:
                    return None
            spare = self._spare(lambda: size_bytes)
        if spare is None:
            return None
        slab = spare.slab
        self.give_back(spare)
        return slab
