"""The service reads a copy's bytes itself and settles what it found: after a client's report, if only a client has
hashed it yet, and to scrub.

    claim (a lease on the copy's row) -> read_back (no transaction, 1 MiB at a time) -> settle (only with that lease)

A copy is read from its own store. What is stored encoded is decoded on the way, as a reader would: only that proves
that it is the chunk.

A store that does not answer, or is not this catalog's, proves nothing: then the lease is given back and nothing is
marked (rule report-is-suspicion). The same holds for a store that lacks most of what it is asked for: that is a mount,
and no loss.

A bad copy is checked again, ever more seldom, and whenever a person asks: the store may have been wrong, or a person
may have put the object back. If its bytes are good then, it is a copy like any other (rule marks-are-rechecked).
"""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, TextClause, and_, exists, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from holdfast_protocol.codecs import Codec, DecodeError, decode
from holdfast_protocol.states import CopyState, Proof
from holdfast_protocol.tiers import ARCHIVED
from holdfast_service.attached_stores.ownership import ForeignStoreError, misplaced, read_marker
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.context import ServiceContext
from holdfast_service.copies.corruption import lock_users, mark_cold, mark_readable, mark_users, users_of
from holdfast_service.copies.predicates import KEPT, kept_state, object_key, stays_as_read
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Chunk, Copy
from holdfast_service.stores.base import (
    ObjectArchived,
    ObjectKey,
    ObjectMismatch,
    ObjectMissing,
    Store,
    StoreError,
    StoreUnavailable,
)

_FIRST_LOOK = timedelta(minutes=1)
_LONGEST_PAUSE = timedelta(days=28)
# A lease that ends later was made by a clock that was ahead.
_LONGEST_LEASE = timedelta(hours=6)
# How many other objects are asked for when one is missing, and how many of them make a mount's fault.
_SAMPLE = 24
_MANY = 8

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
    """A copy that this process is reading under a lease."""

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
    lease_token: str
    proof_if_good: Proof
    """By reading: final, or to be repeated when no ticket can overwrite it any more (rule no-ticket-reuse)."""


def copy_is_free(now: datetime) -> ColumnElement[bool]:
    """Over `copies`: no process has it on lease."""
    return or_(lease.has_run_out(Copy.leased_until, now), Copy.leased_until > now + _LONGEST_LEASE)


def found_bad() -> ColumnElement[bool]:
    """Over `copies`: once good, then found bad and not repaired; and it can be read again at once."""
    at_once = or_(Copy.storage_class.is_(None), Copy.storage_class.not_in(ARCHIVED))
    return and_(Copy.state == CopyState.BAD, Copy.bad_at.is_not(None), Copy.repaired_at.is_(None), at_once)


def look_is_due(copy: Copy, now: datetime) -> bool:
    """Whether a bad copy is to be read again by now. Pure. What was found in the future was found by a wrong clock."""
    ahead = copy.bad_at is not None and copy.bad_at > now
    return copy.storage_class not in ARCHIVED and (copy.look_at is None or copy.look_at <= now or ahead)


def claim_bad(session: Session, context: ServiceContext, copy_id: int) -> Claim | None:
    """To read it again. The holder of its lease loses it: the lease may be a pause, and two readers do no harm. None if
    it is bad no more, or another transaction has its row this moment."""
    return claim_first(session, Copy.id == copy_id, found_bad(), seconds=context.settings.chunk_lease_seconds)


def look_again(
    context: ServiceContext, claimed: Claim, actor: Actor, on_bytes: Callable[[int], None] = lambda _: None
) -> Finding | None:
    """What a bad copy is now, settled; None if it must be thawed first, or another process checks. Raises StoreError,
    and has given the lease back then."""
    try:
        finding = read_back(context, claimed, on_bytes)
    except ObjectArchived:
        let_go(context, claimed)
        return None
    except StoreError:
        let_go(context, claimed)
        raise
    return None if settle(context, claimed, finding, actor) is None else finding


def claim_copies(
    session: Session,
    *where: ColumnElement[bool] | TextClause,
    seconds: float,
    most: int,
    first: InstrumentedAttribute[Any] = Copy.id,
) -> list[Claim]:
    """The copies that `where` names with the least `first`, without what another process has locked. `where`
    says that they are free."""
    rows = session.execute(
        select(Copy, Chunk)
        .join(Chunk, Chunk.id == Copy.chunk_id)
        .where(*where)
        .order_by(first, Copy.id)
        .limit(most)
        .with_for_update(of=Copy, skip_locked=True)
    ).all()
    return [claim(session, chunk, copy, seconds=seconds) for copy, chunk in rows]


