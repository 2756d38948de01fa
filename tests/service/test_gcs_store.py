"""The service on a gcs store: what Google does not hash is unproven until the service has read it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import select

import holdfast_service.scrub.verify
from holdfast_client import Client, ClientSettings
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.chunks.uploader import ShardUploader
from holdfast_protocol.base import Fence
from holdfast_service.db.tables.core import Copy
from holdfast_service.settings import ServiceSettings
from tests.support.gcs_fake.process import GcsFake, gcs_fake
from tests.support.little_checkpoints import save_little_checkpoint
from tests.support.rank import Job
from tests.support.service import RunningService, running_service


@pytest.fixture(scope="module")
def gcs() -> Iterator[GcsFake]:
    with gcs_fake() as server:
        yield server


@pytest.fixture
def service(gcs, tmp_path, monkeypatch) -> Iterator[RunningService]:
    for name, value in gcs.environment.items():
        monkeypatch.setenv(name, value)
    settings = ServiceSettings(data_dir=tmp_path / "data", port=0, store=gcs.store_url_for(tmp_path.name))
    with running_service(settings) as running:
        yield running


def _proofs(service: RunningService) -> set[str]:
    with service.context.database.read() as session:
        return set(session.scalars(select(Copy.proof)))


@pytest.mark.rule("reuse-only-hashed")
def test_a_client_is_asked_for_md5_and_its_checkpoint_comes_back(service):
    token = service.token()
    with Client(ClientSettings(url=service.url, token=token)) as client:
        info = client.service.info()
        assert (info.store_kind, info.store_asks_md5) == ("gcs", True)
        save_little_checkpoint(client, "demo")
    assert _proofs(service) == {"unproven"}
    probed = service.context.store.capabilities
    assert (probed.sha256_enforced, probed.md5_enforced, probed.conditional_put) == (False, True, True)


@pytest.mark.rule("reuse-only-hashed")
def test_google_checks_the_md5_of_what_is_sent_compressed_and_the_service_what_it_decodes_to(service):
    job = Job(service.http(), "demo/compressed")
    save = job.begin(1)
    body = bytes(100_000) + bytes(range(256)) * 500
    settings = ClientSettings(url=service.url, token=service.token(), compress="zstd")
    with Client(settings) as client:
        uploader = ShardUploader(client, save.id, 0, Fence(**job.fence))
        sent = uploader.upload([OutgoingChunk.of(body, item_bytes=4)])
    assert sent.sent_bytes < sent.sent_chunk_bytes == len(body)
    save.write(0, [body, b"index"])
    report = holdfast_service.scrub.verify.reconcile(service.context)
    assert (report.good, report.bad) == (2, 0)
    with service.context.database.read() as session:
        found = {(copy.codec, copy.proof) for copy in session.scalars(select(Copy))}
    assert found == {("zstd-shuffle4", "read"), ("raw", "read")}


@pytest.mark.rule("reuse-only-hashed")
def test_another_attempt_reuses_a_chunk_only_after_the_service_has_read_it(service):
    Job(service.http(), "demo/first").save(1, content=b"frozen")
    others = Job(service.http(), "demo/second").begin(1)
    assert others.negotiate(0, [b"frozen"])["chunks"][0]["status"] == "upload"
    report = holdfast_service.scrub.verify.reconcile(service.context)
    assert (report.good, report.bad) == (2, 0)
    assert "read" in _proofs(service)
    third = Job(service.http(), "demo/third").begin(1)
    assert third.negotiate(0, [b"frozen"])["chunks"][0]["status"] == "present"
