"""A client that gives a chunk a size that is not its own, on a store that compares nothing."""

from __future__ import annotations

from typing import Any

from sqlalchemy import update

from holdfast_service.db.tables.core import Copy
from tests.support.rank import Job, Save, digest_of
from tests.support.service import RunningService


def offer_with(save: Save, data: bytes, size: int, rank: int = 0) -> Any:
    """Of `data`, with a size that is not its own."""
    chunk = {"digest": digest_of(data), "bytes": size, "md5": "0" * 32}
    return save.job.call("POST", f"/v1/checkpoints/{save.id}/shards/{rank}/chunks", chunks=[chunk])


def save_with_wrong_size(service: RunningService, run: str, data: bytes, size: int) -> Save:
    """Sealed on a store that compares nothing, as one chunk and its index."""
    liar = Job(service.http(), run).begin(1)
    offer_with(liar, data, size)
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.stored_bytes == size).values(state="verified", proof="unproven"))
    liar.upload(0, [b"index " + data])
    liar.seal(0, [data, b"index " + data], logical_bytes=size + len(b"index " + data))
    return liar
