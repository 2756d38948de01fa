"""The service reads a copy's bytes itself: after a client's report, where nobody has hashed it yet, and to scrub.

    claim (a lease on the copy's row) -> read_back (no transaction, 1 MiB at a time) -> settle (only with that lease)

A copy is read from its own store. What is stored encoded is decoded on the way, as a reader would: only that proves
that it is the chunk.

A store that does not answer, or is not this catalog's, proves nothing: then the lease is given back and nothing is
marked (protocol rule 22).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from holdfast_protocol.codecs import Codec
from holdfast_protocol.decoding import DecodeError, decode
from holdfast_protocol.states import CopyState, Proof
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.cold_place import kept_state
from holdfast_service.catalog.copies import object_key, stays_as_read
from holdfast_service.catalog.corruption import lock_users, mark_users, users_of
from holdfast_service.catalog.going_cold import mark_cold
from holdfast_service.catalog.store_row import ForeignStoreError, read_marker
from holdfast_service.catalog.tables import Chunk, Copy
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import ObjectKey, ObjectMismatch, ObjectMissing, Store, StoreUnavailable

READABLE = (CopyState.VERIFIED, CopyState.SUSPECT)
"""What can be read back anywhere. What is cold must be thawed first, except in a cold store that the service reads."""
_THERE = (*READABLE, CopyState.COLD, CopyState.THAWING)


class Finding(StrEnum):
    GOOD = "has the right bytes"
    MISSING = "is not in the store"
    WRONG_SIZE = "has another size in the store"
    WRONG_BYTES = "has other bytes in the store"
    NOT_DECODABLE = "cannot be decoded from what is in the store"


@dataclass(frozen=True)
class Claim:
    """A copy that this process is reading until `leased_until`, which is the lease's token."""

    copy_id: int
    chunk_id: int
    store_id: int
    digest: str
    chunk_bytes: int
    key: ObjectKey
    codec: Codec
    stored_digest: str
    stored_bytes: int
    storage_class: str | None
    state_before: CopyState
    leased_until: datetime
    proof_if_good: Proof
    """By reading: final, or to be repeated when no ticket can overwrite it any more (protocol rule 37)."""


def claim(session: Session, chunk: Chunk, copy: Copy, leased_until: datetime, *, suspect: bool) -> Claim:
    """The copy's row must be locked by the caller and free of another's lease."""
    before = CopyState(copy.state)
    copy.leased_until = leased_until
    if suspect:
        copy.state = CopyState.SUSPECT
    session.flush()
    return Claim(
        copy_id=copy.id,
        chunk_id=chunk.id,
        store_id=copy.store_id,
        digest=chunk.digest,
        chunk_bytes=chunk.bytes,
        key=object_key(copy.project_id, chunk.digest, copy),
        codec=Codec(copy.codec),
        stored_digest=copy.stored_digest,
        stored_bytes=copy.stored_bytes,
        storage_class=copy.storage_class,
        state_before=before,
        leased_until=leased_until,
        proof_if_good=Proof.READ if stays_as_read(copy, database_now(session)) else Proof.READ_EARLY,
    )


def read_back(context: ServiceContext, claimed: Claim, on_bytes: Callable[[int], None] = lambda _: None) -> Finding:
    """Reads the copy and compares size and SHA-256. Raises StoreError if its store cannot tell, or is not attached.

    `on_bytes` is told of each piece's size, and may slow the reading down.
    """
    store = store_of_copy(context, claimed)
    finding = _read(store, claimed, on_bytes)
    if finding is not Finding.GOOD:
        refuse_wrong_store(context, store)
    return finding


def store_of_copy(context: ServiceContext, claimed: Claim) -> Store:
    """Raises StoreUnavailable for a store that this process does not have."""
    store = context.store_of(claimed.store_id)
    if store is None:
        raise StoreUnavailable("the copy's store is not attached to this service")
    return store


def refuse_wrong_store(context: ServiceContext, store: Store) -> None:
    """Nothing is in an unmounted folder, and other bytes are in another's bucket: that is no finding about a copy.

    Raises StoreUnavailable.
    """
    try:
        ours = read_marker(store).catalog_id == context.catalog_id
    except (ObjectMissing, ForeignStoreError):
        ours = False
    if not ours:
        raise StoreUnavailable("the store does not hold this catalog's marker: is its disk or bucket mounted?")


