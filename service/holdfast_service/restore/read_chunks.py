"""Tickets to read a checkpoint's chunks, under a lease that keeps it from being purged meanwhile (protocol rule 21)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.chunks import MountProof
from holdfast_protocol.codecs import Codec, codecs_of_minor
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.restore import ChunkReads, ReadChunks, ReadTicket
from holdfast_protocol.states import CopyState
from holdfast_protocol.version import PROTOCOL_MAJOR, PROTOCOL_VERSION
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.copies import PROVEN, object_key
from holdfast_service.catalog.readable import refuse_unless_whole
from holdfast_service.catalog.resolve import checkpoint_by_id
from holdfast_service.catalog.tables import Checkpoint, Chunk, Copy, ReadLease
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.restore.chunks_of_checkpoint import chunks_of_checkpoint
from holdfast_service.stores.base import MountedStore
from holdfast_service.stores.make_tickets import make_tickets


def read_chunks(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: ReadChunks, protocol_minor: int
) -> ChunkReads:
    """One ticket for each digest, in their order; `gone` for a chunk that has no copy to read.

    Raises `checkpoint_not_found`, `chunk_not_found`, what refuse_unless_whole raises, and `unsupported_protocol` for a
    client of an older minor version where it could decode no copy of a chunk.
    """
    lease_seconds = context.settings.ticket_seconds + context.settings.read_lease_seconds
    with context.database.transaction() as session:
        project, _, _ = checkpoint_by_id(session, caller, checkpoint_id)
        # FOR KEY SHARE: whoever purges takes the row FOR UPDATE, and afterwards either sees this lease or is seen here.
        checkpoint = session.execute(
            select(Checkpoint).where(Checkpoint.id == checkpoint_id).with_for_update(read=True, key_share=True),
            execution_options={"populate_existing": True},
        ).scalar_one()
        refuse_unless_whole(checkpoint)
        chunks = chunks_of_checkpoint(session, project.id, checkpoint, request.digests)
        lease_id = _take_lease(session, caller, checkpoint_id, request.lease_id, lease_seconds)
        copies = _copies(session, context, checkpoint, list(chunks.values()), protocol_minor)
    office = _ReadingOffice(context, project.id, request.mount_proof)
    tickets = make_tickets(
        context.store, lambda digest: office.ticket(chunks[digest], copies.get(chunks[digest].id)), request.digests
    )
    return ChunkReads(lease_id=lease_id, lease_expires_in_seconds=lease_seconds, chunks=tickets)


def _take_lease(session: Session, caller: Principal, checkpoint_id: str, lease_id: str | None, seconds: int) -> str:
    """Renews the caller's lease, or opens one: an unknown or expired lease is no reason to refuse a reader."""
    now = database_now(session)
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


def _copies(
    session: Session, context: ServiceContext, checkpoint: Checkpoint, chunks: Sequence[Chunk], protocol_minor: int
) -> dict[int, Copy]:
    """By chunk id, the best copy: proven before unproven, and a suspect one only where nothing else is left.

    A reader checks every byte, so a suspect copy does no harm, while a wrong report must not stop a restore.
    """
    decodable = codecs_of_minor(protocol_minor)
    encoded: set[int] = set()
    rows = session.scalars(
        select(Copy)
        .where(
            Copy.chunk_id.in_([chunk.id for chunk in chunks]),
            Copy.store_id == context.store_id,
            Copy.state.in_((CopyState.VERIFIED, CopyState.SUSPECT)),
        )
        .order_by(Copy.id)
    )
    best: dict[int, tuple[tuple[bool, bool], Copy]] = {}
    for copy in rows:
        if copy.proof not in PROVEN and copy.attempt_id != checkpoint.attempt_id:
            continue
        if Codec(copy.codec) not in decodable:
            encoded.add(copy.chunk_id)
            continue
        rank = (copy.state == CopyState.VERIFIED, copy.proof in PROVEN)
        if copy.chunk_id not in best or rank > best[copy.chunk_id][0]:
            best[copy.chunk_id] = (rank, copy)
    if encoded - best.keys():
        raise _too_old(protocol_minor)
    return {chunk_id: copy for chunk_id, (_, copy) in best.items()}


def _too_old(protocol_minor: int) -> ProblemError:
    theirs = f"{PROTOCOL_MAJOR}.{protocol_minor}"
    return ProblemError(
        ProblemCode.UNSUPPORTED_PROTOCOL,
        f"This checkpoint was saved with compression, which the client's protocol {theirs} does not know and this "
        f"service's {PROTOCOL_VERSION} does. Install a client of the service's version to read it.",
        client=theirs,
        service=PROTOCOL_VERSION,
    )


class _ReadingOffice:
    """Makes the tickets of one call. `mount_proof` is checked once; a wrong one only means URLs."""

    def __init__(self, context: ServiceContext, project_id: str, mount_proof: MountProof | None) -> None:
        self._store = context.store
        self._seconds = context.settings.ticket_seconds
        self._project_id = project_id
        self._mounted: MountedStore | None = None
        if (
            mount_proof is not None
            and isinstance(context.store, MountedStore)
            and context.store.check_mount_proof(mount_proof.proof_id, mount_proof.content)
        ):
            self._mounted = context.store

    def ticket(self, chunk: Chunk, copy: Copy | None) -> ReadTicket:
        if copy is None:
            return ReadTicket(digest=chunk.digest, bytes=chunk.bytes, stored_bytes=0, kind="gone", expires_in_seconds=0)
        key = object_key(self._project_id, chunk.digest, copy)
        if self._mounted is not None:
            return ReadTicket(
                digest=chunk.digest,
                bytes=chunk.bytes,
                stored_bytes=copy.stored_bytes,
                codec=Codec(copy.codec),
                kind="file",
                path=str(self._mounted.object_path(key)),
                expires_in_seconds=self._seconds,
            )
        get = self._store.presign_get(key, expires_in_seconds=self._seconds)
        return ReadTicket(
            digest=chunk.digest,
            bytes=chunk.bytes,
            stored_bytes=copy.stored_bytes,
            codec=Codec(copy.codec),
            kind="http",
            url=get.url,
            headers=get.headers,
            expires_in_seconds=get.expires_in_seconds,
        )
