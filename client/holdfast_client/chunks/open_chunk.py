"""One chunk between its hash and its verdict: the bytes that go over the wire for it, and whether they are encoded.

    hashed -> [asked for, where it may be encoded] -> absent -> [encoded on a thread] -> offered, sent, verified

What is present costs no compression. What is not worth it goes as it is.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from dataclasses import dataclass

from holdfast_client.chunks.outgoing import HashedChunk
from holdfast_client.chunks.stopping import check_stop
from holdfast_protocol.chunks import ChunkOffer
from holdfast_protocol.codecs import Codec, zstd_codec
from holdfast_protocol.encoding import encode

SMALLEST_ENCODED_BYTES = 64 * 1024
"""A smaller chunk saves less than asking for it costs; and the documents among them are compressed already."""
KEPT_PART = 0.95
"""Of its bytes: what saves less than 5% is sent as it is, and costs no reader anything."""
ENCODED_BYTES = 256 * 1024**2
"""Held in encoded form, and being encoded; beyond them no more are begun, for this memory comes on top of the state."""


@dataclass(frozen=True)
class WireForm:
    codec: Codec
    body: memoryview
    digest: str
    """SHA-256 of `body`."""
    md5: str | None
    """Of `body`, where the store asks for it."""

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
    """As long as anything may read the chunk's own bytes."""
    tries: int = 0
    waits: int = 0
    """How often a ticket's time was over before its turn came: nobody has refused anything."""

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
        """How it goes over the wire. What was encoded does not need the chunk's own bytes any more."""
        self.form = form
        if form.codec is not Codec.RAW:
            self.let_go()

    def let_go(self) -> None:
        """Nothing reads the chunk's own bytes from here on. Twice is fine."""
        raw, self.raw = self.raw, None
        if raw is not None and raw.release is not None:
            raw.release()


class EncodingQueue:
    """Chunks that are to be encoded, so many at once that the memory for it stays bounded."""

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
        """The next one to encode, if there is one and room for it."""
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
