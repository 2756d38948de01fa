"""Copies of a state in the memory of agents on other hosts: a host is lost, and its replacement reads them there.

    here:   a Part is kept -> Offer -> the agents of the next hosts
    there:  Offer -> each chunk: its own copy before, else GET from here -> proven -> memory of that agent -> a Part

Of each rank the newest offer counts. What this memory is staged over meanwhile does not prove, and is no copy.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

from holdfast_client.agent.memory_tier import MemoryTier, NoRoom, Part
from holdfast_client.agent.messages import Meet, Offer, StagedChunk
from holdfast_client.agent.peer_chunks import OFFERS, TROUBLE, ask, read_chunk
from holdfast_client.agent.peer_server import PeerServer
from holdfast_client.agent.shared_memory import SharedMemory
from holdfast_client.chunks.connections import RateLimit
from holdfast_client.chunks.peer_http import PeerAddress
from holdfast_client.errors import ConfigurationError, TransferStopped
from holdfast_client.local.chunk_folder import read_hashed

log = logging.getLogger("holdfast.agent")

_TAKING_THREADS = 2
_NICE = 10
"""Training has the cores first."""
_SKIP_SECONDS = 60.0
"""So long an agent that took too long to hear an offer is offered nothing: the others would wait for it."""
_TOO_LATE = 2
"""After so many copies in a row that came too late the log says what helps."""

T = TypeVar("T")


class _Gone(Exception):  # noqa: N818  (said aloud, it is what happened)
    """The next save is staged there by now."""


class _Newest(Generic[T]):
    """A queue in which a thing takes the place of the one before with the same key. Threads of its own work it off."""

    def __init__(self, name: str, threads: int, work: Callable[[T], None]) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, T] = {}
        self._is_over = False
        self._work = work
        for _ in range(threads):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, key: Hashable, thing: T) -> None:
        with self._changed:
            self._waiting.pop(key, None)
            self._waiting[key] = thing
            self._changed.notify()

    def end(self) -> None:
        """What waits is not worked off."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over)
                if self._is_over:
                    return
                thing = self._waiting.pop(next(iter(self._waiting)))
            try:
                self._work(thing)
            except Exception:
                log.exception("a copy could not be made")
            del thing


