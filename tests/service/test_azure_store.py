"""The service on an azure store: what no signature binds is unproven until the service has read it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import select

import holdfast_service.scrub.verify
import holdfast_service.tiers.controller
from holdfast_client import Client, ClientSettings
from holdfast_protocol.states import StoreRole
from holdfast_service.db.tables.core import Chunk, Copy
from holdfast_service.settings import ServiceSettings
from holdfast_service.tiers import cool
from holdfast_service.tiers.movable import place_of
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


def test_the_second_stores_own_key_may_be_an_account_and_its_key(azurite):
    settings = ServiceSettings(
        second_store=azurite.store_url_for("second"),
        second_store_access_key_id=azurite.account,
        second_store_secret_access_key=azurite.key,
    )
    found = settings.store_credentials(StoreRole.SECOND)
    assert (found.access_key, found.secret_key) == (azurite.account, azurite.key)
