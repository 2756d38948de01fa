"""Chunks that were verified, kept in memory for the next small read, within a bound.

A chunk is verified by the SHA-256 of all its bytes, so one kilobyte costs the whole chunk once, and nothing while the
chunk is here (docs/adr/0084). Threads that want the same chunk at once fetch it once: the others wait for it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection

Receive = Callable[[str, memoryview], None]
Fetch = Callable[[list[str], Receive], None]


class ChunkCache:
    """For any thread. The chunk that was unused for longest goes first."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes` 0: nothing is kept."""
        self.most_bytes = most_bytes
        self._changed = threading.Condition()
        self._chunks: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._fetching: set[str] = set()

    @property
    def kept_bytes(self) -> int:
        with self._changed:
            return self._kept_bytes

    def has(self, digest: str) -> bool:
        """Whether it is here, or on its way."""
        with self._changed:
            return digest in self._chunks or digest in self._fetching

    def read(self, digests: Collection[str], receive: Receive, fetch: Fetch) -> None:
        """Calls `receive(digest, bytes)` once for each digest: with what is here, with what `fetch` brings, and with
        what another thread is just fetching. It may be called on other threads, several at a time. The view is valid
        during the call. Raises what `fetch` and `receive` raise."""

        def take(digest: str, view: memoryview) -> None:
            self._keep(digest, view)
            receive(digest, view)

        left = set(digests)
        while left:
            mine: list[str] = []
            try:
                found = self._claim(left, mine)
                for digest, chunk in found.items():
                    receive(digest, memoryview(chunk))
                left -= found.keys()
                found.clear()
                if mine:
                    fetch(mine, take)
                    left.difference_update(mine)
            finally:
                # Also if a person interrupts it between the two: else the next reader of `mine` would wait for ever.
                self._let_go(mine)

    def clear(self) -> None:
        with self._changed:
            self._chunks.clear()
            self._kept_bytes = 0

    def _claim(self, wanted: Collection[str], mine: list[str]) -> dict[str, bytes]:
        """What is here; `mine` gets what this thread fetches now. Waits while other threads fetch all of it."""
        with self._changed:
            while True:
                found = {digest: self._chunks[digest] for digest in wanted if digest in self._chunks}
                for digest in found:
                    self._chunks.move_to_end(digest)
                mine += [digest for digest in wanted if digest not in found and digest not in self._fetching]
                if found or mine:
                    self._fetching.update(mine)
                    return found
                self._changed.wait()

    def _let_go(self, mine: list[str]) -> None:
        if mine:
            with self._changed:
                self._fetching.difference_update(mine)
                self._changed.notify_all()

    def _keep(self, digest: str, view: memoryview) -> None:
        chunk = bytes(view) if view.nbytes <= self.most_bytes else None
        with self._changed:
            if chunk is not None and digest not in self._chunks:
                self._chunks[digest] = chunk
                self._kept_bytes += len(chunk)
                while self._kept_bytes > self.most_bytes:
                    _, oldest = self._chunks.popitem(last=False)
                    self._kept_bytes -= len(oldest)
            self._fetching.discard(digest)
            self._changed.notify_all()
