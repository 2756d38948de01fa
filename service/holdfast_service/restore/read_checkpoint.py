"""A checkpoint as a restore reads it: its manifest, the chunks of each shard, and tickets to read these, each for the
best copy, under a lease that keeps the checkpoint."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, exists, func, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.base import PROTOCOL_MAJOR, PROTOCOL_VERSION
from holdfast_protocol.checkpoints import ChunkRef, Manifest, ShardChunks, ShardView
from holdfast_protocol.codecs import Codec, codecs_of_minor
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.restores import ChunkReads, ReadChunks, ReadTicket
from holdfast_protocol.states import CopyState, ShardState, StoreRole
from holdfast_service.attached_stores.attached import AttachedStore, ask_stores
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext, waiting_for_store
from holdfast_service.copies.cold import cold_problem
from holdfast_service.copies.predicates import PROVEN, is_readable, may_keep, object_key
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Chunk, ChunkListEntry, Copy, ReadLease, Shard
from holdfast_service.errors import ProblemError
from holdfast_service.runs.views import checkpoint_by_id, current_checkpoint_view, refuse_unless_whole
from holdfast_service.stores.base import MountedStore, StoreError, make_tickets

# What a committed checkpoint consists of: its shards, and the chunks of one shard in their order.


_READS_FORKS = 10


def read_manifest(context: ServiceContext, caller: Principal, checkpoint_id: str, protocol_minor: int) -> Manifest:
    """Raises `checkpoint_not_found`, what refuse_unless_whole raises, and `unsupported_protocol` for a fork's
    checkpoint, which an older client would take for another run's."""
    with context.database.read() as session:
        project, run, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
        refuse_unless_whole(checkpoint)
        if checkpoint.forked_from is not None and protocol_minor < _READS_FORKS:
            raise _too_old(protocol_minor, "is a fork of another run's")
        return Manifest(
            checkpoint=current_checkpoint_view(session, project.name, run.name, checkpoint),
            layout_digest=_layout_digest(session, checkpoint),
            shards=_shard_views(session, checkpoint),
        )


def read_shard_chunks(context: ServiceContext, caller: Principal, checkpoint_id: str, rank: int) -> ShardChunks:
    """Raises `checkpoint_not_found`, `invalid_request` for a rank beyond the world, and as read_manifest."""
    with context.database.read() as session:
        _, _, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
        refuse_unless_whole(checkpoint)
        return _shard_chunks(session, checkpoint, rank)


def _shard_chunks(session: Session, checkpoint: Checkpoint, rank: int) -> ShardChunks:
    shard = session.scalar(select(Shard).where(Shard.checkpoint_id == checkpoint.id, Shard.rank == rank))
    if shard is None:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"There is no rank {rank} in a world of {checkpoint.world_size}. Correct the rank.",
            rank=rank,
            world_size=checkpoint.world_size,
        )
    rows = session.execute(
        select(Chunk.digest, Chunk.bytes)
        .join(ChunkListEntry, ChunkListEntry.chunk_id == Chunk.id)
        .where(ChunkListEntry.chunk_list_id == shard.chunk_list_id)
        .order_by(ChunkListEntry.ordinal)
    )
    chunks = [ChunkRef(digest=digest, bytes=size) for digest, size in rows]
    assert shard.digest is not None  # sealed, since the checkpoint is whole
    return ShardChunks(rank=rank, digest=shard.digest, chunks=chunks)


