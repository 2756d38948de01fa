"""The memory tier: the last states of each run stay where their ranks have staged them, for a relaunch to read.

rank:  Share -> Memory, HandOver -> sealed -> Release -> a Part of a kept state, until a newer state is whole
       Reclaim: the next save is staged into that memory
relaunch: Borrow -> the descriptor and the ranges of each part, by digest; it proves what it reads
other hosts: copies of their parts, in memory of this process (copies.py), under the same rules; a copy of a part that
is not committed yet is held beside them, and takes no kept one's place

Nothing of this node is copied, and nothing is on a disk. Memory stays while its rank may stage into it or a kept part
lies in it.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from holdfast_client.agent.messages import HandOver, Hello, KeptState, Lent, Share, StagedChunk
from holdfast_client.agent.shared_memory import (
    Budget,
    SharedMemory,
    container_room_bytes,
    gib,
    map_of,
    untouched_bytes,
)
from holdfast_client.chunks.peer_http import PeerAddress
from holdfast_protocol.base import RunName

log = logging.getLogger("holdfast.agent")

IDLE_SECONDS = 900.0
"""How long the states of a run stay after its last rank here has gone."""


class NoRoom(Exception):  # noqa: N818  (said aloud, it is what happened)
    """It says why, and what helps."""


class Memory:
    """What a rank stages into, mapped here for reading. Its tier alone changes it."""

    def __init__(self, run: RunName, share: Share, descriptor: int) -> None:
        """Raises UnusableMemory, and OSError."""
        self.run = run
        self.bytes = share.bytes
        self.is_spare = share.spare
        self.view = memoryview(map_of(descriptor, share.bytes))
        # Opened anew, because a reader needs no right to write.
        self.descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        self.is_owned = True
        """Its rank may stage into it."""
        self.is_closed = False

    def close(self) -> None:
        """The mapping ends with its last reader in this process, and the memory with the last process."""
        self.is_closed = True
        os.close(self.descriptor)
        self.view = memoryview(b"")


HERE = -1


class _State(NamedTuple):
    """A save of a run. The later one is the greater one. Not by attempt: another catalog counts from 1 again."""

    launch: int
    number: int


@dataclass(frozen=True)
class Part:
    """One rank's part of a state. `host_ranks`: so many parts on this node are the whole state."""

    hand: HandOver
    host_ranks: int
    memory: Memory
    digests: Sequence[str]
    """Of the chunks, and after them of the documents."""
    documents: Sequence[bytes]
    launch: int
    """Launches are counted as they come to this node."""
    of_host: int = HERE
    """Of a copy: the lowest rank on the host that it comes from."""
    source: PeerAddress | None = None
    """Of a copy: the agent that it comes from."""

    @property
    def state(self) -> _State:
        return _State(self.launch, self.hand.number)

    @cached_property
    def lent(self) -> Lent:
        """The bytes of the documents follow it."""
        chunks = [
            chunk.model_copy(update={"digest": digest})
            for chunk, digest in zip(self.hand.chunks, self.digests, strict=False)
        ]
        starts = accumulate(map(len, self.documents), initial=0)
        documents = [
            StagedChunk(start=start, bytes=len(document), digest=digest)
            for start, document, digest in zip(starts, self.documents, self.digests[len(chunks) :], strict=False)
        ]
        return Lent(chunks=chunks, documents=documents)

    @cached_property
    def found(self) -> dict[str, StagedChunk | bytes]:
        """Chunks in the memory, and documents, by digest."""
        documents = zip(self.digests[len(self.hand.chunks) :], self.documents, strict=True)
        return dict(zip(self.digests, self.hand.chunks, strict=False)) | dict(documents)


class _Key(NamedTuple):
    run: RunName
    of_host: int
    state: _State
    rank: int