def claim_first(session: Session, *where: ColumnElement[bool], seconds: float) -> Claim | None:
    return next(iter(claim_copies(session, *where, seconds=seconds, most=1)), None)


def claim(session: Session, chunk: Chunk, copy: Copy, *, seconds: float) -> Claim:
    """The copy's row must be locked by the caller and free of another's lease."""
    token = lease.claim_locked(session, copy, seconds=seconds)
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
        state_before=CopyState(copy.state),
        lease_token=token,
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
    if finding is Finding.MISSING:
        refuse_emptied_store(context, store, claimed)
        finding = _read(store, claimed, on_bytes)
    return finding


def store_of_copy(context: ServiceContext, claimed: Claim) -> Store:
    """Raises StoreUnavailable for a store that this process does not have."""
    store = context.store_of(claimed.store_id)
    if store is None:
        raise StoreUnavailable("the copy's store is not attached to this service")
    return store


def refuse_wrong_store(context: ServiceContext, store: Store) -> None:
    """Nothing is in an unmounted folder, and other bytes are in another's bucket, or in another of our own stores: that
    is no finding about a copy.

    Raises StoreUnavailable.
    """
    others = [attached.store_id for attached in context.stores if attached.store is not store]
    marker = None
    with suppress(ObjectMissing, ForeignStoreError):
        marker = read_marker(store)
    if marker is not None and marker.is_of(others, context.catalog_id, context.epoch, context.claim):
        raise StoreUnavailable(misplaced(marker))
    if marker is None or marker.catalog_id != context.catalog_id:
        raise StoreUnavailable("the store does not hold this catalog's marker: is its disk or bucket mounted?")


def refuse_emptied_store(context: ServiceContext, store: Store, claimed: Claim) -> None:
    """Where most of what a store should have is missing too, its mount or its bucket is at fault, and no object.

    Raises StoreUnavailable. What is really gone altogether a person says, with `catalog check --confirm-missing`.
    """
    others = _some_others(context, claimed)
    missing = sum(_is_missing(store, key) for key in others)
    if is_emptied(len(others), missing):
        raise StoreUnavailable(
            f"{missing} of {len(others)} other objects that should be there are missing too: is its disk or bucket "
            "mounted? Nothing was marked. If they are really gone, say so with "
            "`holdfast catalog check --confirm-missing`"
        )


def _some_others(context: ServiceContext, claimed: Claim) -> list[ObjectKey]:
    """The keys of copies all over the store that are not known to be bad: neighbours may have gone together. Suspect
    ones too: a sweep suspects all that a stale mount lacks, and a raised epoch suspects all copies."""
    not_bad = Copy.state.in_((*KEPT, CopyState.SUSPECT))
    there = and_(Copy.store_id == claimed.store_id, not_bad, Copy.chunk_id != claimed.chunk_id)
    keys: dict[int, ObjectKey] = {}
    with context.database.read() as session:
        first, last = session.execute(select(func.min(Copy.id), func.max(Copy.id)).where(there)).one()
        for _ in range(_SAMPLE if first is not None else 0):
            row = session.execute(
                select(Copy, Chunk.digest)
                .join(Chunk, Chunk.id == Copy.chunk_id)
                .where(there, Copy.id >= first + secrets.randbelow(last - first + 1))
                .order_by(Copy.id)
                .limit(1)
            ).first()
            if row is not None:
                keys[row.Copy.id] = object_key(row.Copy.project_id, row.digest, row.Copy)
    return list(keys.values())


