"""A chunk's bytes go from one of its copies to another store, or to another storage class. Repairing, second stores and
tiers all use it (rule row-before-copy).

    begin_copy (under the chunk's lock: a `copying` row with a lease, the best source)
      -> move_bytes (no transaction: read, prove, write under the copy's own generation, ask the target what it has)
      -> settle_copy (only with that lease), or give_up_copy

Nothing is written that is not proven to be the chunk at that moment, so a source that rots meanwhile spoils nothing.
A worker that dies leaves a `copying` row. When its lease has run out the next `begin_copy` of the same bytes takes it
up, with the same generation: a key has one content, and twice is fine. Otherwise the collector deletes it, once no
write of the dead worker can land any more: `ticket_expires_at` is the lease's end, as for an upload's ticket.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.codecs import Codec, DecodeError, decode
from holdfast_protocol.states import CopyState, Proof
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import KEPT, PROVEN, can_be_read, kept_state, object_key, proof_of
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Chunk, Copy
from holdfast_service.stores.base import ObjectArchived, ObjectKey, ObjectMismatch, ObjectMissing, Store, StoreError

# Beyond the set lease, a second for each so many bytes: a slow store, or a low rate, must not cost a large chunk its
# lease.
_SLOWEST_BYTES_PER_SECOND = 256 * 1024


class SourceBadError(Exception):
    """What was read is not the chunk. The source's copy is to be looked at."""


class TargetBadError(Exception):
    """What the target has under the copy's key is not what was written. Another generation is to be used."""


class LeaseOverError(Exception):
    """It took longer than the lease; another process may work on it."""


class StoreFailedError(Exception):
    """A store did not answer, is full, or refuses: which one, and the StoreError."""

    def __init__(self, store_id: int, error: StoreError) -> None:
        super().__init__(str(error))
        self.store_id = store_id
        self.error = error


CopyFailure = SourceBadError | TargetBadError | LeaseOverError | StoreFailedError


@dataclass(frozen=True)
class CopyTask:
    """A copy that this process makes under a lease. `ends_at`: when that ends, by this process's monotonic clock."""

    copy_id: int
    chunk_id: int
    digest: str
    chunk_bytes: int
    codec: Codec
    stored_bytes: int
    source_copy_id: int
    source_store_id: int
    source_key: ObjectKey
    target_store_id: int
    target_key: ObjectKey
    storage_class: str | None
    lease_token: str
    ends_at: float


@dataclass(frozen=True)
class Moved:
    """What the target has now, proven by `proof`."""

    stored_digest: str
    proof: Proof
    version_id: str | None


