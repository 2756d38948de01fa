"""The memory tier: the last states of each run stay where their ranks have staged them, for a relaunch to read.

rank:  Share -> Memory, HandOver -> sealed -> Release -> a Part of a kept state, until a newer state is whole
       Reclaim: the next save is staged into that memory
relaunch: Borrow -> the descriptor and the ranges of each part, by digest; it proves what it reads

Nothing is copied, and nothing is on a disk. Memory stays while its rank may stage into it or a kept part lies in it.
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
from holdfast_client.agent.shared_memory import Budget, map_of, untouched_bytes
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


class MemoryTier:
    """Thread-safe."""

    def __init__(self, budget: Budget, states: int) -> None:
        """`states`: of each run, that stay while the next one is staged. With 0 the last one stays until then."""
        self.states = states
        self._budget = budget
        self._lock = threading.Lock()
        self._parts: dict[tuple[RunName, _State, int], Part] = {}
        """The one that is kept for longest comes first."""
        self._spares: Counter[RunName] = Counter()
        self._ranks: Counter[RunName] = Counter()
        self._idle: dict[RunName, threading.Timer] = {}

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
            if not any(of_run == run for of_run, _, _ in self._parts):
                return
            timer = threading.Timer(IDLE_SECONDS, self._forget_idle, (run,))
            timer.daemon = True
            timer.start()
            self._idle[run] = timer

    def take(self, rank: Hello, share: Share, descriptor: int) -> Memory:
        """Memory that the rank shares. States that are left of ended launches make room for it. Raises NoRoom,
        UnusableMemory and OSError."""
        run = RunName(rank.project, rank.run)
        untouched = untouched_bytes(descriptor, share.bytes)
        with self._lock:
            # All ranks of the node have one more, or none: a state that is kept in part is not worth its memory.
            ranks = rank.host_ranks - self._spares[run] % rank.host_ranks if share.spare else 1
            while (why := self._budget.take(share.bytes, untouched, ranks=ranks)) is not None:
                if not self._drop_left_behind():
                    raise NoRoom(why)
            try:
                memory = Memory(run, share, descriptor)
            except BaseException:
                self._budget.give_back(share.bytes)
                raise
            self._spares[run] += share.spare
        return memory

    def let_go(self, memory: Memory) -> None:
        """Its rank stages into it no more."""
        with self._lock:
            memory.is_owned = False
            self._spares[memory.run] -= memory.is_spare
            self._free([memory])

    def keep(self, part: Part) -> None:
        """The part of a save that is committed, or safe elsewhere. Older states go once enough newer ones are whole."""
        run, most = part.hand.run_name, max(1, self.states)
        with self._lock:
            self._parts[run, part.state, part.hand.rank] = part
            newest = sorted({state for of_run, state, _ in self._parts if of_run == run}, reverse=True)[: most + 1]
            whole = [state for state in newest if self._is_whole(run, state)][:most]
            stay = newest[: newest.index(whole[-1]) + 1] if len(whole) == most else newest
            self._drop(key for key in [*self._parts] if key[0] == run and key[1] not in stay)

    def make_room(self, run: RunName) -> bool:
        """A part of a state goes that an ended launch has left, of this run first: its container may pay for the
        memory. False if there is none."""
        with self._lock:
            return self._drop_left_behind(run)

    def reclaim(self, memory: Memory) -> None:
        """Its rank writes the next save into it."""
        with self._lock:
            self._drop(key for key, part in [*self._parts.items()] if part.memory is memory)

    def forget(self, run: RunName, own: Collection[Memory] = ()) -> None:
        """It needs no restore any more. What ranks of another launch stage into stays for that one; `own` is not
        theirs."""
        with self._lock:
            self._drop(
                key
                for key, part in [*self._parts.items()]
                if key[0] == run and (part.memory in own or not part.memory.is_owned)
            )
        gc.collect()

    @contextmanager
    def lending(self, run: RunName, parts: Iterable[Part]) -> Iterator[list[tuple[Part, int]]]:
        """What is kept of the run, and `parts` of its saves that are not kept yet, each with a descriptor for the
        block. The newest comes last. As many as this process has descriptors for."""
        with ExitStack() as held:
            lent = []
            with self._lock, suppress(OSError):
                for part in [*(part for key, part in self._parts.items() if key[0] == run), *parts]:
                    if not part.memory.is_closed:
                        lent.append((part, os.dup(part.memory.descriptor)))
                        held.callback(os.close, lent[-1][1])
            yield lent

    def shown(self) -> list[KeptState]:
        """By run, the newest last."""
        with self._lock:
            parts = [*self._parts.items()]
        states: dict[tuple[RunName, _State], list[Part]] = {}
        for (run, state, _), part in sorted(parts, key=lambda item: item[0][:2]):
            states.setdefault((run, state), []).append(part)
        return [
            KeptState(
                project=run.project,
                run=run.run,
                attempt=of_state[0].hand.attempt,
                step=of_state[0].hand.step,
                parts=len(of_state),
                host_ranks=of_state[0].host_ranks,
                bytes=sum(chunk.bytes for part in of_state for chunk in part.hand.chunks),
            )
            for (run, state), of_state in states.items()
        ]

    def _is_whole(self, run: RunName, state: _State) -> bool:
        parts = [part for key, part in self._parts.items() if key[:2] == (run, state)]
        return len(parts) >= parts[0].host_ranks

    def _forget_idle(self, run: RunName) -> None:
        with self._lock:
            if self._ranks[run] or self._idle.get(run) is not threading.current_thread():
                return
            del self._idle[run]
        log.info("no launch of %s has come for %.0f s, and its states are not kept any longer", run, IDLE_SECONDS)
        self.forget(run)

    def _drop_left_behind(self, first: RunName | None = None) -> bool:
        """The part that is kept for longest of those whose rank is gone, of this run `first`. False if there is
        none."""
        for key, part in sorted(self._parts.items(), key=lambda item: item[0][0] != first):
            if not part.memory.is_owned:
                log.info("step %d of %s is not kept any longer, because ranks need the memory", part.hand.step, key[0])
                self._drop([key])
                gc.collect()
                return True
        return False

    def _drop(self, keys: Iterable[tuple[RunName, _State, int]]) -> None:
        self._free([self._parts.pop(key).memory for key in keys])

    def _free(self, memories: Iterable[Memory]) -> None:
        used = {id(part.memory) for part in self._parts.values()}
        for memory in memories:
            if not (memory.is_owned or memory.is_closed or id(memory) in used):
                memory.close()
                self._budget.give_back(memory.bytes)
