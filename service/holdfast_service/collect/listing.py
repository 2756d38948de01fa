"""What is in a store of one project, compared with the catalog, both ways.

The order is the guard: first the object is listed, and the catalog is asked afterwards. A copy's row is committed
before its first ticket is handed out, and stays until its last PUT can no longer land; so an object whose row is not
there after it was seen has none. The other way round, a row is only called missing if it was verified before the
listing began and the store says of this very object that it is not there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import select, update

from holdfast_protocol.states import CopyState
from holdfast_service.attached_store import AttachedStore
from holdfast_service.catalog.copies import object_key
from holdfast_service.catalog.tables import Chunk, Copy
from holdfast_service.collect.breaker import Amount
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import ObjectKey, ObjectMissing, StoredObject

BATCH = 1000
_EXPECTED = (CopyState.VERIFIED, CopyState.COLD)


@dataclass
class Inventory:
    there: Amount = field(default_factory=Amount)
    orphans: list[StoredObject] = field(default_factory=list)
    seen: set[int] = field(default_factory=set, repr=False)
    """The first half of each generation: 64 random bits tell a project's objects apart, and are small enough to keep
    for millions."""


def take_inventory(
    context: ServiceContext, attached: AttachedStore, project_id: str, on_listed: Callable[[int], object]
) -> Inventory:
    """Raises StoreError: a listing that is not whole proves nothing."""
    inventory = Inventory()
    listed = attached.store.list_objects(project_id)
    while batch := list(itertools.islice(listed, BATCH)):
        inventory.there = Amount(
            inventory.there.objects + len(batch), inventory.there.bytes + sum(each.bytes for each in batch)
        )
        inventory.seen.update(_short(each.key.generation) for each in batch)
        inventory.orphans += unknown_of(context, attached.store_id, batch)
        on_listed(len(batch))
    return inventory


def unknown_of(context: ServiceContext, store_id: int, objects: Sequence[StoredObject]) -> list[StoredObject]:
    """Those of the objects, of one project, that have no row at this moment. A row that says `gone` is none: what is
    there nevertheless came later than everybody could expect."""
    if not objects:
        return []
    with context.database.read() as session:
        rows = session.execute(
            select(Chunk.digest, Copy.generation)
            .join(Copy, Copy.chunk_id == Chunk.id)
            .where(
                Chunk.project_id == objects[0].key.project_id,
                Chunk.digest.in_({each.key.digest for each in objects}),
                Copy.store_id == store_id,
                Copy.state != CopyState.GONE,
            )
        )
        known = {(row.digest, row.generation) for row in rows}
    return [each for each in objects if (each.key.digest, each.key.generation) not in known]


def find_missing(
    context: ServiceContext, attached: AttachedStore, project_id: str, inventory: Inventory, began_at: datetime
) -> Iterator[list[int]]:
    """Ids of copies whose object the store does not have, batch by batch. Raises StoreError."""
    after = 0
    while True:
        with context.database.read() as session:
            rows = session.execute(
                select(Copy, Chunk.digest)
                .join(Chunk, Chunk.id == Copy.chunk_id)
                .where(
                    Copy.project_id == project_id,
                    Copy.store_id == attached.store_id,
                    Copy.state.in_(_EXPECTED),
                    Copy.verified_at < began_at,
                    Copy.id > after,
                )
                .order_by(Copy.id)
                .limit(BATCH)
            ).all()
        if not rows:
            return
        after = rows[-1].Copy.id
        unseen = [row for row in rows if _short(row.Copy.generation) not in inventory.seen]
        yield [row.Copy.id for row in unseen if _is_missing(attached, object_key(project_id, row.digest, row.Copy))]


def make_suspect(context: ServiceContext, copy_ids: Sequence[int]) -> int:
    """Hands them over to those who read copies again and mark what is lost. How many."""
    if not copy_ids:
        return 0
    with context.database.transaction() as session:
        changed = session.scalars(
            update(Copy)
            .where(Copy.id.in_(copy_ids), Copy.state.in_(_EXPECTED))
            .values(state=CopyState.SUSPECT, leased_until=None)
            .returning(Copy.id),
            execution_options={"synchronize_session": False},
        )
        return len(changed.all())


def _is_missing(attached: AttachedStore, key: ObjectKey) -> bool:
    try:
        attached.store.head(key)
    except ObjectMissing:
        return True
    return False


def _short(generation: str) -> int:
    return int(generation[:16], 16)
