"""One call of a rank: verify what it has sent, reserve what it will send, hand out tickets. A begin may reserve for
several ranks of one host (training/begin.py).

The client hashes chunks -> negotiate (here) -> PUT to the store -> negotiate, with what is finished -> training/seal.py
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import NamedTuple, NoReturn

from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import (
    ChunkAnswer,
    ChunkOffer,
    ChunksNegotiated,
    FinishedAnswer,
    FinishedState,
    MountProof,
    NegotiateChunks,
    UploadTicket,
)
from holdfast_protocol.codecs import Codec
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CheckpointState, CopyState, QuotaKind, ShardState
from holdfast_protocol.text import counted
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import PROVEN, object_key, usable_by
from holdfast_service.db.dialect import clock, database_now, insert_all, insert_new
from holdfast_service.db.tables.core import Checkpoint, Chunk, Copy, Shard, ShardChunk
from holdfast_service.errors import ProblemError
from holdfast_service.quotas.crossings import telling_refusals
from holdfast_service.quotas.limits import STORED, lock_quotas, refuse_over_quota
from holdfast_service.stores.base import Capabilities, MountedStore, make_tickets
from holdfast_service.training.fencing import (
    Writing,
    begin_writing,
    keep_alive,
    locked_shards,
    new_shards,
    refuse_unless_uploading,
)
from holdfast_service.training.seal import Finding, Upload, verify_uploads

# Refuses offers that contradict themselves, before anything is reserved for them. Pure (rule reuse-only-hashed).
#
# What is stored is named by its own digest and size. Where it is raw, they are the chunk's.


def check_offers(offers: Sequence[ChunkOffer], *, md5_needed: bool = False) -> None:
    """Raises `invalid_request`, which names the chunk. `md5_needed`: the store enforces MD5, and a ticket without one
    would let any bytes in."""
    seen: dict[str, ChunkOffer] = {}
    for offer in offers:
        if seen.setdefault(offer.digest, offer) != offer:
            raise _refusal(offer, "offered twice in one call, in two ways", "Offer it once")
        if offer.ask:
            _check_question(offer)
            continue
        if md5_needed and offer.md5 is None:
            raise _refusal(
                offer,
                "offered without the MD5 of its bytes on the wire, which is what this store compares",
                "Ask `/v1/service` (`store_asks_md5`), or start the job again with a current client",
            )
        if offer.codec is Codec.RAW:
            _check_raw(offer)
        else:
            _check_encoded(offer)


def _check_question(offer: ChunkOffer) -> None:
    if offer.codec is not Codec.RAW or offer.stored_digest or offer.stored_bytes is not None or offer.md5:
        raise _refusal(
            offer, "asked for and described at once", "To ask, give digest and bytes only; to offer it, leave `ask` out"
        )


def _check_raw(offer: ChunkOffer) -> None:
    if (offer.wire_digest, offer.wire_bytes) != (offer.digest, offer.bytes):
        raise _refusal(
            offer,
            "offered raw but with other bytes on the wire",
            "Leave stored_digest and stored_bytes out, or give the chunk's own",
        )


def _check_encoded(offer: ChunkOffer) -> None:
    if offer.stored_digest is None or offer.stored_bytes is None:
        raise _refusal(
            offer,
            f"offered as {offer.codec} without the digest and the size of its encoded bytes",
            "Give stored_digest and stored_bytes",
        )
    if not 0 < offer.stored_bytes < offer.bytes:
        raise _refusal(
            offer,
            f"offered as {offer.codec} with {offer.stored_bytes} bytes instead of {offer.bytes}",
            "Offer it raw where encoding does not make it smaller",
        )


def _refusal(offer: ChunkOffer, what: str, remedy: str) -> ProblemError:
    return ProblemError(
        ProblemCode.INVALID_REQUEST, f"The chunk {offer.digest} is {what}. {remedy}.", digest=offer.digest
    )


# Whether a chunk that a shard offers is there, must be sent, or is being sent already. Pure (rule reuse-only-hashed to
# 17).
#
# `present` needs a copy that the shard's attempt can rely on. A pending copy is no help to anybody but the shard that
# was told to send it: another may never finish, so it gets a generation of its own. And what is stored at a key is one
# sequence of bytes: a chunk that is offered in another codec than the pending copy's, or encoded to other bytes, gets a
# copy of its own too.


class Answer(StrEnum):
    PRESENT = "present"
    SEND_AGAIN = "send_again"  # into the same copy, with a fresh ticket
    SEND_ANEW = "send_anew"  # into a copy with a generation of its own
    ABSENT = "absent"  # it was only asked for, and nothing is reserved


class Decision(NamedTuple):
    answer: Answer
    copy: Copy | None


def decide(
    offer: ChunkOffer, copies: Sequence[Copy], *, attempt_id: int, own_copy_id: int | None, now: datetime
) -> Decision:
    """`copies`: the chunk's in the primary store. `own_copy_id`: the one that this shard relies on so far."""
    usable = [copy for copy in copies if usable_by(copy, attempt_id)]
    if usable:
        # What this shard has sent itself stays its own; else what is proven, for it is good for everybody.
        return Decision(
            Answer.PRESENT, min(usable, key=lambda copy: (copy.id != own_copy_id, copy.proof not in PROVEN, copy.id))
        )
    if offer.ask:
        return Decision(Answer.ABSENT, None)
    for copy in copies:
        own = copy.id == own_copy_id and copy.state == CopyState.PENDING
        if own and copy.ticket_expires_at > now and _holds(copy, offer):
            return Decision(Answer.SEND_AGAIN, copy)
    return Decision(Answer.SEND_ANEW, None)