def begin_copy(
    session: Session,
    context: ServiceContext,
    chunk_id: int,
    target_store_id: int,
    *,
    storage_class: str | None = None,
) -> CopyTask | None:
    """Takes the work under the chunk's lock. None if the target has the chunk already (proven, and in that storage
    class), another process works on it, or no copy can be read now. The caller commits before it moves bytes.

    A caller that takes several begins in the order of their digests."""
    chunk = session.execute(
        select(Chunk).where(Chunk.id == chunk_id).with_for_update(), execution_options={"populate_existing": True}
    ).scalar_one_or_none()
    if chunk is None:
        return None
    # A later statement: another's row that was committed while this waited for the lock is seen.
    copies = session.scalars(
        select(Copy).where(Copy.chunk_id == chunk_id).order_by(Copy.id), execution_options={"populate_existing": True}
    ).all()
    now = database_now(session)
    there = [each for each in copies if each.store_id == target_store_id and each.storage_class == storage_class]
    if any(each.state in KEPT and each.proof in PROVEN for each in there) or any(_at_work(each, now) for each in there):
        return None
    if any(each.state == CopyState.SUSPECT for each in there):
        return None  # it is read again first: after a rebuild all of a store's copies are, and few of them are bad
    source = best_source(context, copies)
    if source is None:
        return None
    seconds = context.settings.chunk_lease_seconds + source.stored_bytes // _SLOWEST_BYTES_PER_SECOND
    ends_at = time.monotonic() + seconds
    target = next((each for each in there if _can_be_taken_up(each, source)), None)
    if target is None:
        target = Copy(
            chunk_id=chunk_id,
            project_id=chunk.project_id,
            store_id=target_store_id,
            attempt_id=source.attempt_id,
            generation=uuid.uuid4().hex,
            state=CopyState.COPYING,
            codec=source.codec,
            stored_digest=source.stored_digest,
            stored_bytes=source.stored_bytes,
            storage_class=storage_class,
            created_at=now,
        )
    token = lease.claim_locked(session, target, seconds=seconds)
    assert target.leased_until is not None
    target.ticket_expires_at = target.leased_until
    session.add(target)
    session.flush()
    return CopyTask(
        copy_id=target.id,
        chunk_id=chunk_id,
        digest=chunk.digest,
        chunk_bytes=chunk.bytes,
        codec=Codec(source.codec),
        stored_bytes=source.stored_bytes,
        source_copy_id=source.id,
        source_store_id=source.store_id,
        source_key=object_key(chunk.project_id, chunk.digest, source),
        target_store_id=target_store_id,
        target_key=object_key(chunk.project_id, chunk.digest, target),
        storage_class=storage_class,
        lease_token=token,
        ends_at=ends_at,
    )


def best_source(context: ServiceContext, copies: Sequence[Copy]) -> Copy | None:
    """The copy to read: verified and readable now, in an attached store that answers as far as is known; proven before
    unproven, the primary store before the others. The service reads what is in the cold store, if nothing else is."""
    answering = {
        attached.store_id: position
        for position, attached in enumerate(context.stores)
        if not attached.watch.unavailable
    }
    readable = [
        each
        for each in copies
        if each.store_id in answering
        and (each.state == CopyState.VERIFIED or (each.state == CopyState.COLD and can_be_read(context, each)))
    ]
    return min(readable, key=lambda each: (each.proof not in PROVEN, answering[each.store_id], each.id), default=None)


def move_bytes(context: ServiceContext, task: CopyTask, on_bytes: Callable[[int], None] = lambda _: None) -> Moved:
    """Reads the source, proves that it is the chunk, writes it and asks the target. One stored chunk is in memory.

    `on_bytes` is told of each piece's size, and may slow the reading down. Raises the four errors above.
    """
    source, target = context.store_of(task.source_store_id), context.store_of(task.target_store_id)
    if source is None or target is None:
        raise ValueError("a store of this copy is not attached to this process")
    try:
        data = _read(source, task, on_bytes)
    except ObjectMissing:
        raise SourceBadError(f"the chunk {task.digest} is not where its copy should be") from None
    except ObjectArchived:
        # Nothing is wrong with the store: the next process that reads this copy finds out its class.
        raise SourceBadError(f"the chunk {task.digest} has to be thawed before it can be copied") from None
    except (ObjectMismatch, DecodeError) as error:
        raise SourceBadError(f"the chunk {task.digest} was read from a copy that is not it: {error}") from None
    except StoreError as error:
        raise StoreFailedError(task.source_store_id, error) from error
    try:
        return _write(target, task, data)
    except (ObjectMissing, ObjectMismatch) as error:
        raise TargetBadError(f"the chunk {task.digest} is not in the store as it was written: {error}") from error
    except StoreError as error:
        raise StoreFailedError(task.target_store_id, error) from error


def settle_copy(context: ServiceContext, task: CopyTask, moved: Moved) -> bool:
    """Whether the lease still held. The copy is cold if it must be thawed before it can be read."""
    with context.database.transaction() as session:
        return lease.give_back(
            session,
            Copy,
            task.lease_token,
            *_made(task),
            state=kept_state(context, task.target_store_id, task.storage_class),
            proof=moved.proof,
            stored_digest=moved.stored_digest,
            version_id=moved.version_id,
            verified_at=database_now(session),
            read_after=select(Chunk.damages).where(Chunk.id == task.chunk_id).scalar_subquery(),
        )


