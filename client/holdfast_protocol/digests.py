"""The hash tree: bytes -> chunk -> shard -> checkpoint, and the canonical JSON that documents are hashed in. Pure; used
by the SDK, the client and the service alike.

The SDK hashes each staged chunk, the seal carries the shard's digest, the commit computes the checkpoint's. Each level
has its own first line, so that a list of chunks can never pass for a list of shards (or for a chunk). All digests are
64 lower-case hex digits of SHA-256.

Canonical JSON: keys sorted, no spaces, ASCII only, no NaN or Infinity tokens. One value has one sequence of bytes, so
its SHA-256 names the value. The digest is taken before compression, because zlib's output differs between builds.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

MAX_DOCUMENT_BYTES = 256 * 1024 * 1024
"""Uncompressed. 10,000 tensors over 256 ranks need about 100 MB; more is a mistake or an attack."""
MAX_STORED_DOCUMENT_BYTES = MAX_DOCUMENT_BYTES + MAX_DOCUMENT_BYTES // 1000
"""Compressed; zlib adds at most this to incompressible text."""

MOST_GROWTH = 64
FREE_GROWTH_BYTES = 1024 * 1024
"""A document's text is at most so many times its stored bytes, plus so many more: a few kilobytes in the store must not
become gigabytes in a reader. Layouts grow by 6 to 14 times."""

_COMPRESSION_LEVEL = 6


class DocumentError(ValueError):
    """An index document cannot be read or written: broken, hostile, from a newer version, or too large."""


class NewerDocumentError(DocumentError):
    """A newer version of Holdfast has written it. What this one does not know must not be taken for damage."""


def canonical_bytes(value: Any) -> bytes:
    """The one JSON text of `value`. Raises DocumentError for a value without JSON (NaN, unknown types, cycles)."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (ValueError, TypeError, RecursionError) as error:
        raise DocumentError(f"this value has no canonical JSON form: {error}") from error


def compress(canonical: bytes, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """zlib, always at one level. Refuses text that decompress would refuse, because it could not be read. Text that
    would shrink too much (a list of a million zeros) keeps its repetitions: without them zlib saves 8 times at most."""
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
    """The inverse of compress, in bounded memory. Raises DocumentError on any input but one whole zlib stream."""
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


DIGEST_PATTERN = r"^[0-9a-f]{64}\Z"

_DIGEST = re.compile(DIGEST_PATTERN)
_SHARD_DOMAIN = b"holdfast-shard-1\n"
_CHECKPOINT_DOMAIN = b"holdfast-checkpoint-1\n"


def chunk_digest(data: bytes | bytearray | memoryview) -> str:
    """SHA-256 of a chunk's bytes. Takes any C-contiguous buffer without a copy; releases the GIL."""
    return hashlib.sha256(data).hexdigest()


def shard_digest(chunk_digests: Sequence[str]) -> str:
    """SHA-256 over the domain line and one line per chunk, in the order in which the seal lists the chunks.

    The index is a chunk too: list it, so that the tree covers it. An empty list has a digest as well.
    Raises ValueError if an entry is not a digest, because a stray newline could forge another list.
    """
    return _digest_of_list(_SHARD_DOMAIN, chunk_digests)


def checkpoint_digest(shard_digests: Sequence[str]) -> str:
    """SHA-256 over the domain line and one line per shard, in rank order. Raises ValueError as shard_digest does."""
    return _digest_of_list(_CHECKPOINT_DOMAIN, shard_digests)


def _digest_of_list(domain: bytes, digests: Iterable[str]) -> str:
    tree = hashlib.sha256(domain)
    for position, digest in enumerate(digests):
        if not _DIGEST.match(digest):
            raise ValueError(f"entry {position} is not a SHA-256 digest (64 lower-case hex digits): {digest[:80]!r}")
        tree.update(digest.encode("ascii") + b"\n")
    return tree.hexdigest()
