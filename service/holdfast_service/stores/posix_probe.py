"""What the filesystem under a posix store really does, found by trying.

What comes in through endpoints.py is hashed by the service, whatever the filesystem; of a file that was handed over
only the size is known, and head() then reports no checksum.
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime

from holdfast_service.stores.base import Capabilities, ObjectKey, Store, StoreRefused

PROBE_PROJECT = "probe"


def probe_posix(store: Store) -> Capabilities:
    """StoreRefused where two writes to one key do not leave the first (no real link())."""
    first, second = secrets.token_bytes(64), secrets.token_bytes(64)
    key = ObjectKey(PROBE_PROJECT, hashlib.sha256(first).hexdigest(), secrets.token_hex(16))
    try:
        facts = store.put_bytes(key, first)
        store.put_bytes(key, second)
        if b"".join(store.open_read(key)) != first:
            raise StoreRefused("the store's filesystem overwrites objects; use one with atomic hard links")
    finally:
        store.delete(key)
    return Capabilities(
        sha256_enforced=True,
        sha256_reported=facts.sha256 == key.digest,
        content_length_enforced=True,
        conditional_put=True,
        md5_enforced=False,
        range_get=True,
        versioned=False,
        probed_at=datetime.now(UTC),
        signature_enforced=True,  # by the service itself, which gives out its URLs
    )
