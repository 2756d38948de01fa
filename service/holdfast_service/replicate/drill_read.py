"""Reads every chunk of a drill's checkpoint from its store: decoded as a reader would, and hashed."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from sqlalchemy import update

from holdfast_protocol.codecs import Codec
from holdfast_protocol.decoding import DecodeError, decode
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CopyState
from holdfast_service.attached_store import AttachedStore
from holdfast_service.catalog.operation_run import OperationRun
from holdfast_service.catalog.tables import Copy
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.replicate.drill_plan import DrillPlan, StoredChunk, renew_lease
from holdfast_service.stores.base import ObjectMismatch, ObjectMissing, Store

_THREADS = 4
_RENEW_EVERY_SECONDS = 60


class BadChunkError(Exception):
    def __init__(self, stored: StoredChunk, why: str) -> None:
        super().__init__(why)
        self.stored = stored


def read_all(context: ServiceContext, attached: AttachedStore, plan: DrillPlan, run: OperationRun) -> dict[str, bytes]:
    """Every chunk; gives the index documents back."""
    documents = {shard.index for shard in plan.shards} | {shard.layout for shard in plan.shards if shard.layout}
    kept: dict[str, bytes] = {}
    done, renewed_at = 0, time.monotonic()
    total = sum(stored.bytes for stored in plan.copies.values())
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="holdfast-drill")
    try:
        reading = {
            threads.submit(_read, attached.store, stored, stored.digest in documents): stored
            for stored in plan.copies.values()
        }
        for future in as_completed(reading):
            stored = reading[future]
            kept[stored.digest] = future.result()
            done += stored.bytes
            if time.monotonic() - renewed_at > _RENEW_EVERY_SECONDS:
                renew_lease(context, plan.lease_id)
                renewed_at = time.monotonic()
            run.progress(done=done, total=total, note=f"reads step {plan.point.step}")
    except BadChunkError as error:
        _suspect(context, error.stored)
        raise ProblemError(
            ProblemCode.CHUNK_GONE,
            f"The {attached.role.value} store alone does not give back step {plan.point.step} of {plan.project}/"
            f"{plan.run}: its chunk {error.stored.digest[:12]} {error}. It is read again and healed; drill once more "
            "then.",
        ) from error
    finally:
        threads.shutdown(wait=True, cancel_futures=True)
    return {digest: data for digest, data in kept.items() if digest in documents}


def _read(store: Store, stored: StoredChunk, keep: bool) -> bytes:
    digest, size, data = hashlib.sha256(), 0, bytearray()

    def pieces() -> Iterator[bytes]:
        nonlocal size
        for piece in store.open_read(stored.key):
            size += len(piece)
            yield piece

    incoming = pieces()
    raw = stored.codec is Codec.RAW
    try:
        for block in incoming if raw else decode(stored.codec, stored.bytes, incoming):
            digest.update(block)
            if keep:
                data += block
        deque(incoming, maxlen=0)
    except ObjectMissing:
        raise BadChunkError(stored, "is not there") from None
    except (ObjectMismatch, DecodeError) as error:
        raise BadChunkError(stored, f"is not what was stored ({error})") from None
    if size != stored.stored_bytes or digest.hexdigest() != stored.digest:
        raise BadChunkError(stored, "has other bytes")
    return bytes(data)


def _suspect(context: ServiceContext, stored: StoredChunk) -> None:
    with context.database.transaction() as session:
        session.execute(
            update(Copy)
            .where(Copy.id == stored.copy_id, Copy.state == CopyState.VERIFIED)
            .values(state=CopyState.SUSPECT)
        )
