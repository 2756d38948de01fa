"""A checkpoint as the service reads it for itself: for a drill, or to compare values. As any reader it holds a lease,
hashes every chunk, and proves the documents up to the checkpoint's digest.

    sealed_shards -> take_lease -> read_verified, chunk by chunk -> proven_layout

A copy that is not what it should be becomes suspect: the controllers read it again, and repair it.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.codecs import Codec, DecodeError, decode
from holdfast_protocol.digests import DocumentError, NewerDocumentError, checkpoint_digest, shard_digest
from holdfast_protocol.index_documents import Layout, SavedAs, ShardIndex
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CopyState
from holdfast_protocol.text import printable
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import object_key
from holdfast_service.db.dialect import database_now
from holdfast_service.db.lease import ended
from holdfast_service.db.tables.core import Chunk, ChunkListEntry, Copy, ReadLease, Shard
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import ObjectKey, ObjectMismatch, ObjectMissing, Store


@dataclass(frozen=True)
class StoredChunk:
    """A chunk's copy in a store, by its row."""

    copy_id: int
    digest: str
    bytes: int
    key: ObjectKey
    codec: Codec
    stored_bytes: int

    @classmethod
    def of(cls, chunk: Chunk, copy: Copy) -> Self:
        key = object_key(copy.project_id, chunk.digest, copy)
        return cls(copy.id, chunk.digest, chunk.bytes, key, Codec(copy.codec), copy.stored_bytes)


@dataclass(frozen=True)
class SealedShard:
    """One rank's shard: the digests of its chunks, by ordinal."""

    rank: int
    digest: str
    chunks: list[str]
    index: str
    layout: str | None


def sealed_shards(session: Session, checkpoint_id: str) -> tuple[list[SealedShard], dict[str, int]]:
    """By rank; and the bytes of their chunks, by digest."""
    rows = session.execute(
        select(Shard, Chunk.digest, Chunk.bytes)
        .join(ChunkListEntry, ChunkListEntry.chunk_list_id == Shard.chunk_list_id)
        .join(Chunk, Chunk.id == ChunkListEntry.chunk_id)
        .where(Shard.checkpoint_id == checkpoint_id)
        .order_by(Shard.rank, ChunkListEntry.ordinal)
    )
    chunks: dict[int, tuple[Shard, list[str]]] = {}
    sizes: dict[str, int] = {}
    for shard, digest, size in rows:
        chunks.setdefault(shard.rank, (shard, []))[1].append(digest)
        sizes[digest] = size
    sealed = []
    for rank, (shard, digests) in sorted(chunks.items()):
        layout = None if shard.layout_ordinal is None else digests[shard.layout_ordinal]
        sealed.append(SealedShard(rank, shard.digest or "", digests, digests[shard.index_ordinal or 0], layout))
    return sealed, sizes


def take_lease(session: Session, context: ServiceContext, operation_id: str, checkpoint_id: str) -> str:
    """As any reader's (rule read-lease): nothing of it is purged meanwhile. The checkpoint's row must be locked."""
    now = database_now(session)
    lease = ReadLease(
        id=uuid.uuid4().hex,
        checkpoint_id=checkpoint_id,
        token_id=f"operation {operation_id}",
        created_at=now,
        expires_at=now + timedelta(seconds=context.settings.read_lease_seconds),
    )
    session.add(lease)
    session.flush()
    return lease.id


def renew_leases(context: ServiceContext, *lease_ids: str) -> None:
    with context.database.transaction() as session:
        expires_at = database_now(session) + timedelta(seconds=context.settings.read_lease_seconds)
        session.execute(update(ReadLease).where(ReadLease.id.in_(lease_ids)).values(expires_at=expires_at))


def end_leases(context: ServiceContext, *lease_ids: str) -> None:
    with context.database.transaction() as session:
        session.execute(delete(ReadLease).where(ReadLease.id.in_(lease_ids)))


class BadChunkError(Exception):
    def __init__(self, stored: StoredChunk, why: str) -> None:
        super().__init__(why)
        self.stored = stored


