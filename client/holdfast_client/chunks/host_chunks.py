"""The chunks of a checkpoint that are on the host. Between fetcher, the node agent's memory and the chunk folder.

    digest -> lent by the agent -> bytes, proven, without a ticket
           -> in the folder -> bytes, proven, without a ticket
           -> not there: [lock] -> there by now, or [GET] -> proven -> into the folder -> [unlock]

A folder that fails, is full or is gone costs a second GET and nothing else. GET is from another host, if one passes the
chunk on (peers.py), else from the memory of another host's agent, if one has it, else from the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress

from holdfast_client.agent.lent_chunks import LentChunks
from holdfast_client.agent.peer_chunks import PeerChunks
from holdfast_client.chunks.peers import Peers
from holdfast_client.local.chunk_folder import ChunkFolder

LONGEST_WAIT_SECONDS = 120.0
"""The longest wait for another process that fetches the same chunk. After that this process fetches it too."""


class HostChunks:
    """For the fetches of one process. `shared`: the digests that other processes of this host want too; one of them
    fetches each chunk, and leaves it in `folder`. Other chunks in the folder are used as well, and before it what the
    node agent has `lent`. `peers`: who on other hosts passes chunks on, and what this process passes on; all of that is
    among `shared`. `agents`: of other hosts, asked before the store. Thread-safe."""

    def __init__(
        self,
        folder: ChunkFolder | None,
        shared: Collection[str],
        peers: Peers | None = None,
        lent: LentChunks | None = None,
        agents: PeerChunks | None = None,
    ) -> None:
        """Nothing is `shared` without a folder."""
        self.peers = peers
        self._folder = folder
        self.lent = lent
        self.agents = agents
        self._shared = frozenset(shared)
        self._lock = threading.Lock()
        self.lent_bytes = 0
        """Bytes read in the agent's memory."""
        self.taken_bytes = 0
        """Bytes found in the folder, not fetched by this process."""

    def size(self, digest: str) -> int | None:
        """Bytes of what is here under this name; None if nothing is, or it cannot be read."""
        if self.lent is not None and (size := self.lent.size(digest)) is not None:
            return size
        try:
            return None if self._folder is None else self._folder.size(digest)
        except OSError:
            return None

    def take(self, digest: str, buffer: memoryview, stop: threading.Event) -> bool:
        """Fills the buffer from this host, proven. False if the chunk is not there with its bytes, or cannot be read:
        then the store must give it."""
        if self.lent is not None and self.lent.read_into(digest, buffer, stop):
            with self._lock:
                self.lent_bytes += buffer.nbytes
            return True
        if self._folder is None:
            return False
        try:
            taken = self._folder.read_into(digest, buffer, stop=stop)
        except OSError:
            return False
        if taken:
            with self._lock:
                self.taken_bytes += buffer.nbytes
            self._settle(digest)
        return taken

    def fetch_once(
        self, digest: str, buffer: memoryview, fetch: Callable[[memoryview], None], stop: threading.Event
    ) -> None:
        """Fills the buffer: by `fetch`, which proves its bytes, or from a chunk that another process has left
        meanwhile."""
        if self._folder is None or digest not in self._shared:
            fetch(buffer)
            return
        with ExitStack() as stack:
            try:
                stack.enter_context(self._folder.fetching(digest, wait_seconds=LONGEST_WAIT_SECONDS, stop=stop))
            except OSError:
                fetch(buffer)
                self._settle(digest)
                return
            if self.take(digest, buffer, stop):
                return
            fetch(buffer)
            with suppress(OSError):
                self._folder.add(digest, buffer, durable=False)
            self._settle(digest)

    def give_up(self) -> None:
        """This process reads no further: other hosts must not wait for what it has not fetched."""
        if self.peers is not None:
            self.peers.server.give_up()

    def _settle(self, digest: str) -> None:
        if self.peers is not None:
            self.peers.server.settle(digest)
