"""Gives a chunk a settled, proven copy in a colder place. The hot one stays (see retire.py).

Within a bucket the store copies by itself (CopyObject); from folder to folder, and where the store does not hash what
it copies, the bytes go through this process. Either way the row comes first and is settled by its lease (protocol
rule 28): a process that dies in between leaves a `copying` row, which the next one takes up or the collector deletes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy.orm import Session

from holdfast_protocol.states import Proof
from holdfast_service.catalog.copies import PROVEN
from holdfast_service.catalog.copying import (
    CopyTask,
    Moved,
    SourceBadError,
    StoreFailedError,
    TargetBadError,
    begin_copy,
    give_up_copy,
    move_bytes,
    settle_copy,
)
from holdfast_service.catalog.tables import Copy
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import ObjectMismatch, ObjectMissing, StoreError
from holdfast_service.stores.storage_classes import ClassedStore
from holdfast_service.tiers.movable import Place, classed_store


@dataclass(frozen=True)
class _Task:
    """`stored_digest` is set where the source is proven, so that the store may copy it unread."""

    copy: CopyTask
    stored_digest: str | None


@dataclass(frozen=True)
class Made:
    """A copy that this process has just made."""

    copy_id: int
    chunk_id: int
    bytes: int


def move_chunk(context: ServiceContext, chunk_id: int, place: Place, on_bytes: Callable[[int], None]) -> Made | None:
    """What was made; None if there was nothing to do, or somebody else does it. Raises what `move_bytes`
    does, with the lease given back."""
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
    if store is not None and within and task.stored_digest is not None and _hashes(context, place):
        return _copy_within(store, task.copy, place, task.stored_digest)
    return move_bytes(context, task.copy, on_bytes)


def _hashes(context: ServiceContext, place: Place) -> bool:
    store = context.store_of(place.store_id)
    found = None if store is None else store.capabilities
    return found is not None and found.sha256_enforced and found.sha256_reported


def _copy_within(store: ClassedStore, task: CopyTask, place: Place, stored_digest: str) -> Moved:
    assert place.storage_class is not None
    try:
        try:
            # Somebody who died may have done it: a bucket with versions would keep the second copy for ever.
            told = store.class_facts(task.target_key)
        except ObjectMissing:
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
