"""What is stored encoded is decoded while it arrives, and its raw bytes are hashed: they alone are the chunk.

Whatever a store sends, it takes no more memory than the chunk's buffer and a few blocks: reading ends at the size that
the ticket names, and decoding at the chunk's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from holdfast_client.chunks.pace import Pace
from holdfast_client.chunks.receive import Receiver
from holdfast_client.chunks.stopping import check_stop
from holdfast_client.errors import ChunkCorrupt
from holdfast_protocol.codecs import Codec
from holdfast_protocol.decoding import DecodeError, decode
from holdfast_protocol.restore import ReadTicket

WIRE_BLOCK_BYTES = 256 * 1024

ReadInto = Callable[[memoryview], int | None]


def receiver_for(ticket: ReadTicket, buffer: memoryview, digest: str, pace: Pace | None = None) -> Receiver:
    """A receiver for whatever the ticket leads to."""
    if ticket.codec is Codec.RAW:
        return Receiver(buffer, digest, pace)
    return EncodedReceiver(buffer, digest, pace, codec=ticket.codec, stored_bytes=ticket.stored_bytes)


class EncodedReceiver(Receiver):
    """As Receiver, where `stored_bytes` come over the wire and the buffer gets what they decode to."""

    def __init__(
        self, buffer: memoryview, digest: str, pace: Pace | None = None, *, codec: Codec, stored_bytes: int
    ) -> None:
        super().__init__(buffer, digest, pace)
        self.wire_bytes = stored_bytes
        self._codec = codec
        self._received = 0
        self._ended = False

    def fill(self, read_into: ReadInto, stop: threading.Event | None) -> None:
        """Reads to the end and decodes. Raises ChunkCorrupt where that gives another number of bytes."""
        arriving = self._arriving(read_into, stop)
        try:
            for block in decode(self._codec, self.buffer.nbytes, arriving):
                self.buffer[self._filled : self._filled + block.nbytes] = block
                self._hash.update(block)
                self._filled += block.nbytes
            for _ in arriving:  # to the end: only then can the connection be used again
                pass
        except DecodeError as error:
            if not self._ended or self._received >= self.wire_bytes:
                raise ChunkCorrupt(self._digest, "mismatch", f"stored as {self._codec}, {error}") from None
        if self._received < self.wire_bytes:
            raise ChunkCorrupt(
                self._digest, "truncated", f"{self._received} bytes instead of {self.wire_bytes} arrived"
            )

    def _arriving(self, read_into: ReadInto, stop: threading.Event | None) -> Iterator[memoryview]:
        block = memoryview(bytearray(min(WIRE_BLOCK_BYTES, self._block_bytes)))
        while not self._ended:
            check_stop(stop)
            # One byte more than there should be shows that there are more.
            part = block[: max(1, self.wire_bytes - self._received)]
            if self._pace is not None:
                self._pace.spend(part.nbytes, stop)
            count = read_into(part)
            self._ended = not count
            if count:
                self._received += count
                if self._received > self.wire_bytes:
                    self.expect(self._received)
                yield part[:count]
