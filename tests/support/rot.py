"""Two stores, copies from one to the other, and damage to an object behind the service's back, in any kind of store."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import select

from holdfast_protocol.states import CopyState, StoreRole
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.copies.copy_chunk import begin_copy, copy_now
from holdfast_service.copies.predicates import object_key
from holdfast_service.db.tables.core import Chunk, Copy
from holdfast_service.stores.base import ObjectKey, Store
from holdfast_service.stores.posix.posix_store import PosixStore
from holdfast_service.stores.s3.s3_store import S3Store
from tests.support.rank import digest_of
from tests.support.service import RunningService


def attached(service: RunningService, role: StoreRole) -> AttachedStore:
    found = service.context.attached(role)
    assert found is not None
    return found


def copy_to_second(service: RunningService) -> int:
    """Every chunk that the second store lacks; how many."""
    target = attached(service, StoreRole.SECOND).store_id
    with service.context.database.read() as session:
        chunk_ids = session.scalars(select(Chunk.id).order_by(Chunk.digest)).all()
    copied = 0
    for chunk_id in chunk_ids:
        with service.context.database.transaction() as session:
            task = begin_copy(session, service.context, chunk_id, target)
        if task is not None:
            assert copy_now(service.context, task)
            copied += 1
    return copied


def copies_of(service: RunningService, content: bytes | str, role: StoreRole | None = StoreRole.PRIMARY) -> list[Copy]:
    """The chunk's copies in one store, or in all (None), the oldest first; the chunk by its bytes or its digest."""
    digest = content if isinstance(content, str) else digest_of(content)
    query = select(Copy).join(Chunk, Chunk.id == Copy.chunk_id).where(Chunk.digest == digest)
    if role is not None:
        query = query.where(Copy.store_id == attached(service, role).store_id)
    with service.context.database.read() as session:
        return list(session.scalars(query.order_by(Copy.id)))


def states_of(service: RunningService, content: bytes | str, role: StoreRole | None = StoreRole.PRIMARY) -> list[str]:
    return [copy.state for copy in copies_of(service, content, role)]


def key_of(service: RunningService, content: bytes | str, role: StoreRole = StoreRole.PRIMARY) -> ObjectKey:
    """Of its newest copy that is verified."""
    digest = content if isinstance(content, str) else digest_of(content)
    copy = [each for each in copies_of(service, content, role) if each.state == CopyState.VERIFIED][-1]
    return object_key(copy.project_id, digest, copy)


def stored(store: Store, key: ObjectKey) -> bytes:
    return b"".join(store.open_read(key))


def overwrite(store: Store, key: ObjectKey, data: bytes) -> None:
    """What only somebody with the store's own keys can do."""
    if isinstance(store, PosixStore):
        path = store.object_path(key)
        path.chmod(0o600)
        path.write_bytes(data)
        return
    assert isinstance(store, S3Store)
    store.calls.put(store.location.key_of(key.path), data)


def flip(store: Store, key: ObjectKey) -> None:
    data = bytearray(stored(store, key))
    data[len(data) // 2] ^= 1
    overwrite(store, key, bytes(data))


def cut(store: Store, key: ObjectKey) -> None:
    overwrite(store, key, stored(store, key)[:-1])


def remove(store: Store, key: ObjectKey) -> None:
    store.delete(key)


ROT: dict[str, Callable[[Store, ObjectKey], None]] = {"flipped": flip, "cut": cut, "deleted": remove}
