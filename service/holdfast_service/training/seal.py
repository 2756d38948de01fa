"""Seal shards: what they negotiated, what their seals say, their chunk lists; ranks say that their shares are complete.

One call seals the shard of one rank, or those of several ranks of one host.

Whether an upload has arrived is asked of the store, and the client's word is never taken for it (rules
seal-only-negotiated, verify-while-uploading and reuse-only-hashed). Negotiating verifies uploads that are reported as
done, while others are still going up, and sealing verifies unreported ones. The service asks the store outside of any
transaction, several objects at once, and settles the answers with a conditional update: doing it twice, or beside
another process, is fine.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import bindparam, select, update
from sqlalchemy.orm import Session, load_only

from holdfast_protocol.base import Fence
from holdfast_protocol.checkpoints import CheckpointView, SealShard
from holdfast_protocol.digests import MAX_STORED_DOCUMENT_BYTES, shard_digest
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CopyState, Proof
from holdfast_protocol.text import counted
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext, waiting_for_store
from holdfast_service.copies.predicates import object_key, proof_of, usable_by
from holdfast_service.db.dialect import database_now, insert_all, insert_new
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Chunk, ChunkList, ChunkListEntry, Copy, Shard, ShardChunk
from holdfast_service.errors import ProblemError
from holdfast_service.runs.views import current_checkpoint_view
from holdfast_service.stores.base import MountedStore, ObjectFacts, ObjectKey, ObjectMismatch, ObjectMissing, Store
from holdfast_service.training.commit import Arrived, commit_seals, not_sealed_before
from holdfast_service.training.fencing import (
    begin_writing,
    keep_alive,
    refuse_unless_uploading,
    shards_of,
)

# Whether an upload has arrived.

_AT_ONCE = 16
_ASKED_HERE = 4


class Finding(StrEnum):
    ARRIVED = "arrived"
    MISSING = "missing"
    MISMATCH = "mismatch"


@dataclass(frozen=True)
class Upload:
    """A copy that should be in the store by now. Mounted clients hand it over under the name of its generation."""

    copy_id: int
    key: ObjectKey
    stored_bytes: int
    stored_digest: str


@dataclass(frozen=True)
class Verdict:
    upload: Upload
    finding: Finding
    proof: Proof | None = None
    version_id: str | None = None
    detail: str = ""


def verify_uploads(database: Database, store: Store, uploads: Sequence[Upload]) -> list[Verdict]:
    """One verdict per upload, in their order, settled in the catalog. Raises StoreError if the store does not say."""
    verdicts = ask_for_all(store, uploads)
    if verdicts:
        with database.transaction() as session:
            settle(session, verdicts, database_now(session))
    return verdicts


def ask_for_all(store: Store, uploads: Sequence[Upload]) -> list[Verdict]:
    """The same, and not settled yet."""
    with waiting_for_store():
        return _asked(store, uploads, here=_ASKED_HERE if isinstance(store, MountedStore) else 1)


def _asked(store: Store, uploads: Sequence[Upload], *, here: int) -> list[Verdict]:
    if len(uploads) <= here:  # to start threads takes longer
        return [ask_store(store, upload) for upload in uploads]
    with ThreadPoolExecutor(min(_AT_ONCE, len(uploads)), thread_name_prefix="holdfast-verify") as threads:
        return list(threads.map(lambda upload: ask_store(store, upload), uploads))


def ask_store(store: Store, upload: Upload) -> Verdict:
    """What the store says of this upload. Raises StoreError other than a missing or a wrong object."""
    try:
        facts = _facts(store, upload)
    except ObjectMissing:
        return Verdict(upload, Finding.MISSING, detail="the store does not have it")
    except ObjectMismatch as error:
        return Verdict(upload, Finding.MISMATCH, detail=str(error))
    if facts.bytes != upload.stored_bytes:
        return Verdict(
            upload, Finding.MISMATCH, detail=f"the store has {facts.bytes} bytes, announced {upload.stored_bytes}"
        )
    if facts.sha256 is not None and facts.sha256 != upload.stored_digest:
        return Verdict(upload, Finding.MISMATCH, detail="the store's SHA-256 of it is another one")
    # What it decodes to is the client's word: the store's SHA-256 proves the chunk only if it is stored raw.
    raw = upload.stored_digest == upload.key.digest
    proof = proof_of(facts, store.capabilities) if raw else Proof.UNPROVEN
    return Verdict(upload, Finding.ARRIVED, proof, facts.version_id)


def _facts(store: Store, upload: Upload) -> ObjectFacts:
    if isinstance(store, MountedStore):
        # A client with the mount may have written it for us to publish. If it is there already, only this says that
        # it stays: the service may have died before its name was durable.
        store.publish(upload.key.generation, upload.key, upload.stored_bytes)
    return store.head(upload.key)


def settle(session: Session, verdicts: Sequence[Verdict], now: datetime) -> None:
    """What has arrived and what is wrong stands in the catalog. What is missing may still come."""
    settled = [verdict for verdict in verdicts if verdict.finding is not Finding.MISSING]
    if not settled:
        return
    alike: defaultdict[tuple[Finding, Proof | None, str | None], list[int]] = defaultdict(list)
    for verdict in settled:
        alike[verdict.finding, verdict.proof, verdict.version_id].append(verdict.upload.copy_id)
    connection = session.connection()
    if len(alike) <= _FEW_KINDS:
        for kind, copy_ids in alike.items():
            connection.execute(_SETTLED_ALIKE, {"copy_ids": sorted(copy_ids), **_columns(*kind, now)})
        return
    # A store with versions names another one for each object.
    each = sorted((copy_id, kind) for kind, copy_ids in alike.items() for copy_id in copy_ids)
    connection.execute(_SETTLED, [{"copy_id": copy_id, **_columns(*kind, now)} for copy_id, kind in each])


_FEW_KINDS = 2
# Only from `pending`: whatever else has happened to the copy meanwhile weighs more.
_FROM_PENDING = (
    update(Copy)
    .where(Copy.state == CopyState.PENDING)
    .values({name: bindparam(f"new_{name}") for name in ("state", "proof", "version_id", "verified_at")})
)
_SETTLED = _FROM_PENDING.where(Copy.id == bindparam("copy_id"))
_SETTLED_ALIKE = _FROM_PENDING.where(Copy.id.in_(bindparam("copy_ids", expanding=True)))


def _columns(finding: Finding, proof: Proof | None, version_id: str | None, now: datetime) -> dict[str, Any]:
    arrived = finding is Finding.ARRIVED
    return {
        "new_state": CopyState.VERIFIED if arrived else CopyState.BAD,
        "new_proof": proof,
        "new_version_id": version_id,
        "new_verified_at": now if arrived else None,
    }


# The chunk list of a sealed shard: one row for all the shards that have this very list. Until the shard refers to it,
# the chunks are held by what was negotiated.

_ROWS_PER_STATEMENT = 5000


def ensure_chunk_lists(
    session: Session, project_id: str, lists: Mapping[int, tuple[str, Sequence[int]]]
) -> dict[int, int]:
    """`lists`: by rank, the shard_digest and the chunk ids. The rows' ids by rank, held against the collector until the
    transaction ends. Equal lists are those of the same rows, sizes and all."""
    entries = {rank: _entries_digest(chunk_ids) for rank, (_, chunk_ids) in lists.items()}
    by_entries = {entries[rank]: lists[rank] for rank in lists}
    found: dict[str, int] = {}
    while missing := sorted(by_entries.keys() - found.keys()):  # again only if the collector forgot one in between
        rows = [
            {"project_id": project_id, "entries_digest": each, "digest": digest, "entries": len(chunk_ids)}
            for each in missing
            for digest, chunk_ids in [by_entries[each]]
        ]
        # Waits for a rank that is writing the same list, and in the same order (rule sorted-inserts).
        made = insert_new(session, ChunkList, rows, ChunkList.entries_digest, ChunkList.id)
        found |= {row.entries_digest: row.id for row in made}
        _fill_lists(session, {row.id: by_entries[row.entries_digest][1] for row in made})
        if others := [each for each in missing if each not in found]:
            same = {"project": project_id, "entries": others}
            found |= {row.entries_digest: row.id for row in session.execute(_HELD_LISTS, same)}
    return {rank: found[entries[rank]] for rank in lists}


_HELD_LISTS = (
    select(ChunkList.entries_digest, ChunkList.id)
    .where(
        ChunkList.project_id == bindparam("project"),
        ChunkList.entries_digest.in_(bindparam("entries", expanding=True)),
    )
    .order_by(ChunkList.entries_digest)
    .with_for_update(read=True, key_share=True)
)


def _entries_digest(chunk_ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, chunk_ids)).encode("ascii")).hexdigest()


def _fill_lists(session: Session, lists: Mapping[int, Sequence[int]]) -> None:
    entries = [
        {"chunk_list_id": list_id, "ordinal": ordinal, "chunk_id": chunk_id}
        for list_id, chunk_ids in lists.items()
        for ordinal, chunk_id in enumerate(chunk_ids)
    ]
    for first in range(0, len(entries), _ROWS_PER_STATEMENT):
        insert_all(session, ChunkListEntry, entries[first : first + _ROWS_PER_STATEMENT], ChunkListEntry.ordinal)


# What a shard has negotiated: the only chunks that it may be sealed with (rule seal-only-negotiated).

_SHOWN_DIGESTS = 20


class Negotiated(NamedTuple):
    """`bytes` are the chunk's own; `sent`: this shard was told to send it."""

    chunk_id: int
    bytes: int
    copy: Copy
    sent: bool