def _holds(copy: Copy, offer: ChunkOffer) -> bool:
    return (copy.codec, copy.stored_digest, copy.stored_bytes) == (offer.codec, offer.wire_digest, offer.wire_bytes)


# Uploads that a rank reports as done: verified with the store while the rest is still going up (rule
# verify-while-uploading).

_STATES = {
    Finding.ARRIVED: FinishedState.VERIFIED,
    Finding.MISSING: FinishedState.MISSING,
    Finding.MISMATCH: FinishedState.MISMATCH,
}


def verify_finished(
    context: ServiceContext, caller: Principal, checkpoint_id: str, rank: int, request: NegotiateChunks
) -> list[FinishedAnswer]:
    """One answer per reported digest. Raises `chunk_not_negotiated`, and StoreError if the store does not say."""
    digests = list(dict.fromkeys(request.finished))
    if not digests:
        return []
    with context.database.transaction() as session:
        writing = begin_writing(session, caller, checkpoint_id, request, context.epoch)
        refuse_unless_uploading(writing.checkpoint)
        keep_alive(session, writing, context.settings)
        copies = _negotiated(session, checkpoint_id, rank, digests)
        project_id = writing.project.id
    context.store_watch.refuse_foreign()
    answers: dict[str, FinishedAnswer] = {}
    pending: list[Upload] = []
    for digest, copy in copies.items():
        if copy.state == CopyState.PENDING:
            key = object_key(project_id, digest, copy)
            pending.append(Upload(copy.id, key, copy.stored_bytes, copy.stored_digest))
        elif copy.state == CopyState.VERIFIED:
            answers[digest] = FinishedAnswer(digest=digest, state=FinishedState.VERIFIED)
        else:
            answers[digest] = FinishedAnswer(
                digest=digest, state=FinishedState.MISMATCH, detail=f"this copy is {copy.state}; offer the chunk again"
            )
    if pending:
        context.store_watch.refuse_hanging()
    for verdict in verify_uploads(context.database, context.store, pending):
        digest = verdict.upload.key.digest
        answers[digest] = FinishedAnswer(digest=digest, state=_STATES[verdict.finding], detail=verdict.detail)
    return [answers[digest] for digest in digests]


