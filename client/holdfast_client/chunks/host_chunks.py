"""What the processes of one host leave to each other of a checkpoint's chunks. Between fetcher and chunk folder.

    digest -> in the folder -> bytes, proven, without a ticket
           -> not there: [lock] -> there by now, or [GET] -> proven -> into the folder -> [unlock]

A folder that does not work, is full or is gone costs a second GET and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress

from holdfast_client.local.chunk_folder import ChunkFolder

LONGEST_WAIT_SECONDS = 120.0
"""For another process that fetches the same chunk. Longer, and it is fetched here too."""


class HostChunks:
    """For the fetches of one process. `shared` are the digests that others of this host want too: one of them fetches,
    and leaves the chunk in `folder`. Whatever else is there already is taken as well. Thread-safe."""

    def __init__(self, folder: ChunkFolder, shared: Collection[str]) -> None:
        self._folder = folder
        self._shared = frozenset(shared)
        self._lock = threading.Lock()
        self.taken_bytes = 0
        """Found in the folder, and not fetched by this process."""

    def size(self, digest: str) -> int | None:
        """Bytes of what the folder has under this name; None if nothing that can be read."""
        try:
            return self._folder.size(digest)
        except OSError:
            return None

    def take(self, digest: str, buffer: memoryview, stop: threading.Event) -> bool:
        """Fills the buffer from the folder, proven. False if the chunk is not there with its bytes, or cannot be
        read: the store has it too."""
        try:
            taken = self._folder.read_into(digest, buffer, stop=stop)
        except OSError:
            return False
        if taken:
            with self._lock:
                self.taken_bytes += buffer.nbytes
        return taken

    def fetch_once(
        self, digest: str, buffer: memoryview, fetch: Callable[[memoryview], None], stop: threading.Event
    ) -> None:
        """Fills the buffer: by `fetch`, which proves what it got, or by what another process has left meanwhile."""
        if digest not in self._shared:
            fetch(buffer)
            return
        with ExitStack() as stack:
            try:
                stack.enter_context(self._folder.fetching(digest, wait_seconds=LONGEST_WAIT_SECONDS, stop=stop))
            except OSError:
                fetch(buffer)
                return
            if self.take(digest, buffer, stop):
                return
            fetch(buffer)
            with suppress(OSError):
                self._folder.add(digest, buffer, durable=False)