def all_negotiated(session: Session, shards: Mapping[int, Shard]) -> dict[int, dict[str, Negotiated]]:
    """By rank and digest. Read in one go: 200,000 digests are too many for one statement's parameters."""
    known: dict[int, dict[str, Negotiated]] = {rank: {} for rank in shards}
    ranks = {shard.id: rank for rank, shard in shards.items()}
    if ranks:
        for row in session.execute(_NEGOTIATED, {"shards": sorted(ranks)}):
            known[ranks[row.shard_id]][row.digest] = Negotiated(row.id, row.bytes, row.Copy, row.uploading)
    return known


_NEGOTIATED = (
    select(ShardChunk.shard_id, Chunk.digest, Chunk.id, Chunk.bytes, Copy, ShardChunk.uploading)
    .join(ShardChunk, ShardChunk.chunk_id == Chunk.id)
    .join(Copy, Copy.id == ShardChunk.copy_id)
    .where(ShardChunk.shard_id.in_(bindparam("shards", expanding=True)))
    .options(
        load_only(  # a thousand of them are read in a seal
            Copy.generation,
            Copy.version_id,
            Copy.overwritable_until,
            Copy.attempt_id,
            Copy.state,
            Copy.proof,
            Copy.stored_bytes,
            Copy.stored_digest,
            raiseload=True,
        )
    )
)


