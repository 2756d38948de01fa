"""What the store enforces is tried again, said where it is too little, and required of what is offered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

import holdfast_service.attached_stores.attached
import holdfast_service.attached_stores.controller as stores
import tests.support.s3_fake.server
from holdfast_service.attached_stores.controller import StoresReport
from holdfast_service.cli import _say_where
from holdfast_service.db.tables.core import Store as StoreRow
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.s3.s3_store import S3Store
from tests.support.rank import Job, answer
from tests.support.s3_fake.server import S3Fake, s3_fake
from tests.support.service import RunningService, running_service


@pytest.fixture
def fake() -> Iterator[S3Fake]:
    with s3_fake() as running:
        yield running


@pytest.fixture
def settings(settings: ServiceSettings, fake: S3Fake, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    return settings.model_copy(update={"store": fake.store_url_for("checkpoints")})


def _weaken(patch: pytest.MonkeyPatch) -> None:
    """The bucket now stands behind a gateway that looks at neither signatures nor checksums."""
    patch.setattr(tests.support.s3_fake.server, "verify", lambda *_: "UNSIGNED-PAYLOAD")
    patch.setattr(tests.support.s3_fake.server, "_check_sha256", lambda headers, body: None)
    stores = S3Fake._put
    patch.setattr(
        S3Fake, "_put", lambda fake, key, headers, body: stores(fake, key, headers | {"content-md5": None}, body)
    )


@pytest.mark.rule("enforcement-probed")
def test_a_store_that_enforces_less_than_before_is_found_out_and_said_everywhere(
    service: RunningService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys
) -> None:
    watch, http = service.context.store_watch, service.http()
    assert isinstance(service.context.store, S3Store)
    (before,) = answer(http.get("/v1/stores"))["items"]
    assert (before["weaknesses"], before["changed_at"]) == ([], None)
    assert answer(http.get("/readyz"))["warnings"] == []
    with monkeypatch.context() as patch:
        _weaken(patch)
        watch.reconcile()  # the one after the start
        (found,) = answer(http.get("/v1/stores"))["items"]
        assert [told.partition(":")[0] for told in found["weaknesses"]] == [
            "It takes uploads whose signature is wrong",
            "It compares no checksum with what it is sent",
        ]
        assert found["changed_at"] == found["probed_at"] > before["probed_at"]
        assert len(answer(http.get("/readyz"))["warnings"]) == 2
        _say_where(service.context, service.url)
        assert "warning  HOLDFAST_STORE: It takes uploads whose signature is wrong" in capsys.readouterr().out
        assert "store_changed" in caplog.text
        with service.context.database.read() as session:
            event = session.scalars(select(AuditEvent).where(AuditEvent.action == "store.capabilities")).one()
            assert (event.before["signature_enforced"], event.after["signature_enforced"]) == (True, False)
            kept = session.scalars(select(StoreRow.capabilities)).one()
            assert kept["sha256_enforced"] is False, "for the next process"
    watch.reconcile()
    assert not service.context.store.capabilities.sha256_enforced, "not before its time"
    monkeypatch.setattr(holdfast_service.attached_stores.attached, "PROBE_EVERY_SECONDS", -1.0)
    watch.reconcile()
    (again,) = answer(http.get("/v1/stores"))["items"]
    assert again["weaknesses"] == []
    assert again["changed_at"] > found["changed_at"]


@pytest.mark.rule("enforcement-probed")
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_key_of_kms_that_a_known_store_does_not_take_is_told_by_the_controller(settings: ServiceSettings) -> None:
    with running_service(settings) as service:
        assert stores.reconcile(service.context) == StoresReport()
    named = settings.model_copy(update={"store": f"{settings.store}&kms_key=alias/checkpoints"})
    with running_service(named) as service:
        report = stores.reconcile(service.context)
        assert report.error is not None
        assert report.error.startswith("primary: what it enforces was not found out: the store refuses")
        assert report.unavailable == ()
        assert stores.reconcile(service.context) == StoresReport(), "not in each pass"


@pytest.mark.rule("enforcement-probed")
def test_what_was_probed_is_known_to_the_next_process_with_its_moments(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_service(settings) as service:
        with monkeypatch.context() as patch:
            _weaken(patch)
            service.context.store_watch.reconcile()
        known = service.context.store.capabilities
    assert known is not None
    assert known.changed_at is not None
    with running_service(settings) as service:
        assert service.context.store.capabilities == known


@pytest.mark.rule("enforcement-probed")
def test_where_the_store_compares_md5_no_chunk_is_offered_without_it(service: RunningService) -> None:
    store = service.context.store
    by_md5 = replace(store.capabilities, sha256_enforced=False, md5_enforced=True)
    job = Job(service.http())
    save = job.begin(1)
    offer = {"digest": "ab" * 32, "bytes": 10}
    route = f"/v1/checkpoints/{save.id}/shards/0/chunks"

    def status(**more: str) -> tuple[int, str]:
        reply = job.http.post(route, json={**job.fence, "chunks": [offer | more]})
        return reply.status_code, reply.text

    assert status()[0] == 200
    store.capabilities = by_md5
    refused, text = status()
    assert (refused, "without the MD5" in text) == (422, True)
    assert status(md5="cd" * 16)[0] == 200
    store.capabilities = replace(by_md5, changed_at=datetime.now(UTC))
    assert status()[0] == 200, "jobs that run have not heard of it yet"
    store.capabilities = replace(by_md5, changed_at=datetime.now(UTC) - timedelta(hours=1))
    assert status()[0] == 422
