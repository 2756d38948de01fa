"""Tickets for Google: who signs them, for how long, and in which order they come."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth.crypt import RSASigner
from google.oauth2 import credentials as personal
from google.oauth2 import service_account

from holdfast_service.stores.base import ObjectKey, StoreRefused, make_tickets
from holdfast_service.stores.gcs.calls import GcsCalls
from holdfast_service.stores.gcs.gcs_location import parse_gcs_url
from holdfast_service.stores.gcs.gcs_store import GcsStore
from holdfast_service.stores.gcs.identity import GoogleIdentity
from holdfast_service.stores.gcs.signer import IamSigning, signer_for

_EMAIL = "holdfast+odd@tests.iam.gserviceaccount.com"
_KEY = ObjectKey("p1", "0" * 64, "0" * 32, version_id="77")


@pytest.fixture(scope="module")
def identity():
    generated = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key = RSASigner.from_string(generated.private_bytes(serialization.Encoding.PEM, pkcs8, plain).decode())
    return GoogleIdentity(service_account.Credentials(key, _EMAIL, "https://unused"))


def _store(url, identity):
    location = parse_gcs_url(url)
    return GcsStore(location, GcsCalls(location, identity), signer_for(location, identity))


@pytest.mark.rule("verify-while-uploading")
def test_a_ticket_binds_length_md5_and_that_nothing_is_there_yet(identity):
    store = _store("gs://bucket/prefix?public_endpoint=https://storage.example.org", identity)
    ticket = store.presign_put(_KEY, stored_bytes=7, stored_sha256="0" * 64, md5="ab" * 16, expires_in_seconds=60)
    assert ticket.url.startswith(f"https://storage.example.org/bucket/prefix/{_KEY.path}?X-Goog-Algorithm=")
    assert "&X-Goog-SignedHeaders=content-length%3Bhost%3Bx-goog-hash%3Bx-goog-if-generation-match&" in ticket.url
    assert f"&X-Goog-Credential={_EMAIL.replace('+', '%2B').replace('@', '%40')}%2F" in ticket.url
    assert "generation=77" not in ticket.url
    assert ticket.headers["x-goog-if-generation-match"] == "0"
    assert "generation=77" in store.presign_get(_KEY, expires_in_seconds=60).url


def test_secrets_do_not_show_in_representations(identity):
    ticket = _store("gs://bucket", identity).presign_get(_KEY, expires_in_seconds=60)
    assert "Signature=" in ticket.url
    assert "Signature" not in repr(ticket)


def test_no_ticket_is_longer_than_google_allows(identity):
    ticket = _store("gs://bucket", identity).presign_get(_KEY, expires_in_seconds=10**9)
    assert ticket.expires_in_seconds == 7 * 24 * 3600
    assert "X-Goog-Expires=604800&" in ticket.url


def test_a_key_signs_for_its_own_account_and_iam_for_any_other(identity):
    assert _store("gs://bucket", identity).tickets_at_once == 1
    other = _store("gs://bucket?service_account=other@tests.iam.gserviceaccount.com", identity)
    assert isinstance(other.signer.credentials, IamSigning)
    assert (other.tickets_at_once, other.signer.longest_seconds) == (16, 12 * 3600)


def test_a_person_is_told_to_name_a_service_account():
    store = _store("gs://bucket", GoogleIdentity(personal.Credentials("token")))
    with pytest.raises(StoreRefused, match="service_account="):
        store.presign_get(_KEY, expires_in_seconds=60)


class _Remote:
    tickets_at_once = 4


class _Local:
    pass


@pytest.mark.parametrize("store", [_Remote(), _Local()])
def test_tickets_come_in_the_order_of_the_chunks(store):
    assert make_tickets(store, lambda number: number * 2, list(range(50))) == list(range(0, 100, 2))
    assert make_tickets(store, lambda number: number, []) == []
