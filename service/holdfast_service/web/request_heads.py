"""Refuses a request whose end two programs could see in different places. A proxy in front and the service would not
agree, and what one takes for a body the other answers as a request: of whoever comes next on that connection.

h11 takes what HTTP lets a server take. It has no setting for less, so its buffer is changed, which cuts out heads.
"""

from __future__ import annotations

import re

from h11 import Connection, LocalProtocolError
from h11._receivebuffer import ReceiveBuffer, blank_line_regex

# A line that ends without CR, a CR within a line, or a line that goes on in the next one.
_LOOSE = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]")
_LENGTH, _CHUNKED = b"content-length", b"transfer-encoding"
_MAY_SAY = {b"HTTP/1.1": {_LENGTH, _CHUNKED}, b"HTTP/1.0": {_LENGTH}}
"""How a head may say where the body ends, by its version. What follows a chunked body says nothing of it."""


def read_strictly(connection: Connection) -> None:
    """Before its first byte. uvicorn then answers such a request with 400, and closes."""
    connection._receive_buffer = _StrictBuffer()


class _StrictBuffer(ReceiveBuffer):
    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Raises LocalProtocolError, which h11 makes the sender's."""
        if self._data[:1] == b"\n":
            raise LocalProtocolError("a line ends without CR")
        end = blank_line_regex.search(self._data, self._multiple_lines_search)
        raw = b"" if end is None else bytes(self._data[: end.end()])
        lines = super().maybe_extract_lines()
        if lines:
            _refuse_ambiguous(raw, lines)
        return lines


def _refuse_ambiguous(raw: bytes, lines: list[bytearray]) -> None:
    if _LOOSE.search(raw):
        raise LocalProtocolError("a line ends without CRLF, or goes on in the next one")
    names = (bytes(line.partition(b":")[0]).lower() for line in lines)
    said = [name for name in names if name in (_LENGTH, _CHUNKED)]
    if len(said) > 1 or not set(said) <= _MAY_SAY.get(bytes(lines[0][-8:]), set()):
        raise LocalProtocolError("where the body ends is said twice, or as this version of HTTP does not say it")
