"""s3 on SeaweedFS."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest

from holdfast_service.stores.base import Credentials, StoreRefused, StoreUnavailable
from holdfast_service.stores.registry import open_store
from holdfast_service.stores.s3.s3_location import S3Credentials, parse_s3_url
from holdfast_service.stores.s3.s3_store import S3Store
from tests.contract.backends import Backend
from tests.contract.suite import StoreContract, TicketContract
from tests.support.stores import chunk_key, fetch, put_ticket, send


@pytest.fixture(scope="module")
def backend(seaweedfs):
    url, keys = seaweedfs.store_url_for(secrets.token_hex(4)), Credentials(seaweedfs.access_key, seaweedfs.secret_key)
    store = open_store(url, b"k" * 32, keys)
    past = S3Store(parse_s3_url(url), S3Credentials(keys), now=lambda: datetime.now(UTC) - timedelta(hours=2))

    @contextmanager
    def outage():
        seaweedfs.stop()
        yield
        seaweedfs.start()

    def hand_in(key, data):
        assert send("", put_ticket(store, key, data), data).status in {200, 412}

    store.probe()
    yield Backend(
        store, hand_in, proves=True, reopen=lambda: open_store(url, b"k" * 32, keys), outage=outage, past_store=past
    )
    store.close()


class TestStore(StoreContract):
    pass


class TestTickets(TicketContract):
    pass


def _opened(seaweedfs, bucket="holdfast", secret_key=None) -> S3Store:
    url = f"s3://{bucket}/{secrets.token_hex(4)}?endpoint={seaweedfs.endpoint}"
    return open_store(url, b"k" * 32, Credentials(seaweedfs.access_key, secret_key or seaweedfs.secret_key))


def test_a_missing_bucket_is_not_taken_for_missing_objects(seaweedfs):
    store = _opened(seaweedfs, bucket="no-such-bucket")
    key = chunk_key(b"x")
    for call in (store.ping, store.probe, lambda: store.head(key), lambda: list(store.list_objects("p1"))):
        with pytest.raises(StoreRefused, match="is not there; make the bucket"):
            call()


def test_a_wrong_secret_is_refused_and_never_shown(seaweedfs):
    store = _opened(seaweedfs, secret_key="wrong-secret")
    for call in (store.ping, store.probe, lambda: store.put_bytes(chunk_key(b"x"), b"x")):
        with pytest.raises(StoreRefused) as refused:
            call()
        assert "wrong-secret" not in str(refused.value)
        assert "Signature=" not in str(refused.value)


@pytest.mark.rule("mark-before-delete")
def test_deleting_from_a_versioned_bucket_leaves_no_bytes(seaweedfs):
    store = _opened(seaweedfs, bucket="versioned")
    assert seaweedfs.signed("PUT", "/versioned").status == 200
    enabled = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    assert seaweedfs.signed("PUT", "/versioned?versioning=", body=enabled).status == 200
    assert store.probe().versioned
    for with_version in (True, False):
        key, neighbour = chunk_key(b"versioned"), chunk_key(b"versioned")
        for written in (key, neighbour):
            facts = store.put_bytes(written, b"versioned")
        store.delete(neighbour, facts.version_id) if with_version else store.delete(neighbour)
        store.delete(key)
        listing = seaweedfs.signed("GET", "/versioned?versions=").data.decode()
        assert key.generation not in listing
        assert neighbour.generation not in listing


def test_a_ticket_names_the_host_that_clients_see(seaweedfs):
    keys = Credentials(seaweedfs.access_key, seaweedfs.secret_key)
    port = seaweedfs.endpoint.rpartition(":")[2]
    store = open_store(f"{seaweedfs.store_url}&public_endpoint=http://localhost:{port}", b"k" * 32, keys)
    key = chunk_key(b"public")
    store.put_bytes(key, b"public")
    ticket = store.presign_get(key, expires_in_seconds=60)
    assert ticket.url.startswith(f"http://localhost:{port}/")
    assert fetch("", ticket).data == b"public"


def test_credentials_come_from_the_environment(seaweedfs, monkeypatch):
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    open_store(seaweedfs.store_url, b"k" * 32).ping()


def test_short_reads_raise_instead_of_ending(seaweedfs, monkeypatch):
    """The connection breaks in the middle of an object: its first half must not pass for the whole."""
    store = _opened(seaweedfs)
    key = chunk_key(b"large")
    store.put_bytes(key, secrets.token_bytes(32 * 1024 * 1024))
    pieces = store.open_read(key)
    next(pieces)
    seaweedfs.stop()
    try:
        with pytest.raises(StoreUnavailable):
            for _ in pieces:
                pass
    finally:
        seaweedfs.start()