def _read(store: Store, claimed: Claim, on_bytes: Callable[[int], None]) -> Finding:
    digest, size = hashlib.sha256(), 0

    def stored() -> Iterator[bytes]:
        nonlocal size
        for piece in store.open_read(claimed.key):
            size += len(piece)
            on_bytes(len(piece))
            yield piece

    pieces = stored()
    try:
        if claimed.codec is Codec.RAW:
            for piece in pieces:
                digest.update(piece)
        else:
            for block in decode(claimed.codec, claimed.chunk_bytes, pieces):
                digest.update(block)
            deque(pieces, maxlen=0)  # what is left behind the frame counts as well
    except DecodeError:
        return Finding.NOT_DECODABLE
    except ObjectMissing:
        return Finding.MISSING
    except ObjectMismatch:
        return Finding.WRONG_SIZE
    if size != claimed.stored_bytes:
        return Finding.WRONG_SIZE
    return Finding.GOOD if digest.hexdigest() == claimed.digest else Finding.WRONG_BYTES


def settle(context: ServiceContext, claimed: Claim, finding: Finding, actor: Actor) -> list[str] | None:
    """Writes down what was found; the ids of the checkpoints that are corrupt by it. None: the lease was lost.

    A chunk's checkpoints are corrupt when its last copy was found bad: one that is not read yet may be good.
    """
    while True:
        try:
            return context.database.run(lambda session: _settle(session, context, claimed, finding, actor=actor))
        except _UsedMeanwhileError:
            continue


def let_go(context: ServiceContext, claimed: Claim) -> None:
    """Gives the lease back with nothing proven."""
    with context.database.transaction() as session:
        session.execute(
            update(Copy)
            .where(Copy.id == claimed.copy_id, Copy.leased_until == claimed.leased_until)
            .values(state=claimed.state_before, leased_until=None)
        )


class _UsedMeanwhileError(Exception):
    """Somebody began to use the chunk before it was locked. Now it is known who; the next try locks them too."""


def _settle(
    session: Session, context: ServiceContext, claimed: Claim, finding: Finding, *, actor: Actor
) -> list[str] | None:
    kept = kept_state(context, claimed.store_id, claimed.storage_class)
    gets_cold = kept is CopyState.COLD and claimed.state_before is not CopyState.COLD
    users = lock_users(session, claimed.chunk_id) if finding is not Finding.GOOD or gets_cold else set()
    session.execute(select(Chunk.id).where(Chunk.id == claimed.chunk_id).with_for_update())
    copy = session.execute(
        select(Copy).where(Copy.id == claimed.copy_id).with_for_update(),
        execution_options={"populate_existing": True},
    ).scalar_one()
    if copy.leased_until != claimed.leased_until or copy.state not in _THERE:
        return None
    copy.leased_until = None
    now = database_now(session)
    if finding is Finding.GOOD:
        copy.state, copy.proof, copy.verified_at = kept, claimed.proof_if_good, now
        session.flush()
        if gets_cold and (copy.readable_until is None or copy.readable_until <= now):
            mark_cold(session, [claimed.chunk_id], context.store_ids, actor=actor)
        return []
    if users_of(session, claimed.chunk_id) - users:
        raise _UsedMeanwhileError
    copy.state, copy.bad_at, copy.finding = CopyState.BAD, now, finding.value
    record_event(
        session,
        actor,
        "copy.bad",
        project_id=copy.project_id,
        reason=f"The copy {finding.value}.",
        before={"state": claimed.state_before.value},
        after={"state": copy.state, "chunk": claimed.digest, "copy": copy.id, "store": copy.store_id},
    )
    session.flush()
    why = f"The chunk {claimed.digest} {finding.value}."
    corrupt = mark_users(session, claimed.chunk_id, why, actor=actor)
    # What is left of it may have to be thawed first.
    mark_cold(session, [claimed.chunk_id], context.store_ids, actor=actor)
    return corrupt