def _negotiated(session: Session, checkpoint_id: str, rank: int, digests: Sequence[str]) -> dict[str, Copy]:
    rows = session.execute(
        select(Chunk.digest, Copy)
        .join(ShardChunk, ShardChunk.chunk_id == Chunk.id)
        .join(Copy, Copy.id == ShardChunk.copy_id)
        .join(Shard, Shard.id == ShardChunk.shard_id)
        .where(Shard.checkpoint_id == checkpoint_id, Shard.rank == rank, Chunk.digest.in_(digests))
    )
    copies: dict[str, Copy] = {row.digest: row.Copy for row in rows}
    unknown = [digest for digest in digests if digest not in copies]
    if unknown:
        raise ProblemError(
            ProblemCode.CHUNK_NOT_NEGOTIATED,
            f"Rank {rank} reports {counted(len(unknown), 'chunk')} as sent that it has not negotiated under this "
            "checkpoint. "
            "Offer them first.",
            digests=unknown[:20],
        )
    return copies


# The transaction of a negotiation: rows for the chunks, a copy for each that must be sent, a reference to each.
#
# From its commit on the collector leaves these chunks alone (rule present-is-referenced): it locks a chunk FOR UPDATE
# before it marks a copy, and this takes FOR KEY SHARE before it relies on one.

_STILL_GOOD = (CopyState.PENDING, CopyState.VERIFIED)
_Offered = tuple[int, str]
"""A rank, and the digest that it offers."""


@dataclass(frozen=True)
class Reservation:
    """By rank and digest, the copy to send into; of the others, those that were asked for and are not there."""

    project_id: str
    send_into: Mapping[_Offered, Copy]
    absent: frozenset[_Offered]


def reserve(
    session: Session,
    context: ServiceContext,
    writing: Writing,
    offered: Mapping[int, Sequence[ChunkOffer]],
    *,
    first: bool = False,
) -> Reservation:
    """`offered`: by rank. `first`: it is probably these ranks' first call. Raises `checkpoint_aborted`, `shard_sealed`,
    `quota_exceeded`, `rate_limited` and `invalid_request`, if one of the ranks meets it. Repeatable."""
    refuse_unless_uploading(writing.checkpoint)
    new = new_shards(session, writing.checkpoint, offered) if first else {}
    shards = open_shards(session, writing, offered.keys() - new.keys()) | new
    quotas = lock_quotas(session, writing.project, *STORED)
    offers = {(rank, each.digest): each for rank, said in sorted(offered.items()) for each in said}
    sizes = _sizes(each for said in offered.values() for each in said)
    needed = {offer.digest for offer in offers.values() if not offer.ask}
    chunks, inserted = _locked_chunks(session, writing, sizes, needed)
    references = _references(session, {shard for rank, shard in shards.items() if rank not in new}, sizes)
    now = _now_while_uploading(session, writing)  # after the locks: no ticket may outlive what its copy's row says
    known = [chunk_id for digest, chunk_id in chunks.items() if digest not in inserted]
    copies_of = _copies(session, context, known)
    own = {key: references.get((shards[key[0]], chunks.get(key[1], 0))) for key in offers}
    decisions = {
        key: decide(
            offer,
            copies_of.get(chunks.get(offer.digest, 0), ()),
            attempt_id=writing.attempt.id,
            own_copy_id=reference.copy_id if (reference := own[key]) is not None else None,
            now=now,
        )
        for key, offer in offers.items()
    }
    sent_anew = sum(answer is Answer.SEND_ANEW for answer, _ in decisions.values())
    context.tickets.hand_out(session, writing.project, sent_anew, context.settings.project_tickets)
    expires_at = now + timedelta(seconds=context.settings.ticket_seconds)
    longest_upload = timedelta(seconds=context.settings.longest_upload_seconds)
    bound = context.store.capabilities is not None and context.store.capabilities.binds_tickets
    copies: dict[_Offered, Copy] = {}
    for key, offer in offers.items():
        answer, copy = decisions[key]
        if answer is Answer.ABSENT:
            continue
        if copy is None:
            copy = _new_copy(context, writing, chunks[offer.digest], offer, now)
        if answer is not Answer.PRESENT:
            copy.ticket_expires_at = expires_at
            if not bound:
                copy.overwritable_until = expires_at + longest_upload
        copies[key] = copy
    _insert_copies(session, added := [copy for key, copy in copies.items() if decisions[key].copy is None])
    referred = sum(own[key] is None for key in copies)
    if quotas and (added or (QuotaKind.ROWS in quotas and referred)):
        sizes_added = [copy.stored_bytes for copy in added]
        before = _count_references(session, set(shards.values()) - set(new.values())) if QuotaKind.ROWS in quotas else 0
        refuse_over_quota(
            session, context, writing.project, quotas, stored_bytes=sizes_added, references=referred, before=before
        )
    send_into = {key: copy for key, copy in copies.items() if decisions[key].answer is not Answer.PRESENT}
    _refer(session, shards, copies, send_into.keys(), own)
    absent = frozenset(key for key, each in decisions.items() if each.answer is Answer.ABSENT)
    return Reservation(writing.project.id, send_into, absent)