class MemoryTier:
    """Thread-safe."""

    def __init__(self, budget: Budget, states: int) -> None:
        """`states`: of each run, that stay while the next one is staged. With 0 the last one stays until then."""
        self.states = states
        self._budget = budget
        self._lock = threading.Lock()
        self._parts: dict[_Key, Part] = {}
        """The one that is kept for longest comes first."""
        self._held: dict[_Key, Part] = {}
        """Of saves that are not committed yet: this node's, for other hosts to copy, and copies of theirs."""
        self._launches: dict[str, int] = {}
        self._finished: set[int] = set()
        """Launches that have done their work."""
        self._spares: Counter[RunName] = Counter()
        self._ranks: Counter[RunName] = Counter()
        self._idle: dict[RunName, threading.Timer] = {}
        self._unfilled: set[Memory] = set()
        """Copies that arrive and slabs for a next save: the system has still to find what is not touched of them."""

    def launch_of(self, launch_id: str) -> int:
        """A Part's."""
        with self._lock:
            return self._launches.setdefault(launch_id, len(self._launches))

    def join(self, run: RunName) -> None:
        """A rank of the run is here."""
        with self._lock:
            self._ranks[run] += 1
            if (timer := self._idle.pop(run, None)) is not None:
                timer.cancel()

    def leave(self, run: RunName) -> None:
        """It has gone. The last one leaves its states for a while."""
        with self._lock:
            self._ranks[run] -= 1
            if self._ranks[run]:
                return
            del self._ranks[run]
            if any(key.run == run for key in self._parts | self._held):
                self._begin_to_idle(run)

    def take(self, rank: Hello, share: Share, descriptor: int, *, pays_here: bool = False) -> Memory:
        """Memory that the rank shares. States that are left of ended launches make room for it. `pays_here`: the rank
        has the agent's container. Raises NoRoom, UnusableMemory and OSError."""
        run = RunName(rank.project, rank.run)
        untouched = untouched_bytes(descriptor, share.bytes)
        while True:
            with self._lock:
                # All ranks of the node have one more, or none: a state that is kept in part is not worth its memory.
                ranks = rank.host_ranks - self._spares[run] % rank.host_ranks if share.spare else 1
                promised = self._promised() if share.spare else 0
                in_container = None
                if share.spare and pays_here:  # the rank has looked too, but knows nothing of copies that arrive
                    in_container = self._container_lacks(untouched * ranks + promised)
                why = in_container or self._budget.take(share.bytes, untouched, ranks=ranks, promised=promised)
                if why is None:
                    memory = self._mapped(run, share, descriptor)
                    if share.spare:
                        self._spares[run] += 1
                        self._unfilled.add(memory)
                    return memory
                gone = self._drop_left_behind(states=in_container is None)
            if gone is None:
                raise NoRoom(why)
            self._close(gone)
            gc.collect()

    def take_copy(self, hand: HandOver, of_host: int, own: SharedMemory, *, is_safe: bool = True) -> Memory:
        """Memory of this process for a copy; `let_go` once it is kept, or not to be kept. Without room for it beside
        copies of earlier launches, or of older states of the same host, those go, if that is enough; for what is not
        committed yet (`is_safe` false) only what is not committed either. Raises NoRoom, and OSError."""
        run, state = hand.run_name, _State(self.launch_of(hand.launch_id), hand.number)
        while True:
            with self._lock:
                if (why := self._no_room_for(own.bytes)) is None:
                    memory = self._mapped(run, Share(memory=own.id, bytes=own.bytes), own.descriptor)
                    self._unfilled.add(memory)
                    return memory
                known = self._parts | self._held
                older = [key for key in known if key[:2] == (run, of_host) and key.state < state]
                older = [*(key for key in self._left_copies(run, state.launch) if key.of_host != of_host), *older]
                older = [key for key in older if is_safe or key in self._held]
                freed = sum(known[key].memory.bytes for key in older if not known[key].memory.is_owned)
                if not older or self._lacks(own.bytes, freed=freed) is not None:
                    raise NoRoom(why)
                gone = self._drop(older[:1])
            self._close(gone)

    def let_go(self, memory: Memory) -> None:
        """Its rank stages into it no more."""
        with self._lock:
            memory.is_owned = False
            self._unfilled.discard(memory)
            self._spares[memory.run] -= memory.is_spare
            self._unhold(HERE, memory)
            gone = self._free([memory])
        self._close(gone)

    def keep(self, part: Part) -> bool:
        """The part of a save that is committed, or safe elsewhere. Older states go once enough newer ones are whole.
        With a whole copy those of earlier launches go: the ranks of their hosts may have other numbers now. False: it
        is not kept, a copy that comes after its job has finished."""
        with self._lock:
            gone = self._keep(part)
        self._close(gone or ())
        return gone is not None

    def _keep(self, part: Part) -> list[Memory] | None:
        """What is to be closed without the lock; None: it is not kept."""
        if part.of_host != HERE and part.launch in self._finished:
            return None
        group, most = (part.hand.run_name, part.of_host), max(1, self.states)
        key = _Key(*group, part.state, part.hand.rank)
        before = self._parts.pop(key, None)
        self._parts[key] = part
        gone = [] if before is None else self._free([before.memory])
        gone += self._drop([held for held in self._of_rank(key) if held.state <= key.state])
        newest = sorted({key.state for key in self._parts if key[:2] == group}, reverse=True)[: most + 1]
        whole = [state for state in newest if self._is_whole((*group, state))][:most]
        stay = newest[: newest.index(whole[-1]) + 1] if len(whole) == most else newest
        gone += self._drop([key for key in self._parts if key[:2] == group and key.state not in stay])
        if part.of_host != HERE and key in self._parts and self._is_whole(key[:3]):
            left = self._left_copies(part.hand.run_name, part.launch)
            gone += self._drop([key for key in left if key.of_host != part.of_host])
        if part.of_host != HERE and not self._ranks[part.hand.run_name]:
            self._begin_to_idle(part.hand.run_name)
        return gone

    def hold(self, part: Part) -> bool:
        """The part of a save that is not committed yet, in the place of an older one. One of this node is there for
        other hosts to copy until `release`; a copy until it is kept, or a newer one is there. False: it is not held, a
        copy that comes after its commit or its job's end."""
        with self._lock:
            if part.of_host != HERE and part.launch in self._finished:
                return False
            key = _Key(part.hand.run_name, part.of_host, part.state, part.hand.rank)
            if key in self._parts:
                return False
            gone = self._drop(self._of_rank(key))
            self._held[key] = part
            if part.of_host != HERE and not self._ranks[key.run]:
                self._begin_to_idle(key.run)
        self._close(gone)
        return True

    def release(self, memory: Memory) -> None:
        """The save in it is over for its rank."""
        with self._lock:
            self._unhold(HERE, memory)

    def confirm(self, hand: HandOver, of_host: int, digests: Sequence[str]) -> bool:
        """The save is committed. A copy of this part that is held is kept from now on; False: there is none."""
        key = self._key_of(hand, of_host)
        with self._lock:
            part = self._held.get(key)
            gone = self._keep(part) if part is not None and list(part.digests) == list(digests) else None
        self._close(gone or ())
        return gone is not None

    def is_kept(self, hand: HandOver, of_host: int) -> bool:
        """Whether there is a copy of this part that is committed."""
        key = self._key_of(hand, of_host)
        with self._lock:
            return key in self._parts

    def withdraw(self, hand: HandOver, of_host: int) -> None:
        """A copy of this part, if it is held, goes: its save is given up."""
        key = self._key_of(hand, of_host)
        with self._lock:
            gone = self._drop([key] if key in self._held else [])
        self._close(gone)

    def _key_of(self, hand: HandOver, of_host: int) -> _Key:
        return _Key(hand.run_name, of_host, _State(self.launch_of(hand.launch_id), hand.number), hand.rank)

    def unfinished(self, run: RunName) -> list[Part]:
        """Copies of other hosts' parts that are not committed, as far as is known here."""
        with self._lock:
            return [part for key, part in self._held.items() if key.run == run and key.of_host != HERE]

    def give_up(self, part: Part) -> None:
        """Its save cannot be committed any more."""
        with self._lock:
            gone = self._drop([key for key, held in self._held.items() if held is part])
        self._close(gone)

    def make_room(self, run: RunName, *, states: bool = True, copies: bool) -> bool:
        """One part of what may go goes: `copies`, and `states` that ended launches have left, of this run first. The
        container of the rank that asks may pay for them. False if there is none."""
        with self._lock:
            gone = self._drop_left_behind(states=states, copies=copies, first=run)
        if gone is None:
            return False
        self._close(gone)
        gc.collect()
        return True

    def reclaim(self, memory: Memory) -> None:
        """Its rank writes the next save into it."""
        with self._lock:
            self._unhold(HERE, memory)
            gone = self._drop([key for key, part in self._parts.items() if part.memory is memory])
        self._close(gone)

    def finish(self, launch: int) -> None:
        """It has done its work: no copy of its states that is still to come is kept."""
        with self._lock:
            self._finished.add(launch)

    def forget(self, run: RunName, own: Collection[Memory] = ()) -> None:
        """It needs no restore any more. What ranks of another launch stage into stays for that one; `own` is not
        theirs."""
        with self._lock:
            gone = self._drop(
                [
                    key
                    for key, part in (self._parts | self._held).items()
                    if key.run == run and (part.memory in own or not part.memory.is_owned)
                ]
            )
        self._close(gone)
        gc.collect()

    @contextmanager
    def lending(self, run: RunName, parts: Iterable[Part]) -> Iterator[list[tuple[Part, int]]]:
        """What is kept of the run, and `parts` of its saves that are not kept yet, each with a descriptor for the
        block. The newest comes last. As many as this process has descriptors for."""
        with ExitStack() as held:
            lent = []
            with self._lock, suppress(OSError):
                copies = [part for key, part in self._held.items() if key.run == run and key.of_host != HERE]
                for part in [*copies, *(part for key, part in self._parts.items() if key.run == run), *parts]:
                    if not part.memory.is_closed:
                        lent.append((part, os.dup(part.memory.descriptor)))
                        held.callback(os.close, lent[-1][1])
            yield lent

    def ranks_of(self, run: RunName) -> list[int]:
        """Whose parts are here, or copies of them."""
        with self._lock:
            return sorted({key.rank for key in self._parts | self._held if key.run == run})

    def sizes(self, run: RunName, digests: Iterable[str]) -> list[int | None]:
        """Bytes of what is kept of the run under each digest; None: nothing."""
        with self._lock:
            parts = [part for key, part in (self._parts | self._held).items() if key.run == run]
        return [next((_size(part.found[digest]) for part in parts if digest in part.found), None) for digest in digests]

    @contextmanager
    def opened(self, digest: str) -> Iterator[bytes | tuple[int, StagedChunk] | None]:
        """For the block: a document, or a descriptor of the memory and the range in it, which is not proven; None: it
        is not kept. Raises OSError."""
        with ExitStack() as held:
            with self._lock:
                parts = reversed((self._held | self._parts).values())
                part = next((part for part in parts if digest in part.found), None)
                found = None if part is None else part.found[digest]
                descriptor = -1
                if part is not None and isinstance(found, StagedChunk):
                    descriptor = os.dup(part.memory.descriptor)
                    held.callback(os.close, descriptor)
            yield (descriptor, found) if isinstance(found, StagedChunk) else found

    def shown(self) -> list[KeptState]:
        """By run, the newest last; after that the copies."""
        with self._lock:
            parts = [*self._parts.items(), *(item for item in self._held.items() if item[0].of_host != HERE)]
            held = {*self._held}
        states: dict[tuple[RunName, int, _State, bool], list[Part]] = {}
        for key, part in sorted(parts, key=lambda item: item[0]):
            states.setdefault((key.run, key.of_host, key.state, key not in held), []).append(part)
        return [
            KeptState(
                project=run.project,
                run=run.run,
                attempt=of_state[0].hand.attempt,
                step=of_state[0].hand.step,
                parts=len(of_state),
                host_ranks=of_state[0].host_ranks,
                bytes=sum(chunk.bytes for part in of_state for chunk in part.hand.chunks),
                copy_of=None if of_host == HERE else of_host,
                is_committed=is_committed,
            )
            for (run, of_host, _, is_committed), of_state in states.items()
        ]

    def _is_whole(self, state: tuple[RunName, int, _State]) -> bool:
        parts = [part for key, part in self._parts.items() if key[:3] == state]
        return len(parts) >= parts[0].host_ranks

    def _mapped(self, run: RunName, share: Share, descriptor: int) -> Memory:
        """Its bytes are taken from the budget already."""
        try:
            return Memory(run, share, descriptor)
        except BaseException:
            self._budget.give_back(share.bytes)
            raise

    def _no_room_for(self, size_bytes: int) -> str | None:
        """For a copy: why, else it is taken from the budget."""
        return self._lacks(size_bytes) or self._budget.take(size_bytes, size_bytes, promised=self._promised())

    def _lacks(self, size_bytes: int, *, freed: int = 0) -> str | None:
        """Why there would be no room for a copy, once so much were freed. What this process maps first, its own
        container pays."""
        needed = size_bytes + self._promised()
        return self._container_lacks(needed - freed) or self._budget.lacks(size_bytes, needed, freed=freed)

    def _container_lacks(self, needed: int) -> str | None:
        room = container_room_bytes()
        if room is not None and room < needed:
            return f"the memory limit of the agent's container leaves {gib(room)}, and {gib(needed)} are needed"
        return None

    def _promised(self) -> int:
        return sum(untouched_bytes(memory.descriptor, memory.bytes) for memory in self._unfilled)

    def _of_rank(self, of: _Key) -> list[_Key]:
        """What is held of the same rank of the same host."""
        return [key for key in self._held if (*key[:2], key.rank) == (*of[:2], of.rank)]

    def _unhold(self, of_host: int, memory: Memory) -> None:
        self._held = {
            key: part for key, part in self._held.items() if key.of_host != of_host or part.memory is not memory
        }

    def _left_copies(self, run: RunName, launch: int) -> list[_Key]:
        """Of launches before this one."""
        return [key for key in self._parts if key.run == run and key.of_host != HERE and key.state.launch < launch]

    def _begin_to_idle(self, run: RunName) -> None:
        if run not in self._idle:
            timer = threading.Timer(IDLE_SECONDS, self._forget_idle, (run,))
            timer.daemon = True
            timer.start()
            self._idle[run] = timer

    def _forget_idle(self, run: RunName) -> None:
        with self._lock:
            if self._ranks[run] or self._idle.get(run) is not threading.current_thread():
                return
            del self._idle[run]
        log.info("no launch of %s has come for %.0f s, and its states are not kept any longer", run, IDLE_SECONDS)
        self.forget(run)

    def _drop_left_behind(
        self, *, states: bool = True, copies: bool = True, first: RunName | None = None
    ) -> list[Memory] | None:
        """The part that is kept for longest of those whose rank is gone, of the run `first` if there is one; `copies`
        before `states` of this node. None if there is none."""
        known = self._held | self._parts
        left = [
            key
            for key, part in known.items()
            if not part.memory.is_owned and (states if key.of_host == HERE else copies)
        ]
        if not left:
            return None
        key = min(left, key=lambda key: (key.of_host == HERE, key.run != first, key in self._parts))
        log.info("step %d of %s is not kept any longer: ranks need the memory", known[key].hand.step, key.run)
        return self._drop([key])

    def _drop(self, keys: Collection[_Key]) -> list[Memory]:
        """What is to be closed without the lock."""
        parts = [self._held.pop(key) if key in self._held else self._parts.pop(key) for key in keys]
        return self._free([part.memory for part in parts])

    def _free(self, memories: Iterable[Memory]) -> list[Memory]:
        """Those that nobody needs: to be closed without the lock."""
        used = {id(part.memory) for part in (*self._parts.values(), *self._held.values())}
        gone = []
        for memory in memories:
            if not (memory.is_owned or memory.is_closed or id(memory) in used):
                memory.is_closed = True
                gone.append(memory)
        return gone

    def _close(self, gone: Collection[Memory]) -> None:
        """Takes its time: without the lock, which hand-overs and readers want too."""
        for memory in gone:
            memory.close()
            self._budget.give_back(memory.bytes)


def _size(found: StagedChunk | bytes) -> int:
    return len(found) if isinstance(found, bytes) else found.bytes
