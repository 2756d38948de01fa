"""Canonical JSON, compressed: the outer form of every index document. Pure; below index_documents.

Canonical: keys sorted, no spaces, ASCII only, no NaN or Infinity tokens. One value has one sequence of bytes, so its
SHA-256 names the value; zlib's output may differ between zlib builds, so that digest is taken before compression.
"""

import json
import zlib
from typing import Any, NoReturn

MAX_DOCUMENT_BYTES = 256 * 1024 * 1024
MAX_STORED_DOCUMENT_BYTES = MAX_DOCUMENT_BYTES + MAX_DOCUMENT_BYTES // 1000
"""Compressed; zlib adds less than that to what it cannot make smaller."""
"""Uncompressed. 10,000 tensors over 256 ranks need about 100 MB; more is a mistake or an attack."""

MOST_GROWTH = 64
FREE_GROWTH_BYTES = 1024 * 1024
"""A document's text is at most that many times its stored bytes, and that much more: a few kilobytes in the store must
not become gigabytes in the process that reads them. Layouts grow by 6 to 14 times."""

_COMPRESSION_LEVEL = 6


class DocumentError(ValueError):
    """An index document cannot be read or written: broken, hostile, from a newer version, or too large."""


def canonical_bytes(value: Any) -> bytes:
    """The one JSON text of `value`. Raises DocumentError for what JSON cannot say (NaN, unknown types, cycles)."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (ValueError, TypeError, RecursionError) as error:
        raise DocumentError(f"this value has no canonical JSON form: {error}") from error


def compress(canonical: bytes, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """zlib, always at one level. Refuses what decompress would refuse: never write what cannot be read. Text that would
    shrink too much (a list of a million zeros) keeps its repetitions: without them zlib saves 8 times at most."""
    if len(canonical) > max_bytes:
        raise DocumentError(
            f"the index would be {len(canonical)} bytes, and at most {max_bytes} can be read back; "
            "keep large arrays in the state as torch tensors, which are stored in chunks of their own"
        )
    compressed = zlib.compress(canonical, _COMPRESSION_LEVEL)
    if len(canonical) <= _most_text(len(compressed)):
        return compressed
    stream = zlib.compressobj(_COMPRESSION_LEVEL, strategy=zlib.Z_HUFFMAN_ONLY)
    return stream.compress(canonical) + stream.flush()


def decompress(data: bytes | bytearray | memoryview, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """The inverse of compress, in bounded memory. Raises DocumentError on anything but one whole zlib stream."""
    stream = zlib.decompressobj()
    most = min(max_bytes, _most_text(memoryview(data).nbytes))
    try:
        plain = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise DocumentError(f"this is not a compressed index document: {error}") from error
    if len(plain) > most:
        raise DocumentError(f"this index document is larger than the {most} bytes that it may have")
    if not stream.eof or stream.unused_data:
        raise DocumentError("this index document is cut short or has bytes after its end")
    return plain


def _most_text(stored_bytes: int) -> int:
    return FREE_GROWTH_BYTES + MOST_GROWTH * stored_bytes


def parse(plain: bytes) -> Any:
    """JSON to Python. Raises DocumentError on any text that is not JSON, NaN tokens and endless nesting included."""
    try:
        return json.loads(plain, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"this index document is not valid JSON: {error}") from error


def _refuse_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")
