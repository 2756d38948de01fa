"""What the filesystem under a posix store really does, and who else sees it."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from holdfast_service.stores.base import Capabilities, ObjectKey, Store, StoreRefused
from holdfast_service.stores.posix.files import Access, new_file, opened_folder, read_whole, store_errors

# Who sees the same mount: a client proves it by the content of a file that the service has just written there.
#
# A nonce, not an id file: an id would be copied along with a snapshot of the store and prove nothing (rule drop-box).
# The file itself is the record, so any process of the service can check what another one offered.

PROOFS = "proofs"
_PROOF_ID = re.compile(r"[0-9a-f]{32}")


def new_mount_proof(root: Path, expires_in_seconds: int, access: Access) -> tuple[str, Path]:
    """The id (32 hex digits, the first 8 of them say when it expires) and the path of a fresh secret."""
    proof_id = f"{int(time.time()) + expires_in_seconds:08x}{secrets.token_hex(12)}"
    with store_errors(root), opened_folder(root, PROOFS) as folder:
        with os.fdopen(new_file(folder, proof_id, access), "w") as file:
            file.write(secrets.token_hex(32))
    return proof_id, root / PROOFS / proof_id


def check_mount_proof(root: Path, proof_id: str, content: str) -> bool:
    """Whether `content` is what that file holds, and it has not expired."""
    if not _PROOF_ID.fullmatch(proof_id) or time.time() >= int(proof_id[:8], 16):
        return False
    with store_errors(root):
        try:
            written = read_whole(root, f"{PROOFS}/{proof_id}")
        except FileNotFoundError:
            return False
    return hmac.compare_digest(written, content.encode())


def sweep_mount_proofs(root: Path) -> int:
    """Removes the expired ones; how many."""
    removed = 0
    with store_errors(root), opened_folder(root, PROOFS) as folder, os.scandir(folder) as entries:
        for entry in entries:
            if _PROOF_ID.fullmatch(entry.name) and time.time() >= int(entry.name[:8], 16):
                with suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=folder)
                    removed += 1
    return removed


# What the filesystem under a posix store really does, found by trying.
#
# What comes in through endpoints.py is hashed by the service, whatever the filesystem; of a file that was handed over
# only the size is known, and head() then reports no checksum.

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