def _now_while_uploading(session: Session, writing: Writing) -> datetime:
    """The checkpoint keeps its references until this transaction ends. Raises `checkpoint_aborted`: what a checkpoint
    that was given up meanwhile gets, after the collector has dropped all that it had, nothing would ever drop."""
    checkpoint = writing.checkpoint
    moment, state = session.connection().execute(_HELD, {"id": checkpoint.id}).one()
    if state != CheckpointState.UPLOADING:
        session.refresh(checkpoint)
        refuse_unless_uploading(checkpoint)
    return database_now(session, moment)


_STATE = select(clock(), Checkpoint.state).where(Checkpoint.id == bindparam("id"))
_HELD = _STATE.with_for_update(read=True, key_share=True)


def open_shards(session: Session, writing: Writing, ranks: Collection[int]) -> dict[int, int]:
    """The ids of the ranks' shards, made at their first call. Raises `shard_sealed`."""
    if not ranks:
        return {}
    # Locked: two calls of one rank at once (a retry overtook) must see each other's references.
    shards = locked_shards(session, writing.checkpoint, ranks)
    for rank, shard in shards.items():
        if shard.state != ShardState.OPEN:
            raise ProblemError(
                ProblemCode.SHARD_SEALED,
                f"Rank {rank} has sealed its shard of step {writing.checkpoint.step}: nothing can be added. "
                "Wait for the checkpoint to commit.",
                rank=rank,
            )
    return {rank: shard.id for rank, shard in shards.items()}


def _sizes(offers: Iterable[ChunkOffer]) -> dict[str, int]:
    """By digest, in the order of the digests. Raises `invalid_request`."""
    sizes: dict[str, int] = {}
    for offer in offers:
        if sizes.setdefault(offer.digest, offer.bytes) != offer.bytes:
            _refuse_two_sizes(offer.digest)
    return dict(sorted(sizes.items()))


def _locked_chunks(
    session: Session, writing: Writing, sizes: Mapping[str, int], needed: Set[str]
) -> tuple[dict[str, int], set[str]]:
    """The rows' ids by digest, and the digests that this transaction has inserted: those have no copy and no reference.
    `sizes` is in the order of the digests: inserted and locked in it, or overlapping batches deadlock (rule
    sorted-inserts).

    What is only asked for, and not `needed`, is not inserted, and is not among them if it was never offered.
    """
    inserted: dict[str, int] = {}
    missing = needed
    while True:  # again only if the collector forgot one between the two statements
        rows = [
            {"project_id": writing.project.id, "digest": digest, "bytes": size, "created_at": writing.now}
            for digest, size in sizes.items()
            if digest in missing
        ]
        inserted |= {row.digest: row.id for row in insert_new(session, Chunk, rows, Chunk.digest, Chunk.id)}
        others = [digest for digest in sizes if digest not in inserted]
        if not others:
            return inserted, set(inserted)
        # A later statement: the insert's snapshot does not show what a concurrent one has just committed.
        found = session.execute(
            select(Chunk.digest, Chunk.id, Chunk.bytes)
            .where(Chunk.project_id == writing.project.id, Chunk.digest.in_(others))
            .order_by(Chunk.digest, Chunk.id)
            .with_for_update(read=True, key_share=True)
        )
        # A row of another size is another job's word, and binds nothing here.
        chunks = inserted | {row.digest: row.id for row in found if sizes[row.digest] == row.bytes}
        missing = needed - chunks.keys()
        if not missing:
            return chunks, set(inserted)