def give_up_copy(context: ServiceContext, task: CopyTask, failure: BaseException) -> None:
    """Gives the lease back. A source that is not the chunk becomes suspect, so that it is read and marked; a target
    that is not what was written is bad, and the next try writes another generation."""
    state = CopyState.BAD if isinstance(failure, TargetBadError) else CopyState.COPYING
    with context.database.transaction() as session:
        lease.give_back(session, Copy, task.lease_token, *_made(task), state=state)
        if isinstance(failure, SourceBadError):
            session.execute(
                update(Copy)
                .where(Copy.id == task.source_copy_id, Copy.state.in_((CopyState.VERIFIED, CopyState.COLD)))
                .values(state=CopyState.SUSPECT, **lease.ended())
            )


def copy_now(context: ServiceContext, task: CopyTask, on_bytes: Callable[[int], None] = lambda _: None) -> bool:
    """All of it after `begin_copy`: whether the copy is there now and settled. Raises what `move_bytes` does, with the
    lease given back."""
    try:
        moved = move_bytes(context, task, on_bytes)
    except BaseException as failure:
        give_up_copy(context, task, failure)
        raise
    return settle_copy(context, task, moved)


def _made(task: CopyTask) -> tuple[ColumnElement[bool], ...]:
    return Copy.id == task.copy_id, Copy.state == CopyState.COPYING


def _at_work(copy: Copy, now: datetime) -> bool:
    return copy.state == CopyState.COPYING and lease.is_taken(copy, now)


def _can_be_taken_up(copy: Copy, source: Copy) -> bool:
    """What a dead worker left, if the same bytes are to be written: at one key there is one content."""
    same = (copy.codec, copy.stored_digest, copy.stored_bytes) == (
        source.codec,
        source.stored_digest,
        source.stored_bytes,
    )
    return copy.state == CopyState.COPYING and same


def _read(source: Store, task: CopyTask, on_bytes: Callable[[int], None]) -> bytes:
    pieces: list[bytes] = []
    size = 0
    for piece in source.open_read(task.source_key):
        size += len(piece)
        if size > task.stored_bytes:
            break
        on_bytes(len(piece))
        pieces.append(piece)
    if size != task.stored_bytes:
        raise ObjectMismatch("it has another size")
    digest = hashlib.sha256()
    for block in _chunk_bytes(task, pieces):
        digest.update(block)
    if digest.hexdigest() != task.digest:
        raise ObjectMismatch("it has other bytes")
    return b"".join(pieces)


def _chunk_bytes(task: CopyTask, pieces: list[bytes]) -> Iterator[bytes | memoryview]:
    """As a reader sees them: what is stored encoded proves nothing by its own digest."""
    return iter(pieces) if task.codec is Codec.RAW else decode(task.codec, task.chunk_bytes, iter(pieces))


def _write(target: Store, task: CopyTask, data: bytes) -> Moved:
    stored_digest = hashlib.sha256(data).hexdigest()
    if time.monotonic() >= task.ends_at:
        raise LeaseOverError(f"the chunk {task.digest} took longer to read than its lease")
    facts = target.put_bytes(task.target_key, data, storage_class=task.storage_class)
    if facts.bytes != len(data) or facts.sha256 not in (None, stored_digest):
        raise ObjectMismatch("another object is under its key")
    proof = proof_of(facts, target.capabilities)
    if proof is Proof.UNPROVEN:
        found = hashlib.sha256()
        for piece in target.open_read(task.target_key):
            found.update(piece)
        if found.hexdigest() != stored_digest:
            raise ObjectMismatch("it has other bytes")
        proof = Proof.READ
    return Moved(stored_digest, proof, facts.version_id)