def _is_missing(store: Store, key: ObjectKey) -> bool:
    try:
        store.head(key)
    except ObjectMissing:
        return True
    except ObjectMismatch:
        return False
    return False


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

    A chunk's checkpoints are corrupt when its last copy was found bad: an unread one may be good. Before
    that the copies that were found bad earlier are checked again. When a bad copy is good again, the checkpoints that
    were cold for lack of it become hot; a process that dies just before that leaves them to a thaw.
    """
    if finding is not Finding.GOOD and claimed.state_before is not CopyState.BAD:
        _look_at_the_others(context, claimed, actor)
    while True:
        try:
            marked = context.database.run(lambda session: _settle(session, context, claimed, finding, actor=actor))
        except _UsedMeanwhileError:
            continue
        if marked is not None and finding is Finding.GOOD and claimed.state_before is CopyState.BAD:
            mark_readable(context.database, claimed.chunk_id, actor=actor)
        return marked


def let_go(context: ServiceContext, claimed: Claim) -> None:
    """Gives the lease back with nothing proven."""
    with context.database.transaction() as session:
        lease.give_back(session, Copy, claimed.lease_token, Copy.id == claimed.copy_id, state=claimed.state_before)


class _UsedMeanwhileError(Exception):
    """A checkpoint began to use the chunk before it was locked. It is known now, and the next try locks it too."""


def _look_at_the_others(context: ServiceContext, claimed: Claim, actor: Actor) -> None:
    """Until one of them is good. A store that does not answer now has said before that its copy is bad."""
    of_chunk = and_(Copy.chunk_id == claimed.chunk_id, Copy.id != claimed.copy_id)
    with context.database.read() as session:
        if session.scalar(select(exists().where(of_chunk, Copy.state.in_((*KEPT, CopyState.SUSPECT))))):
            return
        bad = session.scalars(
            select(Copy.id).where(of_chunk, found_bad(), Copy.store_id.in_(context.store_ids)).order_by(Copy.id)
        ).all()
    for copy_id in bad:
        again = context.database.run(partial(claim_bad, context=context, copy_id=copy_id))
        with suppress(StoreError):
            if again is not None and look_again(context, again, actor) is Finding.GOOD:
                return


def _settle(
    session: Session, context: ServiceContext, claimed: Claim, finding: Finding, *, actor: Actor
) -> list[str] | None:
    kept = kept_state(context, claimed.store_id, claimed.storage_class)
    gets_cold = kept is CopyState.COLD and claimed.state_before is not CopyState.COLD
    users = lock_users(session, claimed.chunk_id) if finding is not Finding.GOOD or gets_cold else set()
    chunk = session.execute(
        select(Chunk).where(Chunk.id == claimed.chunk_id).with_for_update(),
        execution_options={"populate_existing": True},
    ).scalar_one()
    was_bad = claimed.state_before is CopyState.BAD
    states = (CopyState.BAD,) if was_bad else _THERE
    copy = lease.locked(session, Copy, claimed.lease_token, Copy.id == claimed.copy_id, Copy.state.in_(states))
    if copy is None:
        return None
    lease.end_locked(copy)
    now = database_now(session)
    if finding is Finding.GOOD:
        copy.state, copy.proof, copy.verified_at, copy.read_after = kept, claimed.proof_if_good, now, chunk.damages
        if was_bad:
            _forget_damage(session, claimed, copy, actor)
        session.flush()
        if gets_cold and (copy.readable_until is None or copy.readable_until <= now):
            mark_cold(session, [claimed.chunk_id], actor=actor)
        return []
    if users_of(session, claimed.chunk_id) - users:
        raise _UsedMeanwhileError
    copy.finding = finding.value
    if was_bad:
        # By a clock that was ahead it may have been found tomorrow.
        copy.bad_at, copy.looks = min(copy.bad_at or now, now), copy.looks + 1
    else:
        chunk.damages += 1
        copy.state, copy.bad_at, copy.damage, copy.looks = CopyState.BAD, now, chunk.damages, 0
        record_event(
            session,
            actor,
            "copy.bad",
            project_id=copy.project_id,
            reason=f"The copy {finding.value}.",
            before={"state": claimed.state_before.value},
            after={"state": copy.state, "chunk": claimed.digest, "copy": copy.id, "store": copy.store_id},
        )
    copy.look_at = now + pause_before_look(copy.looks)
    session.flush()
    why = f"The chunk {claimed.digest} {finding.value}."
    corrupt = mark_users(session, claimed.chunk_id, why, actor=actor)
    # What is left of it may have to be thawed first.
    mark_cold(session, [claimed.chunk_id], actor=actor)
    return corrupt


def _forget_damage(session: Session, claimed: Claim, copy: Copy, actor: Actor) -> None:
    record_event(
        session,
        actor,
        "copy.return",
        project_id=copy.project_id,
        reason=f"The copy that {copy.finding} was read again and has the right bytes.",
        before={"state": CopyState.BAD.value, "bad_at": None if copy.bad_at is None else copy.bad_at.isoformat()},
        after={"state": copy.state, "chunk": claimed.digest, "copy": copy.id, "store": copy.store_id},
    )
    copy.bad_at = copy.finding = copy.damage = copy.look_at = None
    copy.looks = 0


def pause_before_look(looks: int) -> timedelta:
    """How long after it was read and found bad again a copy is read once more. Pure. It grows, so that what is lost for
    good costs a few reads and not one a day; what was away for some time is seen back within four times as long."""
    return min(_LONGEST_PAUSE, _FIRST_LOOK * (1 << 2 * min(looks, 16)))


def is_emptied(asked: int, missing: int) -> bool:
    """Whether so many missing ones of those that were asked for say that the store is at fault. Pure. A few prove
    nothing: all of a small run may have been removed."""
    return missing >= _MANY and missing > asked / 2
