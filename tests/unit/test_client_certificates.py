"""A certificate that is not trusted is said at once, on both planes: no retry fixes it."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.chunks.uploader import put_chunk
from holdfast_protocol.checkpoints import UploadTicket
from tests.support.scripted_http import Reply, ScriptedServer, in_turn
from tests.support.tls import self_signed


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return self_signed(tmp_path / "certificate.pem", "127.0.0.1")


@pytest.fixture
def server(certificate: Path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    running = ScriptedServer(in_turn(Reply(200)), tls=context)
    yield running
    running.close()


def put(client: Client) -> None:
    ticket = UploadTicket(kind="http", url="/bucket/key?sig=s3cret", headers={}, expires_in_seconds=60)
    put_chunk(ticket, memoryview(b"bytes"), client.transfers)


def test_a_store_with_a_strange_certificate_is_not_asked_again(server):
    with Client(ClientSettings(url=server.url, token="t", retry_seconds=900)) as client:
        with pytest.raises(errors.StoreRefused, match=r"not trusted.*SSL_CERT_FILE") as caught:
            put(client)
    assert "s3cret" not in str(caught.value)
    assert not server.seen


def test_a_service_with_a_strange_certificate_is_not_asked_again(server):
    with Client(ClientSettings(url=server.url, token="t", retry_seconds=900)) as client:
        with pytest.raises(errors.ServiceUnavailable, match=r"not trusted.*SSL_CERT_FILE"):
            client.service.info()
    assert not server.seen


def test_a_certificate_that_one_is_told_to_trust_is_trusted(server, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with Client(ClientSettings(url=server.url, token="t", retry_seconds=0)) as client:
        put(client)
    assert [seen.body for seen in server.seen] == [b"bytes"]