def refuse_not_negotiated(known: Mapping[str, Negotiated], digests: Sequence[str]) -> None:
    """Raises `chunk_not_negotiated`."""
    unknown = [digest for digest in dict.fromkeys(digests) if digest not in known]
    if unknown:
        raise ProblemError(
            ProblemCode.CHUNK_NOT_NEGOTIATED,
            f"The list has {counted(len(unknown), 'chunk')} not negotiated under this shard. Offer what is missing, so "
            "that the collector keeps it, and seal again.",
            digests=unknown[:_SHOWN_DIGESTS],
            count=len(unknown),
        )


def sent_bytes(known: Mapping[str, Negotiated]) -> int:
    """What the shard had to send, on the wire. Pure."""
    return sum(each.copy.stored_bytes for each in known.values() if each.sent)


def deduplicated_bytes(known: Mapping[str, Negotiated], digests: Sequence[str]) -> int:
    """What the shard did not send because it was there: each place in its list, less each chunk that was sent. Pure."""
    needed = sum(known[digest].bytes for digest in digests)
    return needed - sum(known[digest].bytes for digest in dict.fromkeys(digests) if known[digest].sent)


# What a seal says: checked against itself, and against its chunks. Pure.


def check_seal(rank: int, request: SealShard) -> None:
    """Raises `invalid_request`. The client's word for its own digest and ordinals is not taken (rule
    seal-only-negotiated)."""
    if shard_digest(request.chunks) != request.digest:
        _refuse("The shard's digest is not that of its chunk list. Compute it with shard_digest over the same list.")
    ordinals = {"shard": request.index.shard, "layout": request.index.layout}
    for name, ordinal in ordinals.items():
        if ordinal is not None and ordinal >= len(request.chunks):
            _refuse(
                f"index.{name} is {ordinal}, and the shard has {counted(len(request.chunks), 'chunk')}. Give the "
                "ordinal at which "
                "the index stands in the chunk list."
            )
    if rank == 0 and request.index.layout is None:
        _refuse("Rank 0 brings the global layout: give index.layout.")
    if rank != 0 and (request.metrics or request.dropped_components):
        _refuse(f"Metrics and dropped_components come from rank 0, and this is rank {rank}. Send them there only.")


