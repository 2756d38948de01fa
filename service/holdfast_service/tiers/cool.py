"""A due checkpoint's chunks get a copy in the colder place; the hot ones go once that is settled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import structlog
from sqlalchemy import exists, or_, select, text, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState, Proof
from holdfast_service.audit.record import Actor
from holdfast_service.context import ServiceContext
from holdfast_service.copies.cold import note_archived, note_class, store_says
from holdfast_service.copies.copy_chunk import (
    CopyFailure,
    CopyTask,
    LeaseOverError,
    Moved,
    SourceBadError,
    StoreFailedError,
    TargetBadError,
    begin_copy,
    give_up_copy,
    move_bytes,
    settle_copy,
)
from holdfast_service.copies.corruption import lock_users, mark_cold
from holdfast_service.copies.predicates import PROVEN
from holdfast_service.copies.read_back import Claim, Finding, claim_first, let_go, read_back, settle
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import note_change
from holdfast_service.db.lease import end_locked, has_run_out
from holdfast_service.db.tables.core import TO_COOL, Checkpoint, Chunk, Copy
from holdfast_service.stores.base import (
    ClassedStore,
    ClassFacts,
    ObjectArchived,
    ObjectMismatch,
    ObjectMissing,
    StoreError,
)
from holdfast_service.tiers.movable import (
    Place,
    classed_store,
    hotter_copy,
    in_use,
    may_be_left,
    needed_by,
    not_kept_back,
    place_of,
    wanted_hotter,
)

CONTROLLER = Actor.controller("tiers")


def could_go(session: Session, context: ServiceContext, chunk_ids: Collection[int], place: Place) -> Sequence[int]:
    """Those of the chunks whose hot copy nothing keeps, if only the place has a good one."""
    kept_back = not_kept_back(database_now(session))
    statement = select(Copy.chunk_id).where(Copy.chunk_id.in_(chunk_ids), hotter_copy(context, place), kept_back)
    return session.scalars(statement.distinct().order_by(Copy.chunk_id)).all()


def still_there(context: ServiceContext, chunk_id: int, place: Place, on_bytes: Callable[[int], None]) -> int | None:
    """Checks again a copy in the colder place that was not made just now, before the hot one goes in favour of it: its
    last check may be months ago, and the hot copy may be the only good one. The copy's id if it was found good now,
    else None; None also while another process works on it. Raises StoreError if the store cannot tell.

        claim its row (it stays what it is) -> the store's own class, size and SHA-256, or else read and hash it
          -> good, or marked bad, and the hot one stays
    """
    claimed = context.database.run(lambda session: _claim(session, context, chunk_id, place))
    if claimed is None:
        return None
    try:
        good = _is_good(context, claimed, place, on_bytes)
    except StoreError:
        let_go(context, claimed)
        raise
    return claimed.copy_id if good else None


def _claim(session: Session, context: ServiceContext, chunk_id: int, place: Place) -> Claim | None:
    free = has_run_out(Copy.leased_until, database_now(session))
    seconds = context.settings.chunk_lease_seconds
    return claim_first(session, Copy.chunk_id == chunk_id, place.holds(Copy), free, seconds=seconds)


def _is_good(context: ServiceContext, claimed: Claim, place: Place, on_bytes: Callable[[int], None]) -> bool:
    says = store_says(context, claimed)
    finding = None if says is None else says.finding
    # Whatever class the cold store keeps it in is its own affair.
    moved = says is not None and place.storage_class not in (None, says.storage_class)
    if says is not None and moved and finding in (None, Finding.GOOD):
        note_class(context, claimed, says.storage_class, CONTROLLER)
        return False
    if finding is Finding.GOOD:
        let_go(context, claimed)  # no process has read its bytes
        return True
    if finding is None:
        try:
            finding = read_back(context, claimed, on_bytes)
        except ObjectArchived:
            finding = note_archived(context, claimed, CONTROLLER)
    if finding is not None:
        settle(context, claimed, finding, CONTROLLER)
    return finding is Finding.GOOD


@dataclass(frozen=True)
class _Task:
    """`stored_digest` is set if the source is proven, so that the store may copy it unread."""

    copy: CopyTask
    stored_digest: str | None


@dataclass(frozen=True)
class Made:
    """A copy that this process has just made."""

    copy_id: int
    chunk_id: int
    bytes: int


def move_chunk(context: ServiceContext, chunk_id: int, place: Place, on_bytes: Callable[[int], None]) -> Made | None:
    """Gives a chunk a settled, proven copy in a colder place; the hot one stays (see `retire`). What was made; None if
    there was nothing to do, or another process does it. Raises what `move_bytes` does, with the lease given back.

    Within a bucket the store copies by itself (CopyObject); from folder to folder, and if the store does not hash what
    it copies, the bytes go through this process. Either way the row comes first and is settled by its lease (protocol
    rule row-before-copy): a process that dies in between leaves a `copying` row, which the next one takes up or the
    collector deletes.
    """
    task = context.database.run(lambda session: _begin(session, context, chunk_id, place))
    if task is None:
        return None
    try:
        moved = _copy(context, task, place, on_bytes)
    except BaseException as failure:
        give_up_copy(context, task.copy, failure)
        raise
    made = Made(task.copy.copy_id, chunk_id, task.copy.stored_bytes)
    return made if settle_copy(context, task.copy, moved) else None


def _begin(session: Session, context: ServiceContext, chunk_id: int, place: Place) -> _Task | None:
    copy = begin_copy(session, context, chunk_id, place.store_id, storage_class=place.storage_class)
    if copy is None:
        return None
    source = session.get_one(Copy, copy.source_copy_id)
    return _Task(copy, source.stored_digest if source.proof in PROVEN else None)


def _copy(context: ServiceContext, task: _Task, place: Place, on_bytes: Callable[[int], None]) -> Moved:
    store = classed_store(context, place.store_id)
    within = place.storage_class is not None and task.copy.source_store_id == place.store_id
    # What is archived cannot be read back to prove it: whoever copies it hashes it, the store or this process for it.
    hashed = _hashes(context, place) or place.is_cold
    if store is not None and within and task.stored_digest is not None and hashed:
        return _copy_within(store, task.copy, place, task.stored_digest)
    return move_bytes(context, task.copy, on_bytes)


def _hashes(context: ServiceContext, place: Place) -> bool:
    store = context.store_of(place.store_id)
    found = None if store is None else store.capabilities
    return found is not None and found.sha256_enforced and found.sha256_reported


def _copy_within(store: ClassedStore, task: CopyTask, place: Place, stored_digest: str) -> Moved:
    assert place.storage_class is not None
    try:
        told: ClassFacts | None = None
        with suppress(ObjectMissing):
            # A process that died may have done it: a bucket with versions would keep the second copy for ever.
            told = store.class_facts(task.target_key)
        if told is None or told.facts.sha256 is None:
            # Azure does not say what is there. Its copy compares the bytes, and leaves them if they are right.
            told = store.copy_object(task.source_key, task.target_key, place.storage_class)
    except ObjectMissing:
        raise SourceBadError(f"the chunk {task.digest} is not where its copy should be") from None
    except ObjectMismatch as error:
        raise TargetBadError(str(error)) from error
    except StoreError as error:
        raise StoreFailedError(task.target_store_id, error) from error
    found = (told.storage_class, told.facts.bytes, told.facts.sha256)
    if found != (place.storage_class, task.stored_bytes, stored_digest):
        raise TargetBadError(
            f"the store says of its copy of the chunk {task.digest} in {place.target}: class {told.storage_class}, "
            f"{told.facts.bytes} bytes, SHA-256 {told.facts.sha256}; that is not what was copied"
        )
    return Moved(stored_digest, Proof.STORE_SHA256, told.facts.version_id)


@dataclass(frozen=True)
class Retired:
    copies: int = 0
    bytes: int = 0
    cold_checkpoints: tuple[str, ...] = ()


def retire(context: ServiceContext, there: Mapping[int, int], place: Place) -> Retired:
    """Takes the hot copies of chunks away that have a settled copy in a colder place (rules present-is-referenced,
    read-lease and row-before-copy): of these chunks, what may go now. Each has the copy in the place that was made or
    checked just now. Repeatable.

    The locks are the guard: all users of the chunks, then the chunks, which a negotiation excludes; only then, in later
    statements, the service asks again who wants them hot. In the same transaction the copy becomes `deleting`, and no
    client is told `present` or given a URL any more, and the checkpoints become cold, and no client is told to restore
    them. The bytes stay until the last issued URL has run out: `leased_until` is that moment, and the collector deletes
    copies that are `deleting` and free of a lease. A process that dies before the commit has changed nothing.
    """
    return context.database.run(lambda session: _retire(session, context, there, place))


def _retire(session: Session, context: ServiceContext, there: Mapping[int, int], place: Place) -> Retired:
    lock_users(session, *there)
    locked = session.scalars(
        select(Chunk.id).where(Chunk.id.in_(there.keys())).order_by(Chunk.digest).with_for_update()
    ).all()
    # The copies in the place as well: none is found bad between the look at it and the end of this.
    session.execute(select(Copy.id).where(Copy.chunk_id.in_(locked)).order_by(Copy.id).with_for_update()).all()
    now = database_now(session)
    # A later statement: it sees what the others committed while this waited for the locks.
    copies = session.scalars(
        select(Copy)
        .join(Chunk, Chunk.id == Copy.chunk_id)
        .where(
            Chunk.id.in_(locked),
            hotter_copy(context, place),
            may_be_left(place, now, tuple(there.values())),
            ~wanted_hotter(place),
            ~in_use(context, place, now),
        )
        .order_by(Copy.id)
        .with_for_update(of=Copy),
        execution_options={"populate_existing": True},
    ).all()
    # A client that was given a URL for it just now may use it for so long.
    outlived_at = now + timedelta(seconds=context.settings.ticket_seconds)
    for copy in copies:
        copy.state = CopyState.DELETING
        end_locked(copy, outlived_at)
    if copies:
        note_change(session, f"{len(copies)} copies were left for colder ones")
    session.flush()
    gone = {copy.chunk_id for copy in copies}
    cold: list[str] = []
    if gone and place.is_cold:
        cold = mark_cold(session, gone, actor=CONTROLLER, target=place.target)
    return Retired(len(copies), sum(copy.stored_bytes for copy in copies), tuple(cold))


_CHUNKS_AT_ONCE = 64
# Each may hold a stored chunk in memory.
_THREADS = 4
_AGAIN = timedelta(days=1)
# A reader or an upload uses it: that ends by itself, sooner than a day.
_AGAIN_IF_IN_USE = timedelta(minutes=10)

_log = structlog.get_logger("holdfast.tiers")


@dataclass
class Cooled:
    """`moved` are copies made, `retired` hot ones that go."""

    moved: int = 0
    moved_bytes: int = 0
    retired: int = 0
    retired_bytes: int = 0
    failed: int = 0
    error: str | None = None
    unavailable: bool = False
    cold: set[str] = field(default_factory=set)


def due_checkpoints(session: Session, limit: int) -> Sequence[tuple[str, str]]:
    """(id, where it belongs), those that were never gone through first."""
    now = database_now(session)
    rows = session.execute(
        select(Checkpoint.id, Checkpoint.tier_wanted)
        .where(text(TO_COOL), or_(Checkpoint.tier_checked_at.is_(None), Checkpoint.tier_checked_at <= now - _AGAIN))
        .order_by(Checkpoint.tier_checked_at.nulls_first(), Checkpoint.id)
        .limit(limit)
    )
    return [(row.id, row.tier_wanted) for row in rows]


def cool_checkpoint(
    context: ServiceContext,
    checkpoint_id: str,
    target: str,
    *,
    on_bytes: Callable[[int], None],
    go_on: Callable[[], bool],
) -> Cooled:
    """Goes through a due checkpoint's chunks, a portion at a time: each gets a copy in the colder place, and loses its
    hot copy if it has one there. It ends when all chunks were checked, or `go_on` says no: then the checkpoint stays
    due. A finished checkpoint is checked again a day later, because what kept a chunk hot may have ended."""
    cooled = Cooled()
    place = place_of(context, target)
    if place is None:
        cooled.failed, cooled.error = 1, "No cold store is attached: set HOLDFAST_COLD_STORE, or change the policy."
        return cooled
    after = 0
    while go_on() and not cooled.unavailable:
        with context.database.read() as session:
            chunk_ids = _movable(session, context, checkpoint_id, place, after)
        if not chunk_ids:
            break
        after = chunk_ids[-1]
        made = _move(context, chunk_ids, place, cooled, on_bytes)
        there = made | _look(context, set(chunk_ids) - made.keys(), place, cooled, on_bytes)
        retired = retire(context, there, place)
        cooled.retired += retired.copies
        cooled.retired_bytes += retired.bytes
        cooled.cold.update(retired.cold_checkpoints)
    else:
        return cooled
    if not cooled.failed:
        context.database.run(lambda session: _settle(session, context, checkpoint_id, place))
    return cooled


def _movable(
    session: Session,
    context: ServiceContext,
    checkpoint_id: str,
    place: Place,
    after: int,
) -> list[int]:
    """Chunks behind `after` that are hotter than the place and that no checkpoint wants so."""
    statement = (
        select(Chunk.id)
        .where(
            Chunk.id > after,
            needed_by(checkpoint_id),
            exists().where(Copy.chunk_id == Chunk.id, hotter_copy(context, place)),
            ~wanted_hotter(place),
            ~in_use(context, place, database_now(session)),
        )
        .order_by(Chunk.id)
        .limit(_CHUNKS_AT_ONCE)
    )
    return list(session.scalars(statement))


def _move(
    context: ServiceContext, chunk_ids: Sequence[int], place: Place, cooled: Cooled, on_bytes: Callable[[int], None]
) -> dict[int, int]:
    """By chunk, the copy that was made just now."""

    def move(chunk_id: int) -> Made | CopyFailure | None:
        try:
            return move_chunk(context, chunk_id, place, on_bytes)
        except (SourceBadError, TargetBadError, LeaseOverError, StoreFailedError) as failure:
            return failure

    made = {}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="holdfast-cool") as threads:
        for outcome in threads.map(move, chunk_ids):
            if isinstance(outcome, Made):
                made[outcome.chunk_id] = outcome.copy_id
                cooled.moved += 1
                cooled.moved_bytes += outcome.bytes
            elif outcome is not None:
                cooled.failed += 1
                cooled.error = str(outcome)
                cooled.unavailable = cooled.unavailable or isinstance(outcome, StoreFailedError)
                _log.warning("move_failed", place=place.target, reason=str(outcome))
    return made


def _look(
    context: ServiceContext, chunk_ids: Collection[int], place: Place, cooled: Cooled, on_bytes: Callable[[int], None]
) -> dict[int, int]:
    """By chunk, the copy that is in the place from before, and is still good. What is not is marked."""
    there: dict[int, int] = {}
    if cooled.unavailable or not chunk_ids:
        return there
    with context.database.read() as session:
        waiting = could_go(session, context, chunk_ids, place)
    for chunk_id in waiting:
        try:
            copy_id = still_there(context, chunk_id, place, on_bytes)
        except StoreError as error:
            cooled.failed, cooled.error, cooled.unavailable = cooled.failed + 1, str(error), True
            _log.warning("place_not_asked", place=place.target, reason=str(error))
            break
        if copy_id is not None:
            there[chunk_id] = copy_id
    return there


def _settle(session: Session, context: ServiceContext, checkpoint_id: str, place: Place) -> None:
    """All of it was looked at. What is only in use, or being moved by another process, makes it due again sooner."""
    now = database_now(session)
    waits = session.scalar(
        select(
            exists().where(
                needed_by(checkpoint_id),
                Copy.chunk_id == Chunk.id,
                hotter_copy(context, place),
                ~wanted_hotter(place),
            )
        )
    )
    session.execute(
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.tier_wanted == place.target)
        .values(tier_checked_at=now - _AGAIN + _AGAIN_IF_IN_USE if waits else now),
        execution_options={"synchronize_session": False},
    )
