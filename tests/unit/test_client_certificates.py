"""A certificate that is not trusted is said at once, on both planes: no patience mends it."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.chunks.upload import put_chunk
from holdfast_protocol.chunks import UploadTicket
from tests.support.scripted_http import Reply, ScriptedServer, in_turn


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Self-signed, for 127.0.0.1; the key is in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "certificate.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    return path


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
            client.server_info()
    assert not server.seen


def test_a_certificate_that_one_is_told_to_trust_is_trusted(server, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with Client(ClientSettings(url=server.url, token="t", retry_seconds=0)) as client:
        put(client)
    assert [seen.body for seen in server.seen] == [b"bytes"]