def check_sizes(request: SealShard, sizes: Sequence[int]) -> None:
    """Raises `invalid_request` where the seal says more than its chunks can hold; `sizes` are theirs, by ordinal. What
    is in the documents every reader checks: they are not read here, on the way of a save."""
    if request.logical_bytes > sum(sizes):
        _refuse(f"logical_bytes is {request.logical_bytes}, and the chunks of the shard have {sum(sizes)} bytes.")
    for name, ordinal in (("shard", request.index.shard), ("layout", request.index.layout)):
        if ordinal is not None and sizes[ordinal] > MAX_STORED_DOCUMENT_BYTES:
            _refuse(f"index.{name} is a chunk of {sizes[ordinal]} bytes; no document may be as large as that.")


def _refuse(detail: str) -> None:
    raise ProblemError(ProblemCode.INVALID_REQUEST, detail)


# Seal shards: ranks say that their shares are complete. The seal that completes the world commits (rule
# commit-before-reply).
#
# 1. look     the request against itself, the checkpoint, what was negotiated; a repeated seal ends here
# 2. ask      the store is asked for what is not known to have arrived, outside of any transaction
# 3. commit   what has arrived, the chunk lists and the shards are written in one transaction; the last seal commits
#             (training/commit.py)

_SHOWN_MISSING = 100
_ASKED_IN_A_MOMENT = 100
"""The store may take long to answer for more; the commit then comes too late to say that the attempt is alive."""


@dataclass(frozen=True)
class _Look:
    """`known`: by rank and digest, what the ranks that have not sealed yet have negotiated. `view` is set where there
    is none: this very content was sealed before."""

    view: CheckpointView | None
    project_id: str = ""
    attempt_id: int = 0
    known: Mapping[int, Mapping[str, Negotiated]] = field(default_factory=dict)


