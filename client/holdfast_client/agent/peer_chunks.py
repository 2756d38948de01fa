"""What agents of other hosts keep of a run, as one restore reads it; and how any agent reads another one.

    digests that are not here -> Find -> [agents that have those ranks' parts] -> who has which
    digest -> GET -> SHA-256 while it arrives -> the chunk, or it counts as missing

An agent that lies, stalls or cannot be reached is asked no more in this restore. The bytes are not encrypted.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException

from pydantic import BaseModel, ValidationError

from holdfast_client.agent.messages import Find, Found
from holdfast_client.chunks.connections import RateLimit
from holdfast_client.chunks.peers import PeerAddress
from holdfast_client.chunks.transfer import Receiver
from holdfast_client.errors import ChunkCorrupt
from holdfast_protocol.base import RunName

log = logging.getLogger("holdfast")

CHUNKS, FIND, OFFERS = "/chunks/", "/find", "/offers"
CONNECT_SECONDS = 2.0
SILENCE_SECONDS = 5.0
"""An agent that says nothing for so long is asked no more, and a caller that takes nothing is cut off."""
SLOWEST_BYTES_PER_SECOND = 2 * 1024**2
UNREACHABLE = 2
"""After so many agents, and none that could be reached, no other is tried: a firewall stands between the hosts."""
_MOST_ANSWER_BYTES = 64 * 1024**2
TROUBLE = (OSError, HTTPException, ChunkCorrupt, ValidationError)
"""What another agent's can be."""


@dataclass(frozen=True)
class Peer:
    """An agent of another host, and the ranks of which it has had parts when this launch began."""

    address: PeerAddress
    ranks: frozenset[int]


def read_chunk(
    peer: PeerAddress, digest: str, buffer: memoryview, stop: threading.Event, rate: RateLimit | None = None
) -> bool:
    """Fills the buffer, exactly as long as the chunk, and proves it. False: the agent does not have it. Afterwards the
    buffer's content is undefined, as after an error. Raises TROUBLE, and TransferStopped. `rate`: as slow as that."""
    with _connected(peer, buffer.nbytes if rate is None else None) as connection:
        connection.request("GET", CHUNKS + digest, headers=_authorization(peer))
        response = connection.getresponse()
        if response.status == HTTPStatus.NOT_FOUND:
            return False
        if response.status != HTTPStatus.OK:
            raise HTTPException(f"it answers {response.status}")

        def read_into(block: memoryview) -> int:
            arrived = response.read1(block.nbytes)  # readinto would wait for the whole block
            block[: len(arrived)] = arrived
            return len(arrived)

        receiver = Receiver(buffer, digest, rate)
        receiver.expect(-1 if response.length is None else response.length)
        receiver.fill(read_into, stop)
        receiver.finish()
    return True


def ask(peer: PeerAddress, path: str, question: BaseModel) -> bytes:
    """The answer's body. Raises OSError and HTTPException."""
    body = question.model_dump_json().encode()
    with _connected(peer, 2 * len(body)) as connection:
        connection.request("POST", path, body, _authorization(peer))
        response = connection.getresponse()
        if response.status not in (HTTPStatus.OK, HTTPStatus.NO_CONTENT):
            raise HTTPException(f"it answers {response.status}")
        if (response.length or 0) > _MOST_ANSWER_BYTES:
            raise HTTPException(f"it answers {response.length} bytes")
        return response.read(response.length or 0)


@contextmanager
def _connected(peer: PeerAddress, size_bytes: int | None) -> Iterator[HTTPConnection]:
    """For one request. It is cut off when so many bytes should have come, however often a few of them do. None: its
    reader takes its time, and only silence ends it."""
    with closing(HTTPConnection(peer.host, peer.port, timeout=CONNECT_SECONDS)) as connection:
        connection.connect()
        connection.sock.settimeout(SILENCE_SECONDS)
        if size_bytes is None:
            yield connection
            return
        seconds = SILENCE_SECONDS + size_bytes / SLOWEST_BYTES_PER_SECOND
        late = threading.Timer(seconds, _cut, (connection.sock,))
        late.daemon = True
        late.start()
        try:
            yield connection
        finally:
            late.cancel()


def _cut(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _authorization(peer: PeerAddress) -> dict[str, str]:
    return {"Authorization": f"Bearer {peer.token}"}


class PeerChunks:
    """Thread-safe, once `find` has returned."""

    def __init__(self, run: RunName, peers: Sequence[Peer]) -> None:
        self._run = run
        self._peers = peers
        self._lock = threading.Lock()
        self._found: dict[str, tuple[PeerAddress, int]] = {}
        self._dropped: set[PeerAddress] = set()
        self.taken_bytes = 0

    def find(self, missing: Mapping[int, AbstractSet[str]]) -> None:
        """Asks who has what of these digests, by stored rank. For a moment if another agent hangs."""
        has_reached_one = False
        for peer in self._peers:
            wanted = sorted({digest for rank in peer.ranks for digest in missing.get(rank, ())} - self._found.keys())
            if not wanted or (not has_reached_one and len(self._dropped) >= UNREACHABLE):
                continue
            try:
                question = Find(project=self._run.project, run=self._run.run, digests=wanted)
                sizes = Found.model_validate_json(ask(peer.address, FIND, question)).bytes
            except TROUBLE as error:
                self._drop(peer.address, error)
                continue
            has_reached_one = True
            for digest, size in zip(wanted, sizes, strict=False):
                if size is not None:
                    self._found[digest] = peer.address, size

    def read_into(self, digest: str, buffer: memoryview, stop: threading.Event) -> bool:
        """Fills the buffer, exactly as long as the chunk, and proves it. False: it must come from elsewhere, and the
        buffer's content is undefined. Raises TransferStopped."""
        found = self._found.get(digest)
        if found is None or found[1] != buffer.nbytes:
            return False
        try:
            is_read = read_chunk(found[0], digest, buffer, stop)
        except TROUBLE as error:
            self._drop(found[0], error)
            return False
        with self._lock:
            if is_read:
                self.taken_bytes += buffer.nbytes
            else:
                self._found.pop(digest, None)
        return is_read

    def _drop(self, peer: PeerAddress, error: Exception) -> None:
        with self._lock:
            is_first = peer not in self._dropped
            self._dropped.add(peer)
            self._found = {digest: found for digest, found in self._found.items() if found[0] != peer}
        if is_first:
            log.warning(
                "the agent at %s:%d is asked for no more chunks in this restore: %s",
                peer.host,
                peer.port,
                str(error) or type(error).__name__,
            )
