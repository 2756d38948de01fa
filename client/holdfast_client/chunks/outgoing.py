"""One chunk on its way up, as the uploader takes it, and how its digest is found on a transfer thread."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_client.chunks.core_limit import CoreLimit

Load = Callable[[threading.Event], memoryview]
"""Gives the chunk's bytes, on a transfer thread. May wait for them, in the order of the chunks; raises TransferStopped
soon after the event is set. The bytes must then stay as they are until `release`, or until the upload is over."""


@dataclass(frozen=True)
class OutgoingChunk:
    load: Load
    digest: str | None = None
    """SHA-256 of the bytes where it is known; else it is computed."""
    release: Callable[[], None] | None = None
    """Called on the uploading thread as soon as nothing reads the bytes any more: the service has verified the chunk,
    has it already, or they were encoded. Not called for what is still under way when the upload fails."""
    item_bytes: int = 1
    """Of the numbers in it, where most of it is floating-point numbers of one size: where chunks are compressed, their
    bytes are put in planes."""

    @classmethod
    def of(cls, body: bytes | memoryview, digest: str | None = None, *, item_bytes: int = 1) -> OutgoingChunk:
        """Bytes that are there."""
        return cls(lambda _: memoryview(body), digest, item_bytes=item_bytes)


@dataclass(frozen=True)
class HashedChunk:
    digest: str
    md5: str | None
    body: memoryview
    release: Callable[[], None] | None
    item_bytes: int = 1


def hash_chunk(
    chunk: OutgoingChunk, stop: threading.Event, *, with_md5: bool, cores: CoreLimit | None = None
) -> HashedChunk:
    """Loads the chunk and finds its digests. hashlib lets go of the interpreter's lock meanwhile. Without `cores` at
    once, however many others compute."""
    body = chunk.load(stop)

    def digests() -> tuple[str, str | None]:
        md5 = hashlib.md5(body, usedforsecurity=False).hexdigest() if with_md5 else None
        return chunk.digest or hashlib.sha256(body).hexdigest(), md5

    digest, md5 = digests() if cores is None else cores.run(digests)
    return HashedChunk(digest, md5, body, chunk.release, chunk.item_bytes)
