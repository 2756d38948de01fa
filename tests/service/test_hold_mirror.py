"""A hold that the store mirrors: Object Lock of a real S3 server on each copy's version (rule holds-outrank)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError
from sqlalchemy import select, update

from holdfast_protocol.states import CheckpointState, CopyState, Proof, StoreRole
from holdfast_service.collect.controller import reconcile as collect_tick
from holdfast_service.copies.predicates import object_key
from holdfast_service.db.tables.core import Checkpoint, Chunk, Copy
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.holds import controller as mirror
from holdfast_service.holds.held import CopyLock
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreRefused, StoreUnavailable
from holdfast_service.stores.s3.s3_store import S3Store
from tests.service.conftest import Clock
from tests.support.interleave import refused
from tests.support.rank import Job, answer
from tests.support.rot import attached, copy_to_second
from tests.support.seaweedfs import SeaweedFS
from tests.support.service import RunningService, running_service

pytestmark = pytest.mark.rule("holds-outrank")
DEFAULT_RETENTION = (
    b"<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled><Rule><DefaultRetention>"
    b"<Mode>GOVERNANCE</Mode><Days>1</Days></DefaultRetention></Rule></ObjectLockConfiguration>"
)


@pytest.fixture
def locking(
    settings: ServiceSettings, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningService]:
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    store = seaweedfs.locking_store_url_for(f"test-{secrets.token_hex(6)}")
    with running_service(settings.model_copy(update={"store": store})) as running:
        yield running


def place(service: RunningService, checkpoint_id: str, **body: Any) -> dict[str, Any]:
    wanted = {"reason": "audit", "mirror": True} | body
    return answer(service.http().post(f"/v1/checkpoints/{checkpoint_id}/holds", json=wanted))  # type: ignore[no-any-return]


def release(service: RunningService, hold: dict[str, Any]) -> None:
    other = service.http(token=service.token())
    answer(other.post(f"/v1/holds/{hold['id']}/release", json={"reason": "closed"}))


def shown(service: RunningService, hold: dict[str, Any]) -> dict[str, Any]:
    holds = answer(service.http().get("/v1/holds", params={"over": True}))["items"]
    return next(one for one in holds if one["id"] == hold["id"])


def copies(service: RunningService) -> list[tuple[Copy, str]]:
    with service.context.database.read() as session:
        rows = session.execute(
            select(Copy, Chunk.digest).join(Chunk, Chunk.id == Copy.chunk_id).order_by(Copy.id)
        ).all()
        return [(row.Copy, row.digest) for row in rows]


def is_deletable(service: RunningService, copy: Copy, digest: str) -> bool:
    """Asked of the store itself, of exactly this version: refused or done."""
    key = object_key(copy.project_id, digest, copy)
    try:
        service.context.store.delete(key, copy.version_id)
    except StoreRefused:
        return False
    return True


def legal_holds(service: RunningService) -> list[bool]:
    """By copy, what the store says."""
    store = service.context.store
    assert isinstance(store, S3Store)
    found = []
    for copy, digest in copies(service):
        asked = {
            "Bucket": store.location.bucket,
            "Key": store.location.key_of(object_key(copy.project_id, digest, copy).path),
            "VersionId": str(copy.version_id),
        }
        try:
            found.append(store.calls.client.get_object_legal_hold(**asked)["LegalHold"]["Status"] == "ON")
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise
            found.append(False)
    return found


def test_every_copy_is_locked_while_one_of_the_checkpoints_that_share_it_is_held(locking: RunningService) -> None:
    job = Job(locking.http())
    first, second = job.save(100, content=b"shared"), job.save(200, content=b"shared")
    alone = job.save(300, content=b"not held")
    holds = [place(locking, first["id"]), place(locking, second["id"], reason="another")]
    assert legal_holds(locking) == [False] * 4
    assert not shown(locking, holds[0])["mirrored_at"]
    report = mirror.reconcile(locking.context)
    assert (report.locked, report.unlocked, report.failed) == (2, 0, 0)
    assert legal_holds(locking) == [True, True, False, False]
    assert shown(locking, holds[0])["mirrored_at"]
    assert shown(locking, holds[1])["mirrored_at"]
    assert mirror.reconcile(locking.context).done == 0
    release(locking, holds[0])
    assert mirror.reconcile(locking.context).done == 0
    assert legal_holds(locking) == [True, True, False, False]
    locked, digest = copies(locking)[0]
    assert not is_deletable(locking, locked, digest)
    release(locking, holds[1])
    assert mirror.reconcile(locking.context).unlocked == 2
    assert legal_holds(locking) == [False] * 4
    assert is_deletable(locking, locked, digest)
    with locking.context.database.read() as session:
        told = session.scalars(
            select(AuditEvent.action).where(AuditEvent.actor == "holds").order_by(AuditEvent.id)
        ).all()
    assert told == ["copy.lock", "hold.mirror", "hold.mirror", "copy.unlock"]
    assert alone["state"] == "committed"


def test_nothing_is_deleted_that_the_store_still_holds_and_then_no_version_stays(
    locking: RunningService, seaweedfs: SeaweedFS, clock: Clock
) -> None:
    """Deleting first would be refused for ever; deleting without the version would only hide the bytes."""
    saved = Job(locking.http()).save(100)
    hold = place(locking, saved["id"])
    mirror.reconcile(locking.context)
    release(locking, hold)
    with locking.context.database.transaction() as session:
        session.execute(update(Checkpoint).values(state=CheckpointState.DELETED))
    clock.advance(86400)
    collect_tick(locking.context)
    assert {copy.state for copy, _ in copies(locking)} == {CopyState.VERIFIED}
    assert mirror.reconcile(locking.context).unlocked == 2
    clock.advance(86400)
    collect_tick(locking.context)
    assert {copy.state for copy, _ in copies(locking)} <= {CopyState.GONE}
    store = locking.context.store
    assert isinstance(store, S3Store)
    query = f"/{seaweedfs.locking_bucket}?prefix={store.location.key_prefix}&versions="
    left = seaweedfs.signed("GET", query).data.decode()
    assert "/chunks/" not in left


def test_a_new_copy_of_a_held_chunk_is_locked_too(locking: RunningService) -> None:
    """Repaired under a new generation, or copied to a second store: a new row, which nobody has told the store of."""
    saved = Job(locking.http()).save(100)
    hold = place(locking, saved["id"])
    mirror.reconcile(locking.context)
    (old, digest), *_ = copies(locking)
    context = locking.context
    with context.database.transaction() as session:
        fresh = Copy(
            chunk_id=old.chunk_id,
            project_id=old.project_id,
            store_id=old.store_id,
            attempt_id=old.attempt_id,
            generation=secrets.token_hex(16),
            state=CopyState.VERIFIED,
            proof=Proof.READ,
            codec=old.codec,
            stored_digest=old.stored_digest,
            stored_bytes=old.stored_bytes,
            ticket_expires_at=old.ticket_expires_at,
            created_at=old.created_at,
        )
        session.add(fresh)
        session.flush()
        data = b"".join(context.store.open_read(object_key(old.project_id, digest, old)))
        fresh.version_id = context.store.put_bytes(object_key(old.project_id, digest, fresh), data).version_id
    assert mirror.reconcile(context).locked == 1
    assert all(legal_holds(locking))
    assert shown(locking, hold)["mirrored_at"]


def test_a_process_that_dies_between_store_and_catalog_leaves_no_lock_that_nobody_knows_of(
    locking: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Job(locking.http()).save(100)
    hold = place(locking, saved["id"])

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mirror, "_settle", dies)
        with pytest.raises(KeyboardInterrupt):
            mirror.reconcile(locking.context)
    assert all(legal_holds(locking))
    assert {copy.lock for copy, _ in copies(locking)} == {CopyLock.CHANGING}
    release(locking, hold)
    assert mirror.reconcile(locking.context).done == 0, "another process may still be at it"
    clock.advance(11 * 60)
    assert mirror.reconcile(locking.context).unlocked == 2
    assert not any(legal_holds(locking))


def test_an_end_that_has_come_takes_the_lock_off(locking: RunningService, clock: Clock) -> None:
    saved = Job(locking.http()).save(100)
    until = (datetime.now(UTC) + timedelta(days=2)).isoformat()
    hold = place(locking, saved["id"], retain_until=until)
    mirror.reconcile(locking.context)
    clock.advance(1.5 * 86400)
    assert mirror.reconcile(locking.context).done == 0
    clock.advance(86400)
    assert mirror.reconcile(locking.context).unlocked == 2
    assert not any(legal_holds(locking))
    assert not shown(locking, hold)["in_force"]


def test_why_the_store_does_not_lock_is_shown_and_it_is_tried_again(
    locking: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Job(locking.http()).save(100)
    hold = place(locking, saved["id"])

    def unavailable(*_: object, **__: object) -> None:
        raise StoreUnavailable("the store is having its lunch")

    with monkeypatch.context() as patch:
        patch.setattr(locking.context.store, "set_legal_hold", unavailable)
        report = mirror.reconcile(locking.context)
    assert (report.failed, report.done) == (2, 0)
    assert (shown(locking, hold)["mirrored_at"], shown(locking, hold)["mirror_error"]) == (
        None,
        "the store is having its lunch",
    )
    with locking.context.database.read() as session:
        assert mirror.backlog(session, locking.context).due == 1
    clock.advance(11 * 60)
    assert mirror.reconcile(locking.context).locked == 2
    assert shown(locking, hold)["mirror_error"] is None
    with locking.context.database.read() as session:
        assert mirror.backlog(session, locking.context).due == 0


def test_a_hold_is_not_called_mirrored_while_one_of_two_stores_does_not_say(
    settings: ServiceSettings, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    first, second = (seaweedfs.locking_store_url_for(f"test-{secrets.token_hex(6)}") for _ in range(2))
    with running_service(settings.model_copy(update={"store": first, "second_store": second})) as service:
        job = Job(service.http())
        saved = job.save(100)
        assert copy_to_second(service) == 2
        hold = place(service, saved["id"])
        in_the_first_alone = place(service, job.save(200)["id"])

        def unavailable() -> bool:
            raise StoreUnavailable("the store is having its lunch")

        with monkeypatch.context() as patch:
            patch.setattr(attached(service, StoreRole.SECOND).store, "has_object_lock", unavailable)
            assert mirror.reconcile(service.context).locked == 4
        assert what_is_said(service, hold) == (False, "the store is having its lunch")
        assert what_is_said(service, in_the_first_alone) == (True, None)
        assert mirror.reconcile(service.context).locked == 2
        assert what_is_said(service, hold) == (True, None)
        with monkeypatch.context() as patch:
            for each in service.context.stores:
                patch.setattr(each.store, "has_object_lock", unavailable)
            mirror.reconcile(service.context)
        assert what_is_said(service, hold) == (True, "the store is having its lunch"), "it still holds what it held"
        mirror.reconcile(service.context)
        with service.context.database.read() as session:
            told = session.scalars(select(AuditEvent).where(AuditEvent.action == "hold.mirror")).all()
        assert len(told) == 2, "each once"


def what_is_said(service: RunningService, hold: dict[str, Any]) -> tuple[bool, str | None]:
    """Whether it is mirrored, and why not, or why nothing is known."""
    told = shown(service, hold)
    return told["mirrored_at"] is not None, told["mirror_error"]


def test_a_bucket_without_object_lock_is_refused_when_the_hold_is_placed(s3_service: RunningService) -> None:
    saved = Job(s3_service.http()).save(100)
    with refused("invalid_request"):
        place(s3_service, saved["id"])


def test_a_bucket_with_a_default_retention_is_refused_at_the_probe(
    settings: ServiceSettings, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lock every upload."""
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"retaining-{secrets.token_hex(4)}"
    url = seaweedfs.locking_store_url_for("checkpoints", bucket)
    assert seaweedfs.signed("PUT", f"/{bucket}?object-lock=", body=DEFAULT_RETENTION).status == 200
    context = open_service(settings.model_copy(update={"store": url}))
    try:
        assert "default retention" in str(context.store_watch.problem)
        assert b"<Key>" not in seaweedfs.signed("GET", f"/{bucket}?versions=").data, "the probe left what is locked"
    finally:
        close_service(context)
