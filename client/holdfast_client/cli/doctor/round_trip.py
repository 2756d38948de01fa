"""Sends a sample to the store and reads it back, over the same wire as a training job's chunks, and takes it away.

offer -> upload -> the service asks the store -> fetch, compare -> delete
"""

from __future__ import annotations

import hashlib
import os

from holdfast_client.chunks.download import get_chunk
from holdfast_client.chunks.upload import put_chunk
from holdfast_client.client import Client
from holdfast_client.errors import IntegrityError
from holdfast_protocol.samples import MakeSample

SIZE_BYTES = 64 * 1024


def round_trip(client: Client) -> str:
    """What was done, for people. Raises HoldfastError where it fails."""
    body = os.urandom(SIZE_BYTES)
    digest = hashlib.sha256(body).hexdigest()
    md5 = hashlib.md5(body, usedforsecurity=False).hexdigest() if client.store_asks_md5() else None
    offer = client.make_sample(MakeSample(digest=digest, bytes=SIZE_BYTES, md5=md5))
    try:
        put_chunk(offer.ticket, memoryview(body), client.transfers)
        checked = client.check_sample(offer.id)
        if get_chunk(checked.ticket, None, digest, SIZE_BYTES, client.transfers) != body:
            raise IntegrityError("What was read back is not what was saved")
    finally:
        client.delete_sample(offer.id)
    by_store = "which the store has hashed too" if checked.hashed_by_store else "which the store has not hashed"
    mount = "; this machine sees the store's mount, and reads and writes there" if client.mount.proof() else ""
    return f"{SIZE_BYTES // 1024} KiB went to the store and back, {by_store}{mount}"
