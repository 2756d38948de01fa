"""Tickets to read a checkpoint's chunks, under a lease that keeps it from being purged meanwhile (protocol rule 21).

Where the catalog cannot be written (a standby that was not promoted, a full disk) there is no lease, and the reply says
what that may cost (docs/adr/0045).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.restore import ChunkReads, ReadChunks
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.reach import ask_stores
from holdfast_service.catalog.readable import refuse_unless_whole
from holdfast_service.catalog.resolve import checkpoint_by_id
from holdfast_service.catalog.tables import Checkpoint, Chunk, ReadLease
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.restore.choose_copies import ChosenCopy, choose_copies
from holdfast_service.restore.chunks_of_checkpoint import chunks_of_checkpoint
from holdfast_service.restore.read_tickets import read_tickets

_WHAT_IT_COSTS = (
    "So no lease keeps this checkpoint while it is read: if another service can still write the catalog, it may purge "
    "it meanwhile, and reading then fails. Every byte is verified all the same."
)


def read_chunks(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: ReadChunks, protocol_minor: int
) -> ChunkReads:
    """One ticket for each digest, in their order; `gone` for a chunk that has no copy to read.

    Raises `checkpoint_not_found`, `chunk_not_found`, what refuse_unless_whole raises, and `unsupported_protocol` for a
    client of an older minor version where it could decode no copy of a chunk.
    """
    _note_silent_stores(context, request)
    lease_seconds = context.settings.ticket_seconds + context.settings.read_lease_seconds
    try:
        with context.database.transaction() as session:
            reading = _Reading.of(
                session, context, caller, checkpoint_id, request, protocol_minor=protocol_minor, locked=True
            )
            lease_id = _take_lease(session, caller, checkpoint_id, request.lease_id, lease_seconds)
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
    )


@dataclass(frozen=True)
class _Reading:
    project_id: str
    chunks: dict[str, Chunk]
    chosen: dict[int, ChosenCopy]

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
            # FOR KEY SHARE: whoever purges takes the row FOR UPDATE, and afterwards either sees the lease or is seen.
            query = query.with_for_update(read=True, key_share=True)
        checkpoint = session.execute(query, execution_options={"populate_existing": True}).scalar_one()
        refuse_unless_whole(checkpoint)
        chunks = chunks_of_checkpoint(session, project.id, checkpoint, request.digests)
        chosen = choose_copies(
            session, context, checkpoint, list(chunks.values()), request, protocol_minor=protocol_minor
        )
        return cls(project.id, chunks, chosen)


def _note_silent_stores(context: ServiceContext, request: ReadChunks) -> None:
    """What a reader gets no answer from is asked again by the service, and else what is not known for certain."""
    for attached in context.stores:
        if attached.role in request.avoid_stores:
            attached.watch.doubt()
    ask_stores(context)


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