def read_verified(
    store: Store,
    stored: StoredChunk,
    on_block: Callable[[bytes | memoryview], object],
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Hands the chunk's bytes to `on_block`, one after the other, decoded as a reader would. They are proven only when
    this returns. Raises BadChunkError if they are not the chunk's, and StoreError. `on_bytes`: how many were read."""
    digest, size = hashlib.sha256(), 0

    def pieces() -> Iterator[bytes]:
        nonlocal size
        for piece in store.open_read(stored.key):
            size += len(piece)
            on_bytes(len(piece))
            yield piece

    incoming = pieces()
    raw, decoded = stored.codec is Codec.RAW, 0
    try:
        for block in incoming if raw else decode(stored.codec, stored.bytes, incoming):
            digest.update(block)
            decoded += len(block)
            if decoded <= stored.bytes:
                on_block(block)
        deque(incoming, maxlen=0)
    except ObjectMissing:
        raise BadChunkError(stored, "is not there") from None
    except (ObjectMismatch, DecodeError) as error:
        raise BadChunkError(stored, f"is not what was stored ({error})") from None
    if size != stored.stored_bytes or digest.hexdigest() != stored.digest:
        raise BadChunkError(stored, "has other bytes")


def suspect(context: ServiceContext, stored: StoredChunk) -> None:
    """Ends another process's lease: to give that back, the process would write what the copy was before."""
    with context.database.transaction() as session:
        session.execute(
            update(Copy)
            .where(Copy.id == stored.copy_id, Copy.state.in_((CopyState.VERIFIED, CopyState.COLD)))
            .values(state=CopyState.SUSPECT, **ended())
        )


_DOCUMENTS_AT_ONCE_BYTES = 16 * 1024 * 1024
_SHOWN = 300
"""Letters of a message: a hostile document may name anything."""


def proven_layout(
    shards: Sequence[SealedShard],
    sizes: Mapping[str, int],
    read: Callable[[Collection[str]], Mapping[str, bytes | bytearray]],
    digest: str | None,
    saved_as: SavedAs,
) -> Layout:
    """The hash tree and the index (rule index-names-its-save). `read` gives documents by their digests; it is asked for
    a few at a time, because those of all ranks may be more than a process has memory for. Raises ProblemError."""
    try:
        for shard in shards:
            if shard_digest(shard.chunks) != shard.digest:
                raise DocumentError(f"the chunk list of rank {shard.rank} does not make the shard's digest")
        if checkpoint_digest([shard.digest for shard in shards]) != digest:
            raise DocumentError("the shards do not make the checkpoint's digest")
        of_layout = next(shard.layout for shard in shards if shard.layout)
        layout = Layout.decode(read([of_layout])[of_layout])
        if layout.world_size != saved_as.world_size:
            raise DocumentError(f"its layout is of {layout.world_size} ranks, and {saved_as.world_size} saved it")
        for some in _portions(shards, sizes):
            documents = read([shard.index for shard in some])
            for shard in some:
                index = ShardIndex.decode(documents[shard.index])
                if (index.saved_as, index.rank, index.layout_digest) != (saved_as, shard.rank, layout.digest):
                    raise DocumentError(f"what rank {shard.rank} sealed is rank {index.rank} of {index.saved_as}")
                chunks = [sizes[each] for each in shard.chunks]
                if chunks[: len(layout.shards[shard.rank].chunks)] != list(layout.shards[shard.rank].chunks):
                    raise DocumentError(f"the chunks of rank {shard.rank} have other sizes than the layout says")
    except NewerDocumentError as error:
        raise ProblemError(
            ProblemCode.UNSUPPORTED_PROTOCOL,
            f"A newer holdfast saved step {saved_as.step}: {error}. It is not damaged: update the service.",
        ) from error
    except (DocumentError, StopIteration, KeyError, IndexError) as error:
        raise ProblemError(
            ProblemCode.CHUNK_GONE,
            f"Every chunk of step {saved_as.step} has its digest, and still it cannot be put together: "
            f"{printable(str(error)[:_SHOWN])}. Keep the checkpoint and report this.",
        ) from error
    return layout


def _portions(shards: Sequence[SealedShard], sizes: Mapping[str, int]) -> Iterator[list[SealedShard]]:
    """Shards whose indexes have no more bytes together, or one whose index has more."""
    some: list[SealedShard] = []
    total = 0
    for shard in shards:
        total += sizes[shard.index]
        if some and total > _DOCUMENTS_AT_ONCE_BYTES:
            yield some
            some, total = [], sizes[shard.index]
        some.append(shard)
    yield some
