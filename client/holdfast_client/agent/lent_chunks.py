"""What the agent of this node keeps of a run, as one restore reads it.

digest -> [range of the agent's memory] -> copied -> SHA-256 of the copy -> the chunk, or it counts as missing
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from holdfast_client.agent.messages import Lent
from holdfast_client.local.chunk_folder import read_hashed

log = logging.getLogger("holdfast")


class _Range(NamedTuple):
    descriptor: int
    start: int
    bytes: int


class LentChunks:
    """Its memory stays while this is open, even if the agent is killed. Thread-safe."""

    def __init__(self, lent: Iterable[tuple[Lent, bytes, int]]) -> None:
        """Each part as it came from the agent: with the documents' bytes, and the descriptor of its memory, which is
        closed with this. Of equal chunks the last is read."""
        self._lock = threading.Lock()
        self._descriptors: list[int] = []
        self._ranges: dict[str, _Range] = {}
        self._documents: dict[str, bytes] = {}
        self._refused = 0
        for part, documents, descriptor in lent:
            self._descriptors.append(descriptor)
            for chunk in part.chunks:
                if chunk.digest is not None:
                    self._ranges[chunk.digest] = _Range(descriptor, chunk.start, chunk.bytes)
            for document in part.documents:
                if document.digest is not None:
                    body = documents[document.start : document.start + document.bytes]
                    self._documents[document.digest] = body

    def size(self, digest: str) -> int | None:
        """None: it is not here."""
        if (document := self._documents.get(digest)) is not None:
            return len(document)
        found = self._ranges.get(digest)
        return None if found is None else found.bytes

    def read_into(self, digest: str, buffer: memoryview, stop: threading.Event) -> bool:
        """Fills the buffer, and proves it by SHA-256. False if the chunk is not here with its bytes; the buffer's
        content is undefined then. Raises TransferStopped."""
        if self.size(digest) != buffer.nbytes:
            return False
        if self._copied(digest, buffer, stop) != digest:
            with self._lock:
                self._documents.pop(digest, None)
                self._ranges.pop(digest, None)
                self._refused += 1
                is_first = self._refused == 1
            if is_first:  # a whole state may be staged over
                log.warning(
                    "the memory of this node's agent has other bytes for chunk %s than its digest says; such chunks "
                    "are read from elsewhere. If no other launch of the run is saving here, look at the memory of "
                    "this node",
                    digest[:12],
                )
            return False
        return True

    def close(self) -> None:
        """May be called twice. Nothing may read it any more."""
        descriptors, self._descriptors = self._descriptors, []
        self._ranges = {}
        if descriptors and self._refused > 1:
            log.warning("%d chunks in the memory of this node's agent had other bytes than they should", self._refused)
        for descriptor in descriptors:
            os.close(descriptor)

    def _copied(self, digest: str, buffer: memoryview, stop: threading.Event) -> str | None:
        """SHA-256 of what was copied; None if the memory cannot be read."""
        if (document := self._documents.get(digest)) is not None:
            buffer[:] = document
            return hashlib.sha256(buffer).hexdigest()
        with suppress(OSError):
            if (found := self._ranges.get(digest)) is not None:
                return read_hashed(found.descriptor, buffer, stop, start=found.start)
        return None
