"""Ranks on other hosts as a source of chunks, for the length of one restore: a chunk that several hosts want leaves the
store once.

    its owner:          [store] -> proven -> folder -> PeerServer
    on the other hosts: digest -> [HTTP] -> proven -> buffer
                               '-> wrong, late or gone -> [store]

No rank depends on another one. A peer that lies, stalls or cannot be reached is asked no more in this restore, and the
store gives its chunks. One that is only late, or silent once, is asked for the next chunk all the same. A peer answers
for the digests of this restore that it owns, to callers that know its token, and for nothing else (peer_http.py).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any

from holdfast_client.chunks.peer_http import (
    CHUNKS,
    OWN_TROUBLE,
    Head,
    PeerAddress,
    PeerError,
    PeerListener,
    PeerRequest,
    ask,
    connect,
    receive_chunk,
    resolved,
)
from holdfast_client.chunks.transfer import Receiver
from holdfast_client.errors import ChunkCorrupt
from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.transport import check_stop

log = logging.getLogger("holdfast.client")

LONGEST_WAIT_SECONDS = 30.0
"""The longest wait for an owner that answers, but has not fetched the chunk yet. Each time that it was late, the next
wait for it is half as long; with each chunk that it gives, twice as long again. So one slow chunk, or a store that was
away for a while, makes no host read all for itself, and an owner that gets nothing any more costs a minute."""
UNREACHABLE_HOSTS = 2
"""After so many, and none that could be reached, nothing else is tried: a firewall stands between the hosts."""

_ANSWER_WITHIN_SECONDS = 1.0
"""An owner that waits for a chunk says so this often."""
_MOST_REQUESTS = 256
"""Answered at once; others wait in the system's queue."""
_WAITS_UP_TO = _MOST_REQUESTS // 2
"""With more requests than this an owner says at once that it has a chunk not yet, and holds no thread for it."""
_SENDS_UP_TO = _MOST_REQUESTS * 7 // 8
"""With more requests than this it says so of each chunk. So a place is free for the next one that asks, which otherwise
would wait in the system's queue until it takes the owner for dead."""
_ANSWERS = HTTPStatus.OK, HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE


class PeerServer:
    """Passes on the chunks that this process owns, on threads of its own. Raises OSError if it cannot listen there, and
    RuntimeError if the system gives no thread."""

    def __init__(self, host: str) -> None:
        """`host`: the address that it listens on, which the other hosts can reach."""
        self._changed = threading.Condition()
        self._folder: ChunkFolder | None = None
        self._owned: frozenset[str] | None = None
        self._settled: set[str] = set()
        self._gives_up = False
        self._listener = _Listener(host, self)
        self.address = self._listener.address
        self._listener.begin("holdfast-peers")

    def begin(self, folder: ChunkFolder | None, owned: Collection[str]) -> None:
        """Who asked earlier waits for this. `owned`: what it answers for, once it lies in the folder."""
        with self._changed:
            self._folder, self._owned = folder, frozenset(owned)
            self._changed.notify_all()

    def owns(self, digest: str) -> bool:
        return self._owned is not None and digest in self._owned

    def settle(self, digest: str) -> None:
        """The chunk is in the folder now, or will not be: there may be no room for it."""
        if self.owns(digest):
            with self._changed:
                self._settled.add(digest)
                self._changed.notify_all()

    def give_up(self) -> None:
        """Nothing more will come: this rank reads no further."""
        with self._changed:
            self._gives_up = True
            self._changed.notify_all()

    def close(self) -> None:
        """No thread of it uses the folder any more when this returns."""
        self.give_up()
        self._listener.end()

    def find(self, digest: str) -> tuple[HTTPStatus, ChunkFolder | None]:
        """OK with the folder to look into, NOT_FOUND, or SERVICE_UNAVAILABLE: ask again."""

        def is_decided() -> bool:
            return self._gives_up or digest in self._settled or (self._owned is not None and digest not in self._owned)

        wait_seconds = _ANSWER_WITHIN_SECONDS if self._listener.requests <= _WAITS_UP_TO else 0.0
        with self._changed:
            if not self._changed.wait_for(is_decided, wait_seconds):
                return HTTPStatus.SERVICE_UNAVAILABLE, None
            if digest not in self._settled or self._folder is None:
                return HTTPStatus.NOT_FOUND, None
            if self._listener.requests > _SENDS_UP_TO:
                return HTTPStatus.SERVICE_UNAVAILABLE, None
            return HTTPStatus.OK, self._folder


class _Listener(PeerListener):
    def __init__(self, host: str, peer: PeerServer) -> None:
        self.peer = peer
        super().__init__(host, _Request, most=_MOST_REQUESTS)


class _Request(PeerRequest):
    server: _Listener

    def answer(self, method: str, path: str, head: Head) -> None:
        if method != "GET":
            self.say(HTTPStatus.NOT_IMPLEMENTED)
            return
        digest = path.removeprefix(CHUNKS)
        status, folder = self.server.peer.find(digest)
        if folder is None:
            self.say(status)
            return
        with folder.opened(digest) as descriptor:
            if descriptor is None:
                self.say(HTTPStatus.NOT_FOUND)
            else:
                size = os.fstat(descriptor).st_size
                self.say(HTTPStatus.OK, size)
                self.send_range(descriptor, 0, size)


