"""Copies of a state in the memory of agents on other hosts: a host is lost, and its replacement reads them there.

    here:   a save is handed over -> hashed -> Offer -> the agents of the next hosts
    there:  Offer -> each chunk: its own copy before, else GET from here -> proven -> memory there -> a held Part
    here:   it is committed -> Offer -> there: the held Part is kept; or is copied now, if there was no room before
    there:  the ranks of the launch are dead, and the agent here does not have it any more -> lost_hosts.py

Of each rank the newest offer counts. What this memory is staged over meanwhile does not prove, and is no copy.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from holdfast_client.agent.held_save import HeldSave
from holdfast_client.agent.lost_hosts import LostHosts
from holdfast_client.agent.memory_tier import MemoryTier, NoRoom, Part
from holdfast_client.agent.messages import HandOver, Meet, Offer, StagedChunk
from holdfast_client.agent.peer_chunks import OFFERS, TROUBLE, ask, read_chunk
from holdfast_client.agent.peer_server import PeerServer
from holdfast_client.agent.shared_memory import SharedMemory
from holdfast_client.chunks.connections import RateLimit
from holdfast_client.chunks.peer_http import PeerAddress
from holdfast_client.errors import ConfigurationError, TransferStopped
from holdfast_client.local.chunk_folder import read_hashed
from holdfast_protocol.base import RunName

log = logging.getLogger("holdfast.agent")

_TAKING_THREADS = 2
_NICE = 10
"""Training has the cores first."""
_SKIP_SECONDS = 60.0
"""So long an agent that took too long to hear an offer is offered nothing: the others would wait for it."""
_TOO_LATE = 2
"""After so many copies in a row that came too late the log says what helps."""

T = TypeVar("T")
HoldPart = Callable[[HeldSave, Sequence[str]], Part | None]
"""Lets other hosts read the part of this save, by these digests. None: the save is over for its rank."""


class _Gone(Exception):  # noqa: N818  (said aloud, it is what happened)
    """The next save is staged there by now."""


class _Newest(Generic[T]):
    """A queue in which a thing takes the place of the one before of the same lane and kind. Threads of its own work it
    off, one thing of a lane at a time."""

    def __init__(self, name: str, threads: int, work: Callable[[T], None]) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[tuple[Hashable, Hashable], T] = {}
        self._under_way: set[Hashable] = set()
        self._is_over = False
        self._work = work
        for _ in range(threads):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, lane: Hashable, thing: T, kind: Hashable = None) -> None:
        with self._changed:
            self._waiting.pop((lane, kind), None)
            self._waiting[lane, kind] = thing
            self._changed.notify()

    def end(self) -> None:
        """What waits is not worked off."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _next(self) -> tuple[Hashable, Hashable] | None:
        return next((key for key in self._waiting if key[0] not in self._under_way), None)

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._next())
                key = self._next()
                if self._is_over or key is None:
                    return
                thing = self._waiting.pop(key)
                self._under_way.add(key[0])
            try:
                self._work(thing)
            except Exception:
                log.exception("a copy could not be made")
            del thing
            with self._changed:
                self._under_way.discard(key[0])
                self._changed.notify_all()