def seal_shards(
    context: ServiceContext, caller: Principal, checkpoint_id: str, seals: Mapping[int, SealShard]
) -> CheckpointView:
    """`seals`: by rank, all under one fence; all are sealed, or none. Repeating it with the same content is fine: a
    reply may be lost. Raises `manifest_conflict` for other content, `chunk_not_negotiated`, `incomplete_checkpoint`
    with the digests that are missing, `checkpoint_aborted`, `chunk_gone`, `stale_attempt`, and StoreError.
    """
    for rank, request in seals.items():
        check_seal(rank, request)
    fence = next(iter(seals.values()))
    try:
        look = _look(context, caller, checkpoint_id, seals, fence)
    except ProblemError as problem:
        if problem.code is not ProblemCode.CHUNK_NOT_NEGOTIATED:
            raise
        # An earlier try of this call, whose reply was lost or late, may have sealed the shard between two statements of
        # the look: what was negotiated goes with the seal. Another look sees the shard sealed.
        look = _look(context, caller, checkpoint_id, seals, fence)
    if look.view is not None:
        return look.view
    left = {rank: seals[rank] for rank in look.known}
    for rank, request in left.items():
        check_sizes(request, [look.known[rank][digest].bytes for digest in request.chunks])
    pending = _pending(look, left)
    # A rank that waits for a store is not silent, though no seal comes to its commit.
    if len(pending) > _ASKED_IN_A_MOMENT or context.store_watch.unavailable:
        with context.database.transaction() as session:
            writing = begin_writing(session, caller, checkpoint_id, fence, context.epoch)
            keep_alive(session, writing, context.settings)
    context.store_watch.refuse_foreign()
    if pending:
        context.store_watch.refuse_hanging()
    verdicts = ask_for_all(context.store, pending)
    _refuse_incomplete(context, look, left, verdicts)

    def arrive(session: Session, now: datetime) -> dict[int, Arrived]:
        # The lists before the copies: the collector locks a chunk, and then its copies.
        lists = {
            rank: (request.digest, [look.known[rank][digest].chunk_id for digest in request.chunks])
            for rank, request in left.items()
        }
        list_ids = ensure_chunk_lists(session, look.project_id, lists)
        settle(session, verdicts, now)
        return {
            rank: Arrived(
                list_ids[rank], sent_bytes(look.known[rank]), deduplicated_bytes(look.known[rank], request.chunks)
            )
            for rank, request in left.items()
        }

    return commit_seals(context, caller, checkpoint_id, left, arrive=arrive)


def _look(
    context: ServiceContext, caller: Principal, checkpoint_id: str, seals: Mapping[int, SealShard], fence: Fence
) -> _Look:
    """Locks nothing and writes nothing: the commit looks again behind the run's lock."""
    with context.database.read(in_transaction=False) as session:
        # Any attempt may compare once it is committed: the one that staged a late save may have made it in time.
        writing = begin_writing(session, caller, checkpoint_id, fence, context.epoch, only_looks=True)
        shards = shards_of(session, writing.checkpoint, seals)
        left = not_sealed_before(session, writing, shards, seals)
        if not left:
            return _Look(current_checkpoint_view(session, writing.project.name, writing.run.name, writing.checkpoint))
        refuse_unless_uploading(writing.checkpoint)
        known = all_negotiated(session, {rank: shard for rank, shard in shards.items() if rank in left})
        for rank, request in left.items():
            refuse_not_negotiated(known.setdefault(rank, {}), request.chunks)
        return _Look(None, writing.project.id, writing.attempt.id, known)


def _pending(look: _Look, seals: Mapping[int, SealShard]) -> list[Upload]:
    """Uploads that were not reported as finished."""
    pending = {
        copy.id: Upload(copy.id, object_key(look.project_id, digest, copy), copy.stored_bytes, copy.stored_digest)
        for rank, request in seals.items()
        for digest in request.chunks
        if (copy := look.known[rank][digest].copy).state == CopyState.PENDING
    }
    return list(pending.values())


def _refuse_incomplete(
    context: ServiceContext, look: _Look, seals: Mapping[int, SealShard], verdicts: Sequence[Verdict]
) -> None:
    """Every chunk must be in the store as the store itself says (rule seal-only-negotiated). What has arrived is
    settled before the refusal."""
    why = {v.upload.key.digest: v.detail for v in verdicts if v.finding is not Finding.ARRIVED}
    for rank, digest in ((rank, digest) for rank, request in seals.items() for digest in request.chunks):
        copy = look.known[rank][digest].copy
        if copy.state != CopyState.PENDING and not usable_by(copy, look.attempt_id):
            why[digest] = f"its copy is {copy.state}"
    if not why:
        return
    with context.database.transaction() as session:
        settle(session, verdicts, database_now(session))
    first = next(iter(why))
    raise ProblemError(
        ProblemCode.INCOMPLETE_CHECKPOINT,
        f"{counted(len(why), 'chunk')} of this seal cannot be used (the first: {first}, {why[first]}). "
        "Offer them again, send them and seal again.",
        digests=list(why)[:_SHOWN_MISSING],
        count=len(why),
    )
