"""What agents of other hosts keep of a run, as one restore reads it; and how any agent reads another one.

    digests that are not here -> Find -> [agents that have those ranks' parts] -> who has which
    digest -> GET -> SHA-256 while it arrives -> the chunk, or it counts as missing

An agent that lies, stalls or cannot be reached is asked no more in this restore. One that many ask at once, and says
so, is asked for the next chunk all the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from http import HTTPStatus

from pydantic import BaseModel, ValidationError

from holdfast_client.agent.messages import Find, Found
from holdfast_client.chunks import peer_http
from holdfast_client.chunks.connections import RateLimit
from holdfast_client.chunks.peer_http import CHUNKS, OWN_TROUBLE, PeerAddress, PeerError, connect
from holdfast_client.chunks.transfer import Receiver
from holdfast_client.errors import ChunkCorrupt
from holdfast_protocol.base import RunName

log = logging.getLogger("holdfast")

FIND, OFFERS = "/find", "/offers"
UNREACHABLE = 2
"""After so many agents, and none that could be reached, no other is tried: a firewall stands between the hosts."""
TOO_SLOW = 2
"""After so many that were given up because they took too long, none is asked: the network has no room for copies."""
_MOST_ANSWER_BYTES = 64 * 1024**2
_ANSWERS = HTTPStatus.OK, HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE
TROUBLE = (OSError, PeerError, ChunkCorrupt, ValidationError)
"""What another agent's can be."""


@dataclass(frozen=True)
class Peer:
    """An agent of another host, and the ranks of which it has had parts when this launch began."""

    address: PeerAddress
    ranks: frozenset[int]


class PeerBusyError(PeerError):
    """Too many ask it at once."""


def read_chunk(
    peer: PeerAddress, digest: str, buffer: memoryview, stop: threading.Event, rate: RateLimit | None = None
) -> bool:
    """Fills the buffer, exactly as long as the chunk, and proves it. False: the agent does not have it. Afterwards the
    buffer's content is undefined, as after an error. Raises TROUBLE, and TransferStopped. `rate`: as slow as that, and
    then only silence is too slow."""
    with connect(peer) as connection:
        status, head = peer_http.ask(connection, peer, "GET", CHUNKS + digest, expects=_ANSWERS)
        if status is HTTPStatus.SERVICE_UNAVAILABLE:
            raise PeerBusyError("too many ask it at once")
        if status is HTTPStatus.OK:
            receiver = Receiver(buffer, digest, rate)
            peer_http.receive_chunk(connection, head, receiver, stop, in_time=rate is None)
    return status is HTTPStatus.OK


def ask(peer: PeerAddress, path: str, question: BaseModel) -> bytes:
    """The answer's body. Raises OSError and PeerError."""
    body = question.model_dump_json().encode()
    expects = HTTPStatus.OK, HTTPStatus.NO_CONTENT
    with connect(peer) as connection:
        _, head = peer_http.ask(connection, peer, "POST", path, expects=expects, body=body)
        return peer_http.read_body(connection, head, _MOST_ANSWER_BYTES)


class PeerChunks:
    """Thread-safe, once `find` has returned."""

    def __init__(self, run: RunName, peers: Sequence[Peer]) -> None:
        self._run = run
        self._peers = peers
        self._lock = threading.Lock()
        self._found: dict[str, tuple[PeerAddress, int]] = {}
        self._dropped: set[PeerAddress] = set()
        self._too_slow: set[PeerAddress] = set()
        self.taken_bytes = 0

    def find(self, missing: Mapping[int, AbstractSet[str]]) -> None:
        """Asks who has what of these digests, by stored rank. For a moment if another agent hangs."""
        has_reached_one = False
        for peer in self._peers:
            if len(self._too_slow) >= TOO_SLOW:
                return
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
        except PeerBusyError:
            return False
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
        if getattr(error, "errno", None) in OWN_TROUBLE:
            return
        with self._lock:
            is_first = peer not in self._dropped
            self._dropped.add(peer)
            if isinstance(error, TimeoutError):
                self._too_slow.add(peer)
            is_over = len(self._too_slow) >= TOO_SLOW
            self._found = {digest: found for digest, found in self._found.items() if found[0] != peer and not is_over}
        if is_first:
            log.warning(
                "the agent at %s:%d is asked for no more chunks in this restore: %s",
                peer.host,
                peer.port,
                str(error) or type(error).__name__,
            )
