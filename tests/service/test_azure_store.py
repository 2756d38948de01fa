"""The service on an azure store: what no signature binds is unproven until the service has read it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import select, update

import holdfast_service.scrub.verify
import holdfast_service.tiers.controller
from holdfast_client import Client, ClientSettings
from holdfast_protocol.states import StoreRole
from holdfast_protocol.tiers import ThawSpeed
from holdfast_service.copies.copy_chunk import TargetBadError
from holdfast_service.db.tables.core import Checkpoint, Chunk, Copy
from holdfast_service.settings import ServiceSettings
from holdfast_service.tiers import cool
from holdfast_service.tiers.movable import place_of
from tests.support.death import Killed, kill
from tests.support.little_checkpoints import save_little_checkpoint
from tests.support.rank import Job, answer, digest_of
from tests.support.service import RunningService, running_service


@pytest.fixture
def service(azurite, tmp_path, monkeypatch) -> Iterator[RunningService]:
    for name, value in azurite.environment.items():
        monkeypatch.setenv(name, value)
    settings = ServiceSettings(data_dir=tmp_path / "data", port=0, store=azurite.store_url_for(tmp_path.name[-40:]))
    with running_service(settings) as running:
        yield running


def _proofs(service: RunningService) -> set[str]:
    with service.context.database.read() as session:
        return set(session.scalars(select(Copy.proof)))


@pytest.mark.rule("reuse-only-hashed")
def test_a_client_is_asked_for_md5_and_its_checkpoint_comes_back(service):
    with Client(ClientSettings(url=service.url, token=service.token())) as client:
        info = client.service.info()
        assert (info.store_kind, info.store_asks_md5) == ("azure", True)
        save_little_checkpoint(client, "demo")
    assert _proofs(service) == {"unproven"}
    report = holdfast_service.scrub.verify.reconcile(service.context)
    assert report.bad == 0
    assert _proofs(service) == {"read"}
    probed = service.context.store.capabilities
    assert (probed.sha256_enforced, probed.md5_enforced, probed.conditional_put) == (False, True, True)
    assert probed.weaknesses == []


@pytest.mark.rule("reuse-only-hashed")
def test_another_attempt_reuses_a_chunk_only_after_the_service_has_read_it(service):
    Job(service.http(), "demo/first").save(1, content=b"frozen")
    others = Job(service.http(), "demo/second").begin(1)
    assert others.negotiate(0, [b"frozen"])["chunks"][0]["status"] == "upload"
    report = holdfast_service.scrub.verify.reconcile(service.context)
    assert (report.good, report.bad) == (2, 0)
    third = Job(service.http(), "demo/third").begin(1)
    assert third.negotiate(0, [b"frozen"])["chunks"][0]["status"] == "present"


@pytest.mark.rule("row-before-copy")
def test_a_policy_moves_chunks_into_azures_archive(service, clock):
    """Azure hashes nothing, and what is archived cannot be read back: the service proves what it sends."""
    http = service.http()
    job = Job(http)
    for step in (1, 2, 3):
        job.save(step)
    holdfast_service.scrub.verify.reconcile(service.context)
    document = {"rules": [{"after": "7d", "storage_class": "archive"}]}
    answer(http.put(f"{job.base}/policies/tiers", json={"document": document}))
    clock.advance(8 * 86400)
    report = holdfast_service.tiers.controller.reconcile(service.context)
    assert (report.failed, report.done) == (0, 2), report.error
    assert [answer(http.get(f"{job.base}/checkpoints/{step}"))["tier"] for step in (1, 2, 3)] == ["cold", "hot", "hot"]


@pytest.mark.rule("row-before-copy")
def test_what_a_dead_worker_has_archived_in_azure_is_taken_up(service):
    """It is paid for by the half year, and Azure does not say what it is."""
    context = service.context
    Job(service.http()).save(1, content=b"weights")
    holdfast_service.scrub.verify.reconcile(context)
    place = place_of(context, "archive")
    with context.database.transaction() as session:
        chunk_id = session.scalar(select(Chunk.id).where(Chunk.digest == digest_of(b"weights")))
        task = cool._begin(session, context, chunk_id, place)
    made = cool._copy(context, task, place, lambda _: None)
    assert cool._copy(context, task, place, lambda _: None) == made, "the first one died before it settled this"


@pytest.mark.rule("row-before-copy")
def test_a_worker_that_stood_still_while_its_copy_was_settled_and_thawed_takes_nothing_away(
    service, clock, monkeypatch
):
    """It has read the chunk and wakes up when the copy is the only one, in the tier that a thaw has moved it to."""
    context, store = service.context, service.context.store
    Job(service.http()).save(1, content=b"weights")
    holdfast_service.scrub.verify.reconcile(context)
    place = place_of(context, "archive")
    with context.database.transaction() as session:
        session.execute(update(Checkpoint).values(tier_wanted="archive"))
        chunk_id = session.scalar(select(Chunk.id).where(Chunk.digest == digest_of(b"weights")))
        task = cool._begin(session, context, chunk_id, place)
    write = store.write

    def write_late(*args, **options):
        monkeypatch.setattr(store, "write", write)
        clock.advance(context.settings.chunk_lease_seconds + 1)
        made = cool.move_chunk(context, chunk_id, place, lambda _: None)
        assert made.copy_id == task.copy.copy_id, "another worker takes it up"
        assert cool.retire(context, {chunk_id: made.copy_id}, place).copies == 1
        store.delete(task.copy.source_key)  # as the collector does
        store.restore_object(task.copy.target_key, 2, ThawSpeed.STANDARD)
        kill(monkeypatch, store, "delete", after=True)
        return write(*args, **options)

    monkeypatch.setattr(store, "write", write_late)
    with pytest.raises((TargetBadError, Killed)):
        cool._copy(context, task, place, lambda _: None)
    assert b"".join(store.open_read(task.copy.target_key)) == b"weights"


def test_the_second_stores_own_key_may_be_an_account_and_its_key(azurite):
    settings = ServiceSettings(
        second_store=azurite.store_url_for("second"),
        second_store_access_key_id=azurite.account,
        second_store_secret_access_key=azurite.key,
    )
    found = settings.store_credentials(StoreRole.SECOND)
    assert (found.access_key, found.secret_key) == (azurite.account, azurite.key)
