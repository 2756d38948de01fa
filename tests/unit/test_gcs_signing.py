"""V4 signed URLs of Google: ours against those of google-cloud-storage, byte for byte."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth.crypt import RSASigner
from google.cloud.storage._signing import generate_signed_url_v4
from google.oauth2 import service_account

from holdfast_service.stores.base import ObjectKey, StoreRefused, make_tickets
from holdfast_service.stores.gcs.gcs_location import parse_gcs_url
from holdfast_service.stores.gcs.gcs_store import GcsStore
from holdfast_service.stores.gcs.signer import IamSigner, KeySigner, presign

_EMAIL = "holdfast+odd@tests.iam.gserviceaccount.com"
_AT = datetime(2026, 3, 1, 23, 59, 59, tzinfo=UTC)


@pytest.fixture(scope="module")
def key():
    generated = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return RSASigner.from_string(generated.private_bytes(serialization.Encoding.PEM, pkcs8, plain).decode())


@pytest.mark.rule("verify-while-uploading")
@pytest.mark.parametrize("origin", ["https://storage.googleapis.com", "http://127.0.0.1:4443"])
@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", {}),
        ("PUT", {"content-length": "0"}),
        ("PUT", {"x-goog-hash": "md5=a+/b==", "content-length": "7", "x-goog-if-generation-match": "0"}),
        ("PUT", {"x-goog-meta-odd": "two  spaces,  a comma", "content-type": "a/b; c=d"}),
    ],
)
def test_a_url_equals_that_of_googles_library(key, origin, method, headers):
    path, seconds = f"/bucket/p/{secrets.token_hex(8)}/~a-b_c.d", 900
    theirs = generate_signed_url_v4(
        service_account.Credentials(key, _EMAIL, "https://unused"),
        path,
        seconds,
        api_access_endpoint=origin,
        method=method,
        headers=dict(headers),
        _request_timestamp=_AT.strftime("%Y%m%dT%H%M%SZ"),
    )
    signer = KeySigner(_EMAIL, key)
    ours = presign(signer, method, origin, path, headers=headers, expires_in_seconds=seconds, at=_AT)
    assert ours == theirs


def test_secrets_do_not_show_in_representations(key):
    store = GcsStore(parse_gcs_url("gs://bucket"), None, KeySigner(_EMAIL, key))
    ticket = store.presign_get(ObjectKey("p1", "0" * 64, "0" * 8), expires_in_seconds=60)
    assert "Signature=" in ticket.url
    assert "Signature" not in repr(ticket)


def test_no_ticket_is_longer_than_google_allows(key):
    store = GcsStore(parse_gcs_url("gs://bucket"), None, KeySigner(_EMAIL, key))
    ticket = store.presign_get(ObjectKey("p1", "0" * 64, "0" * 8), expires_in_seconds=10**9)
    assert ticket.expires_in_seconds == 7 * 24 * 3600
    assert "X-Goog-Expires=604800&" in ticket.url


def test_a_person_is_told_to_name_a_service_account():
    with pytest.raises(StoreRefused, match="service_account="):
        IamSigner(None, lambda: None).sign(b"x")


class _Remote:
    tickets_at_once = 4


class _Local:
    pass


@pytest.mark.parametrize("store", [_Remote(), _Local()])
def test_tickets_come_in_the_order_of_the_chunks(store):
    assert make_tickets(store, lambda number: number * 2, list(range(50))) == list(range(0, 100, 2))
    assert make_tickets(store, lambda number: number, []) == []
