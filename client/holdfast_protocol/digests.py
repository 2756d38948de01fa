"""The hash tree: bytes -> chunk -> shard -> checkpoint. Pure; used by the SDK, the client and the service alike.

Flow: the SDK hashes each staged chunk, the seal carries the shard's digest, the commit computes the checkpoint's.
Each level has its own first line, so that a list of chunks can never pass for a list of shards (or for a chunk).
All digests are 64 lower-case hex digits of SHA-256.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence

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
    Raises ValueError when an entry is not a digest: a stray newline could otherwise forge another list.
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