class Copies:
    """Listens from its construction on. Thread-safe."""

    def __init__(
        self,
        tier: MemoryTier,
        earlier: PeerAddress | None = None,
        *,
        count: int,
        host: str | None,
        bytes_per_second: int | None = None,
    ) -> None:
        """`count`: of other hosts that get a copy of each state. `host`: the address that they reach this agent at;
        `earlier`: of the agent before. `bytes_per_second`: the most that this agent copies from others. Raises
        ConfigurationError."""
        self._tier = tier
        self._count = count
        self._rate = None if bytes_per_second is None else RateLimit(bytes_per_second)
        self._stop = threading.Event()
        self._has_told_room = False
        self._too_late: Counter[Hashable] = Counter()
        self._skipped: dict[PeerAddress, float] = {}
        """Until when."""
        self.lost_hosts = LostHosts(tier)
        self._others: dict[RunName, frozenset[PeerAddress]] = {}
        self._handed: _Newest[tuple[HeldSave, HoldPart, Meet]] = _Newest("holdfast-agent-hash", 1, self._hash)
        self._offers: _Newest[tuple[PeerAddress, Offer]] = _Newest("holdfast-agent-offers", 1, self._offer)
        self._taken: _Newest[Offer] = _Newest("holdfast-agent-copies", _TAKING_THREADS, self._take)
        try:
            if host is None:
                raise OSError("this machine has no address that others reach")
            self._server = PeerServer(host, tier, self.take, earlier)
        except (OSError, RuntimeError) as error:
            self._end_queues()
            raise ConfigurationError(
                f"Agents of other hosts cannot reach this one at {host or 'any address'} ({error}). Name an address of "
                "this machine (HOLDFAST_AGENT_ADDRESS), or leave HOLDFAST_AGENT_PEERS out."
            ) from error

    @property
    def address(self) -> PeerAddress:
        return self._server.address

    def meet(self, run: RunName, others: Sequence[PeerAddress]) -> None:
        """The agents of the job's other hosts, as a rank of this node has told."""
        known = frozenset(others)
        if self._others.get(run) != known:
            log.info("a rank here has named the agents of %s: %d of them", run, len(known))
        self._others[run] = known

    def offer_handed(self, save: HeldSave, hold: HoldPart, meet: Meet) -> None:
        """A save that a rank has handed over to the next hosts, once its digests are known: before it is committed."""
        self._handed.put((save.hand.run_name, save.hand.rank), (save, hold, meet))

    def offer(self, part: Part, meet: Meet, *, is_safe: bool = True) -> None:
        """A part of this node to the next hosts."""
        self._send(part.hand, meet, digests=list(part.digests), host_ranks=part.host_ranks, is_safe=is_safe)

    def withdraw(self, hand: HandOver, meet: Meet) -> None:
        """A save that was handed over, and is given up: its copies are to go."""
        empty = hand.model_copy(update={"chunks": [], "documents": []})
        self._send(empty, meet, digests=[], host_ranks=1, is_safe=False, is_given_up=True)

    def _send(self, hand: HandOver, meet: Meet, **said: Any) -> None:
        offer = Offer(source=self.address, host=meet.host, hand=hand, **said)
        others = [peer for peer in meet.others if peer != self.address]
        for peer in others[: self._count]:
            self._offers.put((peer, hand.run_name, hand.rank), (peer, offer), offer.is_safe)

    def take(self, offer: Offer) -> None:
        """Another host's part, once there is time. What is not committed yet, this agent may have to seal: it takes
        that only from an agent that a rank of this node has met in this run."""
        if not offer.is_safe and offer.source not in self._others.get(offer.hand.run_name, ()):
            log.info("no rank here has met the agent that offers %s before its commit: not taken", _named(offer))
        elif not (offer.is_safe and self._confirmed(offer)):
            self._taken.put(self._key(offer), offer, offer.is_safe)

    def _confirmed(self, offer: Offer) -> bool:
        """Whether there was a copy of it before its commit."""
        is_there = self._tier.confirm(offer.hand, offer.host, offer.digests)
        if is_there:
            log.info("there is a copy here of %s, made before its commit", _named(offer))
        return is_there

    def _hash(self, handed: tuple[HeldSave, HoldPart, Meet]) -> None:
        save, hold, meet = handed
        digests = save.hash_all()
        part = None if digests is None else hold(save, digests)
        if part is not None and not save.is_released:
            self.offer(part, meet, is_safe=False)

    @staticmethod
    def _key(offer: Offer) -> Hashable:
        return offer.hand.run_name, offer.host, offer.hand.rank

    def close(self) -> None:
        """Does not wait for a copy that is under way."""
        self._stop.set()
        self._end_queues()
        self.lost_hosts.close()
        self._server.close()

    def _end_queues(self) -> None:
        for each in (self._handed, self._offers, self._taken):
            each.end()

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
        hand, what = offer.hand, _named(offer)
        if offer.is_given_up:
            self._tier.withdraw(hand, offer.host)
            return
        if self._confirmed(offer) if offer.is_safe else self._tier.is_kept(hand, offer.host):
            return
        # Documents lie elsewhere in this process, and count too.
        own = SharedMemory(max(1, sum(chunk.bytes for chunk in hand.chunks) + sum(hand.documents)))
        try:
            memory = self._tier.take_copy(hand, offer.host, own, is_safe=offer.is_safe)
            try:
                chunks, documents = self._copied(offer, memoryview(own.map))
                copy = hand.model_copy(update={"chunks": chunks})
                launch = self._tier.launch_of(hand.launch_id)
                part = Part(copy, offer.host_ranks, memory, offer.digests, documents, launch, offer.host, offer.source)
                is_kept = self._tier.keep(part) if offer.is_safe else self._tier.hold(part)
            finally:
                self._tier.let_go(memory)
            self._too_late.pop(self._key(offer), None)
            log.info("there is a copy here of %s" if is_kept else "no copy of %s: its job has finished", what)
        except NoRoom as error:
            if not offer.is_safe:
                log.info("no copy of %s before it is committed: %s", what, error)
            elif not self._has_told_room:
                self._has_told_room = True
                log.warning("no copy of %s, nor of others for which there is no room: %s", what, error)
        except _Gone:
            if offer.is_safe:
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


def _named(offer: Offer) -> str:
    return f"step {offer.hand.step} of {offer.hand.run_name}, rank {offer.hand.rank}"
