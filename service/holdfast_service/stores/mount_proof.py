"""Who sees the same mount: a client proves it by the content of a file that the service has just written there.

A nonce, not an id file: an id would be copied along with a snapshot of the store and prove nothing (rule 18). The
file itself is the record, so any process of the service can check what another one offered.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path

from holdfast_service.stores.posix_files import Access, new_file, opened_folder, read_whole, store_errors

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