class Copies:
    """Listens from its construction on. Thread-safe."""

    def __init__(self, tier: MemoryTier, *, count: int, host: str | None, bytes_per_second: int | None = None) -> None:
        """`count`: of other hosts that get a copy of each state. `host`: the address that they reach this agent at.
        `bytes_per_second`: the most that this agent copies from others. Raises ConfigurationError."""
        self._tier = tier
        self._count = count
        self._rate = None if bytes_per_second is None else RateLimit(bytes_per_second)
        self._stop = threading.Event()
        self._has_told_room = False
        self._too_late: Counter[Hashable] = Counter()
        self._skipped: dict[PeerAddress, float] = {}
        """Until when."""
        self._offers: _Newest[tuple[PeerAddress, Offer]] = _Newest("holdfast-agent-offers", 1, self._offer)
        self._taken: _Newest[Offer] = _Newest("holdfast-agent-copies", _TAKING_THREADS, self._take)
        try:
            if host is None:
                raise OSError("this machine has no address that others reach")
            self._server = PeerServer(host, tier, self.take)
        except (OSError, RuntimeError) as error:
            self._offers.end()
            self._taken.end()
            raise ConfigurationError(
                f"Agents of other hosts cannot reach this one at {host or 'any address'} ({error}). Name an address of "
                "this machine (HOLDFAST_AGENT_ADDRESS), or leave HOLDFAST_AGENT_PEERS out."
            ) from error

    @property
    def address(self) -> PeerAddress:
        return self._server.address

    def offer(self, part: Part, meet: Meet) -> None:
        """A part of this node to the next hosts."""
        offer = Offer(
            source=self.address,
            host=meet.host,
            host_ranks=part.host_ranks,
            hand=part.hand,
            digests=list(part.digests),
        )
        others = [peer for peer in meet.others if peer != self.address]
        for peer in others[: self._count]:
            self._offers.put((peer, part.hand.run_name, part.hand.rank), (peer, offer))

    def take(self, offer: Offer) -> None:
        """Another host's part, once there is time."""
        self._taken.put(self._key(offer), offer)

    @staticmethod
    def _key(offer: Offer) -> Hashable:
        return offer.hand.run_name, offer.host, offer.hand.rank

    def close(self) -> None:
        """Does not wait for a copy that is under way."""
        self._stop.set()
        self._offers.end()
        self._taken.end()
        self._server.close()

    def _offer(self, to: tuple[PeerAddress, Offer]) -> None:
        peer, offer = to
        if time.monotonic() < self._skipped.get(peer, 0.0):
            return
        try:
            ask(peer, OFFERS, offer)
        except TROUBLE as error:
            if isinstance(error, TimeoutError):
                self._skipped[peer] = time.monotonic() + _SKIP_SECONDS
            log.warning("the agent at %s:%d takes no copy of step %d: %s", peer.host, peer.port, offer.hand.step, error)

    def _take(self, offer: Offer) -> None:
        hand = offer.hand
        what = f"step {hand.step} of {hand.run_name}, rank {hand.rank}"
        # Documents lie elsewhere in this process, and count too.
        own = SharedMemory(max(1, sum(chunk.bytes for chunk in hand.chunks) + sum(hand.documents)))
        try:
            memory = self._tier.take_copy(hand, offer.host, own)
            try:
                chunks, documents = self._copied(offer, memoryview(own.map))
                copy = hand.model_copy(update={"chunks": chunks})
                launch = self._tier.launch_of(hand.launch_id)
                part = Part(copy, offer.host_ranks, memory, offer.digests, documents, launch, offer.host)
                is_kept = self._tier.keep(part)
            finally:
                self._tier.let_go(memory)
            self._too_late.pop(self._key(offer), None)
            log.info("there is a copy here of %s" if is_kept else "no copy of %s: its job has finished", what)
        except NoRoom as error:
            if not self._has_told_room:
                self._has_told_room = True
                log.warning("no copy of %s, nor of others for which there is no room: %s", what, error)
        except _Gone:
            self._note_too_late(offer, what)
        except TransferStopped:
            return
        except TROUBLE as error:
            log.warning("no copy of %s from %s:%d: %s", what, offer.source.host, offer.source.port, error)
        finally:
            own.close()

    def _note_too_late(self, offer: Offer, what: str) -> None:
        self._too_late[self._key(offer)] += 1
        if self._too_late[self._key(offer)] == _TOO_LATE:
            log.warning(
                "no copy of %s, nor of the state before it: its host stages the next save there before all is copied. "
                "Let its agent keep more states (--keep), save less often, or copy faster "
                "(HOLDFAST_AGENT_PEER_BYTES_PER_SECOND)",
                what,
            )
        else:
            log.info("no copy of %s: its host has staged the next save there", what)

    def _copied(self, offer: Offer, into: memoryview) -> tuple[list[StagedChunk], list[bytes]]:
        """Raises _Gone, TROUBLE, and TransferStopped."""
        chunks, start = [], 0
        for chunk, digest in zip(offer.hand.chunks, offer.digests, strict=False):
            self._fill(into[start : start + chunk.bytes], digest, offer.source)
            chunks.append(chunk.model_copy(update={"start": start}))
            start += chunk.bytes
        documents = []
        for size, digest in zip(offer.hand.documents, offer.digests[len(chunks) :], strict=True):
            document = bytearray(size)
            self._fill(memoryview(document), digest, offer.source)
            documents.append(bytes(document))
        return chunks, documents

    def _fill(self, buffer: memoryview, digest: str, source: PeerAddress) -> None:
        with self._tier.opened(digest) as found:
            if isinstance(found, tuple) and found[1].bytes == buffer.nbytes:
                descriptor, chunk = found
                if read_hashed(descriptor, buffer, self._stop, start=chunk.start) == digest:
                    return
        if not read_chunk(source, digest, buffer, self._stop, self._rate):
            raise _Gone