def _layout_digest(session: Session, checkpoint: Checkpoint) -> str:
    """The layout is a chunk of the first rank that has one: rank 0's."""
    return session.execute(
        select(Chunk.digest)
        .join(ChunkListEntry, ChunkListEntry.chunk_id == Chunk.id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .where(Shard.checkpoint_id == checkpoint.id, ChunkListEntry.ordinal == Shard.layout_ordinal)
        .order_by(Shard.rank)
        .limit(1)
    ).scalar_one()


def _shard_views(session: Session, checkpoint: Checkpoint) -> list[ShardView]:
    of_checkpoint = select(Shard.chunk_list_id).where(Shard.checkpoint_id == checkpoint.id)
    counts = (
        select(ChunkListEntry.chunk_list_id, func.count())
        .where(ChunkListEntry.chunk_list_id.in_(of_checkpoint))
        .group_by(ChunkListEntry.chunk_list_id)
    )
    chunk_counts = dict(session.execute(counts).all())
    rows = session.execute(
        select(Shard, Chunk.digest)
        .join(
            ChunkListEntry,
            (ChunkListEntry.chunk_list_id == Shard.chunk_list_id) & (ChunkListEntry.ordinal == Shard.index_ordinal),
        )
        .join(Chunk, Chunk.id == ChunkListEntry.chunk_id)
        .where(Shard.checkpoint_id == checkpoint.id)
        .order_by(Shard.rank)
    )
    return [
        ShardView(
            rank=shard.rank,
            state=ShardState(shard.state),
            digest=shard.digest,
            chunk_count=0 if shard.chunk_list_id is None else chunk_counts.get(shard.chunk_list_id, 0),
            index_digest=index_digest,
            **dict(shard.summary),
        )
        for shard, index_digest in rows
    ]


# The chunks of a checkpoint: which copy a reader is sent to, by which ticket, under which lease.

_SHOWN_DIGESTS = 20


def chunks_of_checkpoint(
    session: Session, project_id: str, checkpoint: Checkpoint, digests: Sequence[str]
) -> dict[str, Chunk]:
    """By digest, only chunks of this checkpoint. Raises `chunk_not_found` for one that does not belong to the
    checkpoint: no existence oracle."""
    used = (
        exists()
        .where(ChunkListEntry.chunk_id == Chunk.id)
        .where(ChunkListEntry.chunk_list_id == Shard.chunk_list_id)
        .where(Shard.checkpoint_id == checkpoint.id)
    )
    rows = session.scalars(select(Chunk).where(Chunk.project_id == project_id, Chunk.digest.in_(digests), used))
    chunks = {chunk.digest: chunk for chunk in rows}
    unknown = [digest for digest in digests if digest not in chunks]
    if unknown:
        raise ProblemError(
            ProblemCode.CHUNK_NOT_FOUND,
            f"The checkpoint {checkpoint.id} has no chunk {unknown[0]}. Read its shards for those that it has.",
            digests=unknown[:_SHOWN_DIGESTS],
            count=len(unknown),
        )
    return chunks


_Rank = tuple[bool, bool, bool, bool, int]


@dataclass(frozen=True)
class ChosenCopy:
    """`elsewhere`: another store that may answer has the chunk too."""

    copy: Copy
    attached: AttachedStore
    elsewhere: bool


def choose_copies(
    session: Session,
    context: ServiceContext,
    checkpoint: Checkpoint,
    chunks: Sequence[Chunk],
    *,
    avoid: Collection[StoreRole],
    now: datetime,
    protocol_minor: int,
) -> dict[int, ChosenCopy]:
    """Which copy of each chunk a reader is sent to, of all that can be read `now`, in any attached store; by chunk id.
    First what lies in a store that the reader does not avoid and that answers; then verified before suspect, proven
    before unproven, and the primary store before the others. No I/O: what is known of the stores must be fresh.

    A reader checks every byte: a suspect copy does no harm, while a wrong report must not stop a restore. Raises
    `unsupported_protocol` if the client could decode no copy of a chunk, and `checkpoint_cold` if one must be thawed
    first.
    """
    stores = {attached.store_id: (place, attached) for place, attached in enumerate(context.stores)}
    until = now + timedelta(seconds=context.settings.ticket_seconds)
    rows = session.scalars(
        select(Copy)
        .where(
            Copy.chunk_id.in_([chunk.id for chunk in chunks]),
            is_readable(context.store_ids, checkpoint.attempt_id, until=until),
        )
        .order_by(Copy.id)
    )
    encoded: set[int] = set()
    found: dict[int, list[tuple[_Rank, Copy]]] = {}
    for copy in rows:
        if copy.codec != Codec.RAW and Codec(copy.codec) not in codecs_of_minor(protocol_minor):
            encoded.add(copy.chunk_id)
            continue
        place, attached = stores[copy.store_id]
        rank = (
            attached.role not in avoid,
            not attached.watch.unavailable,
            copy.state != CopyState.SUSPECT,
            copy.proof in PROVEN,
            -place,
        )
        found.setdefault(copy.chunk_id, []).append((rank, copy))
    if encoded - found.keys():
        raise _too_old(protocol_minor, "was saved with compression")
    _refuse_cold(session, context, checkpoint, {chunk.id for chunk in chunks} - found.keys())
    return {chunk_id: _best(ranked, stores) for chunk_id, ranked in found.items()}


def _refuse_cold(session: Session, context: ServiceContext, checkpoint: Checkpoint, chunk_ids: set[int]) -> None:
    """What is there and cannot be read now is not gone: no other restore point has to be taken for ever."""
    cold = select(Copy.id).where(
        Copy.chunk_id.in_(chunk_ids), Copy.store_id.in_(context.store_ids), may_keep(checkpoint.attempt_id)
    )
    if chunk_ids and session.scalar(cold.limit(1)) is not None:
        raise cold_problem(session, checkpoint)


def _best(ranked: list[tuple[_Rank, Copy]], stores: dict[int, tuple[int, AttachedStore]]) -> ChosenCopy:
    best = max(ranked, key=lambda each: each[0])[1]
    elsewhere = any(rank[0] and rank[1] and copy.store_id != best.store_id for rank, copy in ranked)
    return ChosenCopy(best, stores[best.store_id][1], elsewhere)


def _too_old(protocol_minor: int, why: str) -> ProblemError:
    theirs = f"{PROTOCOL_MAJOR}.{protocol_minor}"
    return ProblemError(
        ProblemCode.UNSUPPORTED_PROTOCOL,
        f"This checkpoint {why}, which the client's protocol {theirs} does not know and this "
        f"service's {PROTOCOL_VERSION} does. Install a client of the service's version to read it.",
        client=theirs,
        service=PROTOCOL_VERSION,
    )


def read_tickets(
    context: ServiceContext,
    project_id: str,
    request: ReadChunks,
    chunks: dict[str, Chunk],
    chosen: dict[int, ChosenCopy],
) -> list[ReadTicket]:
    """One for each digest of the request, in their order: a signed URL, or a path if the reader sees the store's own
    mount; `gone` for a chunk without a copy that can be read. No transaction is open."""
    tickets: dict[str, ReadTicket] = {}
    by_store: dict[int, list[tuple[Chunk, ChosenCopy]]] = defaultdict(list)
    for digest in dict.fromkeys(request.digests):
        chunk = chunks[digest]
        if chunk.id in chosen:
            by_store[chosen[chunk.id].attached.store_id].append((chunk, chosen[chunk.id]))
        else:
            tickets[digest] = ReadTicket(
                digest=digest, bytes=chunk.bytes, stored_bytes=0, kind="gone", expires_in_seconds=0
            )
    for wanted in by_store.values():
        for ticket in _of_one_store(context, project_id, request, wanted):
            tickets[ticket.digest] = ticket
    return [tickets[digest] for digest in request.digests]


def _of_one_store(
    context: ServiceContext, project_id: str, request: ReadChunks, wanted: Sequence[tuple[Chunk, ChosenCopy]]
) -> list[ReadTicket]:
    attached = wanted[0][1].attached
    store = attached.store
    seconds = context.settings.ticket_seconds
    mounted = store if isinstance(store, MountedStore) and _sees_mount(store, attached, request) else None

    def ticket(each: tuple[Chunk, ChosenCopy]) -> ReadTicket:
        chunk, chosen = each
        key = object_key(project_id, chunk.digest, chosen.copy)
        known = ReadTicket(
            digest=chunk.digest,
            bytes=chunk.bytes,
            stored_bytes=chosen.copy.stored_bytes,
            codec=Codec(chosen.copy.codec),
            kind="file",
            expires_in_seconds=seconds,
            store=attached.role,
            elsewhere=chosen.elsewhere,
        )
        if mounted is not None:
            return known.model_copy(update={"path": str(mounted.object_path(key))})
        get = store.presign_get(key, expires_in_seconds=seconds)
        signed = {
            "kind": "http",
            "url": get.url,
            "headers": get.headers,
            "expires_in_seconds": get.expires_in_seconds,
            "answers": get.answers,
        }
        return known.model_copy(update=signed)

    return make_tickets(store, ticket, wanted)


def _sees_mount(store: MountedStore, attached: AttachedStore, request: ReadChunks) -> bool:
    """A proof that is wrong, or cannot be looked at now, only means URLs."""
    if attached.watch.unavailable:
        return False
    proofs = [request.mount_proof] if request.mount_proof is not None else []
    with suppress(StoreError):
        return any(
            store.check_mount_proof(proof.proof_id, proof.content) for proof in (*proofs, *request.other_mount_proofs)
        )
    return False


_WHAT_IT_COSTS = (
    "So no lease keeps this checkpoint while it is read: if another service can still write the catalog, it may purge "
    "it meanwhile, and reading then fails. Every byte is verified all the same."
)


def read_chunks(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: ReadChunks, protocol_minor: int
) -> ChunkReads:
    """Tickets to read a checkpoint's chunks, one for each digest, in their order, under a lease that keeps the
    checkpoint from being purged meanwhile (rule read-lease); `gone` for a chunk that has no copy to read.

    If the catalog cannot be written (a standby that was not promoted, a full disk) there is no lease, and the reply
    says what that may cost (docs/adr/0045).

    Raises `checkpoint_not_found`, `chunk_not_found`, `invalid_request` for a shard that is not there, what
    refuse_unless_whole raises, and `unsupported_protocol` for a client of an older minor version that could decode no
    copy of a chunk.
    """
    _note_silent_stores(context, request)
    lease_seconds = context.settings.ticket_seconds + context.settings.read_lease_seconds
    try:
        with context.database.transaction() as session:
            reading = _Reading.of(
                session, context, caller, checkpoint_id, request, protocol_minor=protocol_minor, locked=True
            )
            lease_id = _take_lease(
                session, caller, checkpoint_id, request.lease_id, now=reading.now, seconds=lease_seconds
            )
        unprotected = None
    except ProblemError as error:
        if error.code is not ProblemCode.CATALOG_READ_ONLY:
            raise
        with context.database.read() as session:
            reading = _Reading.of(
                session, context, caller, checkpoint_id, request, protocol_minor=protocol_minor, locked=False
            )
        lease_id, unprotected = uuid.uuid4().hex, f"{error.detail} {_WHAT_IT_COSTS}"
    return ChunkReads(
        lease_id=lease_id,
        lease_expires_in_seconds=lease_seconds,
        unprotected=unprotected,
        chunks=read_tickets(context, reading.project_id, request, reading.chunks, reading.chosen),
        shard=reading.shard,
    )


@dataclass(frozen=True)
class _Reading:
    """`now`: the database's clock behind the checkpoint's lock."""

    project_id: str
    now: datetime
    chunks: dict[str, Chunk]
    chosen: dict[int, ChosenCopy]
    shard: ShardChunks | None

    @classmethod
    def of(
        cls,
        session: Session,
        context: ServiceContext,
        caller: Principal,
        checkpoint_id: str,
        request: ReadChunks,
        *,
        protocol_minor: int,
        locked: bool,
    ) -> _Reading:
        project, _, _ = checkpoint_by_id(session, caller, checkpoint_id)
        query = select(Checkpoint).where(Checkpoint.id == checkpoint_id)
        if locked:
            # FOR KEY SHARE: a purge takes the row FOR UPDATE, and afterwards either sees the lease or is seen.
            query = query.with_for_update(read=True, key_share=True)
        checkpoint = session.execute(query, execution_options={"populate_existing": True}).scalar_one()
        refuse_unless_whole(checkpoint)
        now = database_now(session)
        chunks = chunks_of_checkpoint(session, project.id, checkpoint, request.digests)
        chosen = choose_copies(
            session,
            context,
            checkpoint,
            list(chunks.values()),
            avoid=request.avoid_stores,
            now=now,
            protocol_minor=protocol_minor,
        )
        shard = None if request.shard is None else _shard_chunks(session, checkpoint, request.shard)
        return cls(project.id, now, chunks, chosen, shard)


def _note_silent_stores(context: ServiceContext, request: ReadChunks) -> None:
    """What a reader gets no answer from is asked again by the service, and else what is not known for certain."""
    for attached in context.stores:
        if attached.role in request.avoid_stores:
            attached.watch.doubt()
    with waiting_for_store():
        ask_stores(context)


def _take_lease(
    session: Session, caller: Principal, checkpoint_id: str, lease_id: str | None, *, now: datetime, seconds: int
) -> str:
    """Renews the caller's lease, or opens one: an unknown or expired lease is no reason to refuse a reader."""
    expires_at = now + timedelta(seconds=seconds)
    if lease_id is not None:
        renewed = session.scalar(
            update(ReadLease)
            .where(
                ReadLease.id == lease_id,
                ReadLease.checkpoint_id == checkpoint_id,
                ReadLease.token_id == caller.token_id,
            )
            .values(expires_at=expires_at)
            .returning(ReadLease.id)
        )
        if renewed is not None:
            return lease_id
    session.execute(delete(ReadLease).where(ReadLease.checkpoint_id == checkpoint_id, ReadLease.expires_at <= now))
    lease = ReadLease(
        id=uuid.uuid4().hex,
        checkpoint_id=checkpoint_id,
        token_id=caller.token_id,
        created_at=now,
        expires_at=expires_at,
    )
    session.add(lease)
    session.flush()
    return lease.id


def release_lease(context: ServiceContext, caller: Principal, lease_id: str) -> None:
    """Ends a read lease before its time. Its absence is fine: it may have run out. Only the caller's own; another's
    stays, and nothing tells whether there is one."""
    try:
        with context.database.transaction() as session:
            session.execute(delete(ReadLease).where(ReadLease.id == lease_id, ReadLease.token_id == caller.token_id))
    except ProblemError as error:
        # None could be taken either; one from before runs out.
        if error.code is not ProblemCode.CATALOG_READ_ONLY:
            raise
