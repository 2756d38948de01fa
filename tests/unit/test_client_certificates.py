"""A certificate that is not trusted is said at once, on both planes: no retry fixes it. And one's own is shown."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.chunks.transfer import put_chunk
from holdfast_protocol.checkpoints import UploadTicket
from tests.support.scripted_http import Reply, ScriptedServer, in_turn
from tests.support.tls import Authority, self_signed


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


def test_an_authority_of_ones_own_is_trusted_beside_the_usual_ones(server, certificate):
    with Client(ClientSettings(url=server.url, token="t", retry_seconds=0, ca_file=certificate)) as client:
        put(client)
    assert [seen.body for seen in server.seen] == [b"bytes"]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority.pem")


@pytest.fixture
def demanding(tmp_path: Path, authority: Authority):
    """A server that takes only callers with a certificate, TLS 1.2 so that the handshake itself fails."""
    authority.sign(tmp_path / "server.pem", tmp_path / "server.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    context.load_verify_locations(cafile=authority.file)
    context.verify_mode = ssl.CERT_REQUIRED
    running = ScriptedServer(in_turn(Reply(200)), tls=context)
    yield running
    running.close()


def settings_of(server, authority: Authority, tmp_path: Path) -> ClientSettings:
    return ClientSettings(
        url=server.url,
        token="t",
        retry_seconds=0,
        ca_file=authority.file,
        client_certificate=tmp_path / "client.pem",
        client_key=tmp_path / "client.key",
    )


def test_ones_own_certificate_is_shown_on_both_planes(demanding, authority, tmp_path):
    authority.sign(tmp_path / "client.pem", tmp_path / "client.key", host="trainer")
    with Client(settings_of(demanding, authority, tmp_path)) as client:
        put(client)
        assert client.service.healthy()
    assert [seen.method for seen in demanding.seen] == ["PUT", "GET"]


def test_a_renewed_certificate_is_shown_by_new_connections(demanding, authority, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("holdfast_client.certificates._LOOK_AGAIN_SECONDS", 0.0)
    Authority(tmp_path / "another.pem").sign(tmp_path / "client.pem", tmp_path / "client.key", host="trainer")
    with Client(settings_of(demanding, authority, tmp_path)) as client:
        assert not client.service.healthy(), "the server does not trust that authority"
        (tmp_path / "client.key").write_text("half of it is")
        assert not client.service.healthy()
        assert not client.service.healthy()
        assert len([record for record in caplog.records if "not renewed" in record.message]) == 1
        authority.sign(tmp_path / "client.pem", tmp_path / "client.key", host="trainer")
        assert client.service.healthy()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"ca_file": "missing.pem"}, "HOLDFAST_CA_FILE"),
        ({"ca_file": "client.key"}, "HOLDFAST_CA_FILE"),
        ({"client_certificate": "missing.pem"}, "HOLDFAST_CLIENT_CERTIFICATE"),
        ({"client_certificate": "client.pem"}, "HOLDFAST_CLIENT_CERTIFICATE"),
        ({"client_certificate": "client.pem", "client_key": "other.key"}, "HOLDFAST_CLIENT_KEY"),
        ({"client_key": "client.key"}, "HOLDFAST_CLIENT_KEY"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(authority, tmp_path, given, named):
    authority.sign(tmp_path / "client.pem", tmp_path / "client.key", host="trainer")
    authority.sign(tmp_path / "other.pem", tmp_path / "other.key", host="trainer")
    paths = {name: tmp_path / file for name, file in given.items()}
    with pytest.raises(errors.ConfigurationError, match=f"^{named}"):
        Client(ClientSettings(url="https://holdfast.example.org", token="t", **paths))
