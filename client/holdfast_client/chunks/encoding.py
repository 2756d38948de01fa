"""One chunk on its way up, between its hash and its verdict: encoded if that helps, and held.

    hashed -> [asked for, if it may be encoded] -> absent -> [encoded on a thread] -> offered, sent, verified

A present chunk costs no compression. A chunk that hardly shrinks is sent raw.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_client.chunks.workers import CoreLimit
from holdfast_client.transport import check_stop
from holdfast_protocol.checkpoints import ChunkOffer
from holdfast_protocol.codecs import Codec, encode, zstd_codec

Load = Callable[[threading.Event], memoryview]
"""Returns the chunk's bytes, on a transfer thread. May wait for them, in the order of the chunks; raises
TransferStopped soon after the event is set. The bytes must not change until `release`, or until the upload is over."""


@dataclass(frozen=True)
class OutgoingChunk:
    load: Load
    digest: str | None = None
    """SHA-256 of the bytes if it is known; else it is computed."""
    release: Callable[[], None] | None = None
    """Called on the uploading thread as soon as nothing reads the bytes any more: the service has verified the chunk,
    has it already, or they were encoded. Not called for open chunks when the upload fails."""
    item_bytes: int = 1
    """Bytes of one floating-point number, if most of the chunk is numbers of one size: compression orders their bytes
    into planes."""

    @classmethod
    def of(cls, body: bytes | memoryview, digest: str | None = None, *, item_bytes: int = 1) -> OutgoingChunk:
        """A chunk whose bytes are in memory."""
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
    """Loads the chunk and finds its digests. hashlib releases the interpreter's lock meanwhile. Without `cores` it runs
    at once, however many other threads compute."""
    body = chunk.load(stop)

    def digests() -> tuple[str, str | None]:
        md5 = hashlib.md5(body, usedforsecurity=False).hexdigest() if with_md5 else None
        return chunk.digest or hashlib.sha256(body).hexdigest(), md5

    digest, md5 = digests() if cores is None else cores.run(digests)
    return HashedChunk(digest, md5, body, chunk.release, chunk.item_bytes)


SMALLEST_ENCODED_BYTES = 64 * 1024
"""A smaller chunk saves less than asking for it costs; and documents are compressed already."""
KEPT_PART = 0.95
"""Part of the raw bytes: a chunk that saves less than 5% is sent raw, and costs no reader a decode."""
ENCODED_BYTES = 256 * 1024**2
"""The most bytes encoded or being encoded. No more are begun, because this memory comes on top of the state."""


@dataclass(frozen=True)
class WireForm:
    codec: Codec
    body: memoryview
    digest: str
    """SHA-256 of `body`."""
    md5: str | None
    """MD5 of `body`, if the store asks for it."""

    @classmethod
    def raw(cls, chunk: HashedChunk) -> WireForm:
        return cls(Codec.RAW, chunk.body, chunk.digest, chunk.md5)


def encode_chunk(chunk: HashedChunk, stop: threading.Event) -> WireForm:
    """On a transfer thread. Raises TransferStopped."""
    codec = zstd_codec(chunk.item_bytes)
    most_bytes = int(chunk.body.nbytes * KEPT_PART)
    encoded = encode(chunk.body, codec, most_bytes=most_bytes, on_block=lambda: check_stop(stop))
    if encoded is None:
        return WireForm.raw(chunk)
    md5 = hashlib.md5(encoded, usedforsecurity=False).hexdigest() if chunk.md5 is not None else None
    return WireForm(codec, memoryview(encoded), hashlib.sha256(encoded).hexdigest(), md5)


@dataclass
class OpenChunk:
    digest: str
    bytes: int
    form: WireForm | None
    """None: it will be encoded, if the service does not have it."""
    raw: HashedChunk | None
    """Set as long as any thread may read the chunk's own bytes."""
    tries: int = 0
    waits: int = 0
    """How often its ticket expired before its transfer began; no refusal is counted."""

    @classmethod
    def of(cls, chunk: HashedChunk, *, encodes: bool) -> OpenChunk:
        asks = encodes and chunk.body.nbytes >= SMALLEST_ENCODED_BYTES
        return cls(chunk.digest, chunk.body.nbytes, None if asks else WireForm.raw(chunk), chunk)

    @property
    def held_bytes(self) -> int:
        return self.bytes if self.form is None else self.form.body.nbytes

    def offer(self) -> ChunkOffer:
        if self.form is None:
            return ChunkOffer(digest=self.digest, bytes=self.bytes, ask=True)
        if self.form.codec is Codec.RAW:
            return ChunkOffer(digest=self.digest, bytes=self.bytes, md5=self.form.md5)
        return ChunkOffer(
            digest=self.digest,
            bytes=self.bytes,
            codec=self.form.codec,
            stored_digest=self.form.digest,
            stored_bytes=self.form.body.nbytes,
            md5=self.form.md5,
        )

    def take(self, form: WireForm) -> None:
        """Sets the form that is sent. An encoded chunk needs its own bytes no more."""
        self.form = form
        if form.codec is not Codec.RAW:
            self.let_go()

    def let_go(self) -> None:
        """No thread reads the chunk's own bytes from here on. May be called twice."""
        raw, self.raw = self.raw, None
        if raw is not None and raw.release is not None:
            raw.release()


class EncodingQueue:
    """Chunks to encode, so many at once that their memory stays bounded."""

    def __init__(self) -> None:
        self._waiting: deque[OpenChunk] = deque()
        self._running = 0
        self._bytes = 0

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    def add(self, chunk: OpenChunk) -> None:
        self._waiting.append(chunk)

    def begin(self, at_once: int) -> OpenChunk | None:
        """The next chunk to encode, if there is one and room for it."""
        if not self._waiting or self._running >= at_once or self._bytes >= ENCODED_BYTES:
            return None
        chunk = self._waiting.popleft()
        self._running += 1
        self._bytes += chunk.held_bytes
        return chunk

    def end(self, chunk: OpenChunk, form: WireForm) -> None:
        self._running -= 1
        self._bytes -= chunk.held_bytes
        chunk.take(form)
        self._bytes += _own_bytes(chunk)

    def close(self, chunk: OpenChunk) -> None:
        self._bytes -= _own_bytes(chunk)


def _own_bytes(chunk: OpenChunk) -> int:
    return chunk.held_bytes if chunk.form is not None and chunk.form.codec is not Codec.RAW else 0