class Peers:
    """The other ranks, as one rank sees them. Thread-safe."""

    def __init__(self, owners: Mapping[str, PeerAddress], server: PeerServer) -> None:
        """`owners`: digest -> who passes it on to this rank. `server`: what this rank passes on."""
        self.server = server
        self._owners = owners
        self._lock = threading.Lock()
        self._dropped: set[PeerAddress] = set()
        self._late: Counter[PeerAddress] = Counter()
        self._answered: set[PeerAddress] = set()
        self._silent: dict[PeerAddress, float] = {}
        """When a peer was found silent that had answered before, until it answers again."""
        self._has_reached_one = False
        self.taken_bytes = 0

    def have(self, digest: str) -> bool:
        """Whether the chunk goes from one host to others, from here or to here."""
        return digest in self._owners or self.server.owns(digest)

    def take(self, digest: str, buffer: memoryview, stop: threading.Event) -> bool:
        """Fills the buffer, exactly as long as the chunk, from the chunk's owner, and proves it. False: the store must
        give it, and the buffer's content is undefined. Raises TransferStopped."""
        peer = self._owners.get(digest)
        if peer is None:
            return False
        times_late = self._late[peer]
        ends = time.monotonic() + self.patience_seconds(peer)
        while self._is_asked(peer):
            check_stop(stop)
            asked_at = time.monotonic()
            try:
                status = self._ask(peer, digest, buffer, stop)
            except (OSError, PeerError, ChunkCorrupt) as error:
                if getattr(error, "errno", None) not in OWN_TROUBLE:
                    self._drop(peer, error)
                return False
            if status is HTTPStatus.OK:
                with self._lock:
                    self.taken_bytes += buffer.nbytes
                    self._late[peer] = max(0, self._late[peer] - 1)
                return True
            if status is HTTPStatus.NOT_FOUND:
                return False
            if status is None or time.monotonic() >= ends:
                self._note_late(peer, times_late)
                return False
            # An owner takes so long for this answer. One that is quicker is not asked again and again.
            stop.wait(max(0.0, asked_at + _ANSWER_WITHIN_SECONDS - time.monotonic()))
        return False

    def patience_seconds(self, peer: PeerAddress) -> float:
        """How long the next chunk may let itself be waited for."""
        return LONGEST_WAIT_SECONDS * 0.5 ** self._late[peer]

    def _ask(self, peer: PeerAddress, digest: str, buffer: memoryview, stop: threading.Event) -> HTTPStatus | None:
        """None: it does not answer, and has answered before."""
        asked_at = time.monotonic()
        with ExitStack() as stack:
            try:
                connection = stack.enter_context(connect(peer))
                self._has_reached_one = True
                status, head = ask(connection, peer, "GET", CHUNKS + digest, expects=_ANSWERS)
            except TimeoutError:
                if self._may_be_silent(peer, asked_at):
                    return None
                raise
            with self._lock:
                self._answered.add(peer)
                self._silent.pop(peer, None)
            if status is HTTPStatus.OK:
                receive_chunk(connection, head, Receiver(buffer, digest), stop)
            return status

    def _is_asked(self, peer: PeerAddress) -> bool:
        with self._lock:
            if peer in self._dropped:
                return False
            return self._has_reached_one or len({each.host for each in self._dropped}) < UNREACHABLE_HOSTS

    def _may_be_silent(self, peer: PeerAddress, asked_at: float) -> bool:
        """Once, if it has answered before: so many may ask it that it comes to nobody in time. Several threads that
        have waited at once count once."""
        with self._lock:
            return peer in self._answered and self._silent.setdefault(peer, time.monotonic()) >= asked_at

    def _note_late(self, peer: PeerAddress, times_late: int) -> None:
        """`times_late`: before this wait. Several threads that have waited at once count once."""
        with self._lock:
            if self._late[peer] != times_late:
                return
            self._late[peer] += 1
        if times_late == 0:
            log.warning("the rank at %s:%d is late with a chunk: the store gives it", peer.host, peer.port)

    def _drop(self, peer: PeerAddress, error: Exception) -> None:
        with self._lock:
            if peer in self._dropped:
                return
            self._dropped.add(peer)
        log.warning(
            "the rank at %s:%d is asked for no more chunks in this restore, and the store gives them: %s",
            peer.host,
            peer.port,
            error or type(error).__name__,
        )


def address_towards(master: str | None) -> str | None:
    """The address of this machine on its way to the job's master, which the job's other hosts know it by; None if it
    has only the loopback one. No packet is sent."""
    for towards in filter(None, (master, "192.0.2.1", "2001:db8::1")):  # then: on the way to anywhere else
        with suppress(OSError):
            for family, kind, _, _, where in resolved(towards, socket.SOCK_DGRAM):
                address = _address_on_the_way(family, kind, where)
                if address is not None:
                    return address
    return None


def _address_on_the_way(family: int, kind: int, where: Any) -> str | None:
    """None if nothing leads there, or only what stays on this machine or its cable."""
    try:
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            address = str(probe.getsockname()[0])
    except OSError:  # a name may have an IPv6 address, and this machine no way there
        return None
    found = ip_address(address)
    return None if found.is_loopback or found.is_link_local else address