def _references(
    session: Session, shards: Collection[int], sizes: Mapping[str, int]
) -> dict[tuple[int, int], ShardChunk]:
    """By shard and chunk, what these shards refer to. Raises `invalid_request` for what one of them offered with
    another size before."""
    if not shards:
        return {}
    rows = session.execute(
        select(ShardChunk, Chunk.digest, Chunk.bytes)
        .join(Chunk, Chunk.id == ShardChunk.chunk_id)
        .where(ShardChunk.shard_id.in_(shards), Chunk.digest.in_(sizes))
    ).all()
    for _, digest, size in rows:
        if sizes[digest] != size:
            _refuse_two_sizes(digest)
    return {(row.ShardChunk.shard_id, row.ShardChunk.chunk_id): row.ShardChunk for row in rows}


def _count_references(session: Session, shards: Collection[int]) -> int:
    """What these shards refer to before this call adds to it."""
    if not shards:
        return 0
    return session.scalar(select(func.count()).select_from(ShardChunk).where(ShardChunk.shard_id.in_(shards))) or 0


def _refuse_two_sizes(digest: str) -> NoReturn:
    raise ProblemError(
        ProblemCode.INVALID_REQUEST,
        f"The chunk {digest} is offered with two sizes. One content has one size: hash and measure the same buffer.",
        digest=digest,
    )


def _copies(session: Session, context: ServiceContext, chunk_ids: Sequence[int]) -> dict[int, list[Copy]]:
    """By chunk id, those in the primary store that are or may become good. Read behind the chunks' locks."""
    copies: dict[int, list[Copy]] = {}
    if chunk_ids:
        for copy in session.scalars(
            select(Copy)
            .where(Copy.chunk_id.in_(chunk_ids), Copy.store_id == context.store_id, Copy.state.in_(_STILL_GOOD))
            .order_by(Copy.id),
            execution_options={"populate_existing": True},
        ):
            copies.setdefault(copy.chunk_id, []).append(copy)
    return copies


def _new_copy(context: ServiceContext, writing: Writing, chunk_id: int, offer: ChunkOffer, now: datetime) -> Copy:
    return Copy(  # for the tickets; `_insert_copies` makes the row
        chunk_id=chunk_id,
        project_id=writing.project.id,
        store_id=context.store_id,
        attempt_id=writing.attempt.id,
        generation=uuid.uuid4().hex,
        state=CopyState.PENDING,
        codec=offer.codec,
        stored_digest=offer.wire_digest,
        stored_bytes=offer.wire_bytes,
        ticket_expires_at=now,
        created_at=now,
    )


def _insert_copies(session: Session, added: Sequence[Copy]) -> None:
    """Each gets its row's id."""
    rows = [{name: value for name, value in vars(copy).items() if not name.startswith("_")} for copy in added]
    ids = {row.generation: row.id for row in insert_all(session, Copy, rows, Copy.generation, Copy.id)}
    for copy in added:
        copy.id = ids[copy.generation]


def _refer(
    session: Session,
    shards: Mapping[int, int],
    copies: Mapping[_Offered, Copy],
    sending: Set[_Offered],
    own: Mapping[_Offered, ShardChunk | None],
) -> None:
    rows = []
    for (rank, digest), copy in copies.items():
        uploading, reference = (rank, digest) in sending, own[rank, digest]
        if reference is None:
            refers = {"shard_id": shards[rank], "chunk_id": copy.chunk_id}
            rows.append(refers | {"copy_id": copy.id, "uploading": uploading})
        elif reference.copy_id != copy.id:
            reference.copy_id, reference.uploading = copy.id, uploading
    insert_all(session, ShardChunk, rows, ShardChunk.chunk_id)


