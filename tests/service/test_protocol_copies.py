"""Copies in a second store (protocol rule 28): under leases, proven on the way, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

import holdfast_service.replicate.tick
from holdfast_protocol.states import CopyState, Proof, StoreRole
from holdfast_service.catalog.copies import object_key
from holdfast_service.catalog.custody_tables import CheckpointCopy
from holdfast_service.catalog.tables import Chunk, Copy
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.posix import PosixStore
from tests.support.rank import Job, answer, digest_of
from tests.support.service import RunningService

CONTENT = b"weights of rank 0" * 1000


@pytest.fixture
def settings(settings: ServiceSettings, tmp_path: Path) -> ServiceSettings:
    return settings.model_copy(update={"second_store": f"posix://{tmp_path / 'second'}"})


def put_policy(service: RunningService, project: str = "demo", **document: Any) -> None:
    answer(service.http().put(f"/v1/projects/{project}/policies/copies", json={"document": document}))


def copies_in(service: RunningService, role: StoreRole, content: bytes) -> list[Copy]:
    attached = service.context.attached(role)
    assert attached is not None
    with service.context.database.read() as session:
        query = select(Copy).join(Chunk).where(Chunk.digest == digest_of(content), Copy.store_id == attached.store_id)
        return list(session.scalars(query.order_by(Copy.id)))


def test_a_policy_brings_every_chunk_of_a_checkpoint_to_the_second_store(service: RunningService) -> None:
    job = Job(service.http())
    saved = job.save(100, content=CONTENT)
    assert holdfast_service.replicate.tick.tick(service.context).done == 0, "nobody asked for a copy"
    put_policy(service)
    report = holdfast_service.replicate.tick.tick(service.context)
    assert (report.done, report.failed, report.error, report.whole) == (2, 0, None, (saved["id"],))
    (copy,) = copies_in(service, StoreRole.SECOND, CONTENT)
    (source,) = copies_in(service, StoreRole.PRIMARY, CONTENT)
    assert (copy.state, copy.proof, copy.attempt_id) == (CopyState.VERIFIED, Proof.STORE_SHA256, source.attempt_id)
    assert copy.generation != source.generation
    second = service.context.attached(StoreRole.SECOND)
    assert second is not None
    assert isinstance(second.store, PosixStore)
    assert second.store.object_path(object_key(copy.project_id, digest_of(CONTENT), copy)).read_bytes() == CONTENT
    with service.context.database.read() as session:
        row = session.get_one(CheckpointCopy, (saved["id"], second.store_id))
        assert (row.wanted, row.missing_bytes, row.complete_at is not None) == (True, 0, True)
    assert holdfast_service.replicate.tick.tick(service.context).done == 0
