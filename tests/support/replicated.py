"""A checkpoint in two stores: what a policy asks to be copied, a pass of copying, and where its bytes lie then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import select

import holdfast_service.replicate.controller
from holdfast_protocol.states import StoreRole
from holdfast_service.copies.copy_chunk import CopyTask, begin_copy
from holdfast_service.copies.predicates import object_key
from holdfast_service.db.tables.core import Chunk, Copy
from holdfast_service.replicate.controller import ReplicateReport
from holdfast_service.stores.base import ObjectKey
from holdfast_service.stores.posix.posix_store import PosixStore
from tests.support.rank import answer, digest_of
from tests.support.rot import attached
from tests.support.service import RunningService

CONTENT = b"weights of rank 0" * 1000
SECOND = StoreRole.SECOND


def put_policy(service: RunningService, **document: Any) -> None:
    http = service.http(headers=[("If-Match", "*")])
    answer(http.put("/v1/projects/demo/policies/copies", json={"document": document}))


def replicate(service: RunningService) -> ReplicateReport:
    return holdfast_service.replicate.controller.reconcile(service.context)


def begin(service: RunningService, content: bytes) -> CopyTask | None:
    """A worker takes the chunk to copy it to the second store, if nobody else has."""
    with service.context.database.transaction() as session:
        chunk_id = session.execute(select(Chunk.id).where(Chunk.digest == digest_of(content))).scalar_one()
        return begin_copy(session, service.context, chunk_id, attached(service, SECOND).store_id)


def file_of(service: RunningService, role: StoreRole, copy: Copy) -> Path:
    store = attached(service, role).store
    assert isinstance(store, PosixStore)
    return store.object_path(object_key(copy.project_id, copy.stored_digest, copy))


def objects_in(service: RunningService, role: StoreRole) -> set[ObjectKey]:
    with service.context.database.read() as session:
        projects = session.scalars(select(Copy.project_id).distinct()).all()
    store = attached(service, role).store
    return {found.key for project_id in projects for found in store.list_objects(project_id)}