# How to send a chunk: a presigned request, or a file on the store's own mount. No transaction is open here.


class TicketOffice:
    """Makes the tickets of one call. `mount_proof` is checked once; a wrong one only means signed URLs. Raises
    StoreUnavailable for a store that must take no upload, and for a mount that hangs."""

    def __init__(self, context: ServiceContext, project_id: str, mount_proof: MountProof | None) -> None:
        context.store_watch.refuse_foreign()
        self._store = context.store
        self._expires_in_seconds = context.settings.ticket_seconds
        self._project_id = project_id
        self._mounted: MountedStore | None = None
        store = context.store
        if mount_proof is not None and isinstance(store, MountedStore):
            context.store_watch.refuse_hanging()
            seen = store.check_mount_proof(mount_proof.proof_id, mount_proof.content)
            self._mounted = store if seen else None

    def ticket(self, offer: ChunkOffer, copy: Copy) -> UploadTicket:
        if self._mounted is not None:
            path = self._mounted.incoming_path(copy.generation)
            return UploadTicket(kind="file", path=str(path), expires_in_seconds=self._expires_in_seconds)
        put = self._store.presign_put(
            object_key(self._project_id, offer.digest, copy),
            stored_bytes=copy.stored_bytes,
            stored_sha256=copy.stored_digest,
            md5=offer.md5,
            expires_in_seconds=self._expires_in_seconds,
        )
        return UploadTicket(
            kind="http",
            method=put.method,
            url=put.url,
            headers=put.headers,
            expires_in_seconds=put.expires_in_seconds,
            answers=put.answers,
        )


_CLIENTS_ASK_WITHIN = timedelta(minutes=15)  # so long a client may go by what it was told of the store


def negotiate_chunks(
    context: ServiceContext, caller: Principal, checkpoint_id: str, rank: int, request: NegotiateChunks
) -> ChunksNegotiated:
    """An answer per offered chunk, in the order offered. Repeating it is fine: the same copies, fresh tickets."""
    check_offers(request.chunks, md5_needed=md5_needed(context.store.capabilities))
    # First what has arrived: a chunk that is reported and offered again in one call is present.
    finished = verify_finished(context, caller, checkpoint_id, rank, request)
    if finished and not request.chunks:
        return ChunksNegotiated(chunks=[], finished=finished)

    def reserved(session: Session) -> Reservation:
        writing = begin_writing(session, caller, checkpoint_id, request, context.epoch)
        reservation = reserve(session, context, writing, {rank: request.chunks})
        keep_alive(session, writing, context.settings)
        return reservation

    with telling_refusals(context):
        reservation = context.database.run(reserved)
    chunks = answers(context, reservation, rank, request.chunks, request.mount_proof)
    return ChunksNegotiated(chunks=chunks, finished=finished)


def answers(
    context: ServiceContext,
    reservation: Reservation,
    rank: int,
    offers: Sequence[ChunkOffer],
    mount_proof: MountProof | None,
) -> list[ChunkAnswer]:
    """One for each offer of the rank, in their order. Raises StoreError."""
    office = TicketOffice(context, reservation.project_id, mount_proof)

    def answer(offer: ChunkOffer) -> ChunkAnswer:
        key = (rank, offer.digest)
        if (copy := reservation.send_into.get(key)) is not None:
            return ChunkAnswer(digest=offer.digest, status="upload", ticket=office.ticket(offer, copy))
        return ChunkAnswer(digest=offer.digest, status="absent" if key in reservation.absent else "present")

    return make_tickets(context.store, answer, offers)


def md5_needed(capabilities: Capabilities | None) -> bool:
    """Not at once where the store has only just come to compare MD5: jobs that run must hear of it first."""
    if capabilities is None or not capabilities.asks_md5:
        return False
    return capabilities.changed_at is None or datetime.now(UTC) - capabilities.changed_at > _CLIENTS_ASK_WITHIN
