"""azure on Azurite."""

from __future__ import annotations

import base64
import gzip
import json
import secrets
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from azure.core.credentials import AccessToken
from azure.storage.blob import UserDelegationKey

from holdfast_protocol.tiers import StorageClass, ThawSpeed
from holdfast_service.stores.azure.azure_location import parse_azure_url
from holdfast_service.stores.azure.azure_store import AzureStore, delegated_store
from holdfast_service.stores.azure.classes import TERMS
from holdfast_service.stores.azure.signer import DelegatedAccount
from holdfast_service.stores.base import Credentials, ObjectArchived, ObjectMismatch, StoreRefused, StoreUnavailable
from holdfast_service.stores.registry import open_store
from tests.contract.backends import Backend
from tests.contract.suite import StoreContract, TicketContract
from tests.support.azurite import Azurite, azurite_server
from tests.support.stores import chunk_key, fetch, put_ticket, send
from tests.support.tls import self_signed

_MIB = 1024 * 1024
# What a second PUT by the same ticket is answered: the SAS creates, and overwrites nothing.
_TAKEN = frozenset({403, 409})


def _opened(azurite: Azurite, prefix: str = "", *, key: str = "", container: str = "holdfast", more: str = ""):
    url = azurite.store_url_for(prefix or secrets.token_hex(4), container) + more
    store = open_store(url, b"k" * 32, Credentials(azurite.account, key or azurite.key))
    assert isinstance(store, AzureStore)
    return store


@pytest.fixture(scope="module")
def backend(azurite):
    prefix = secrets.token_hex(4)
    store = _opened(azurite, prefix)
    past = AzureStore(store.location, store.account, store.calls, now=lambda: datetime.now(UTC) - timedelta(hours=2))

    @contextmanager
    def outage():
        azurite.stop()
        yield
        azurite.start()

    def hand_in(key, data):
        assert send("", put_ticket(store, key, data), data).status in {201, *_TAKEN}

    store.probe()
    yield Backend(
        store,
        hand_in,
        proves=False,
        reopen=lambda: _opened(azurite, prefix),
        outage=outage,
        enforces="md5",
        past_store=past,
        taken=_TAKEN,
        binds_headers=False,
    )
    store.close()


class TestStore(StoreContract):
    pass


class TestTickets(TicketContract):
    @pytest.mark.rule("reuse-only-hashed")
    def test_an_altered_or_dropped_header_is_refused(self, backend):
        """A SAS covers no header. What is not announced as block blob is refused, and so is what does not fit its MD5.
        Who leaves the MD5 out writes what he likes, once: the copy is unproven, and nobody overwrites it."""
        data, other = secrets.token_bytes(4000), secrets.token_bytes(4000)
        key = chunk_key(data)
        ticket = put_ticket(backend.store, key, data)
        assert ticket.headers.keys() == {"content-length", "content-md5", "if-none-match", "x-ms-blob-type"}
        for changed in (
            {"x-ms-blob-type": ""},
            {"content-md5": put_ticket(backend.store, key, other).headers["content-md5"]},
        ):
            headers = {name: value for name, value in {**ticket.headers, **changed}.items() if value}
            self._refused(backend, key, send("", ticket, data, headers=headers))
        bare = {"x-ms-blob-type": "BlockBlob"}
        assert send("", ticket, other, headers=bare).status == 201
        assert backend.store.head(key).sha256 is None
        assert send("", ticket, data, headers=bare).status in _TAKEN
        assert b"".join(backend.store.open_read(key)) == other


def test_what_an_uploader_calls_encoded_is_read_as_it_lies_there_and_is_no_chunk(azurite):
    """A SAS binds no header. What decodes to the announced chunk would be proven, and readers would get other bytes."""
    store = _opened(azurite)
    chunk = secrets.token_bytes(1000)
    sent = gzip.compress(chunk)
    key = chunk_key(chunk)
    ticket = put_ticket(store, key, sent)
    assert send("", ticket, sent, headers={**ticket.headers, "x-ms-blob-content-encoding": "gzip"}).status == 201
    with pytest.raises(ObjectMismatch):
        store.head(key)
    assert b"".join(store.open_read(key)) == sent


def test_while_azure_lends_no_key_the_one_that_is_there_signs_for_as_long_as_it_covers():
    borrowed = []

    def borrow(_since, until):
        if borrowed:
            raise StoreUnavailable("Entra ID does not answer")
        borrowed.append(until)
        return UserDelegationKey()

    account = DelegatedAccount("holdfast", object(), borrow)
    now = datetime.now(UTC)
    account._renew(now, until=now)
    later = borrowed[0] - timedelta(hours=20)
    account._renew(later, until=later + timedelta(hours=1))
    with pytest.raises(StoreUnavailable):
        account._renew(later, until=borrowed[0] + timedelta(hours=1))


def test_a_missing_container_is_not_taken_for_missing_objects(azurite):
    store = _opened(azurite, container="no-such-container")
    key = chunk_key(b"x")
    for call in (
        store.ping,
        store.probe,
        lambda: store.head(key),
        lambda: store.delete(key),
        lambda: list(store.list_objects("p1")),
    ):
        with pytest.raises(StoreRefused, match="is not there; make the container"):
            call()


def test_a_wrong_key_is_refused_and_never_shown(azurite):
    wrong = base64.b64encode(b"another key of the account" * 2).decode()
    store = _opened(azurite, key=wrong)
    for call in (store.ping, store.probe, lambda: store.put_bytes(chunk_key(b"x"), b"x")):
        with pytest.raises(StoreRefused, match="AZURE_STORAGE_KEY") as refused:
            call()
        assert wrong not in str(refused.value)
        assert "sig=" not in str(refused.value)
    assert send("", put_ticket(store, chunk_key(b"x"), b"x"), b"x").status == 403


def test_a_ticket_names_the_host_that_clients_see(azurite):
    port = azurite.endpoint.rpartition(":")[2]
    store = _opened(azurite, more=f"&public_endpoint=http://localhost:{port}")
    key = chunk_key(b"public")
    store.put_bytes(key, b"public")
    ticket = store.presign_get(key, expires_in_seconds=60)
    assert ticket.url.startswith(f"http://localhost:{port}/{azurite.account}/")
    assert fetch("", ticket).data == b"public"


def test_the_key_comes_from_the_environment(azurite, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_KEY", azurite.key)
    open_store(azurite.store_url_for("environment"), b"k" * 32).ping()


def test_short_reads_raise_instead_of_ending(azurite):
    """The server goes away in the middle of an object: its first half must not pass for the whole."""
    store = _opened(azurite)
    key = chunk_key(b"large")
    store.put_bytes(key, secrets.token_bytes(32 * _MIB))
    pieces = store.open_read(key)
    next(pieces)
    azurite.stop()
    try:
        with pytest.raises(StoreUnavailable):
            for _ in pieces:
                pass
    finally:
        azurite.start()


class TestClasses:
    """Azurite keeps tiers and refuses to read what is archived. A rehydration is over at once there."""

    @pytest.mark.parametrize("storage_class", TERMS)
    def test_a_copy_in_a_class_has_the_same_bytes(self, azurite, storage_class):
        store = _opened(azurite)
        body = secrets.token_bytes(5 * _MIB)
        source, target = chunk_key(body), chunk_key(body)
        store.put_bytes(source, body)
        for _ in range(2):  # an earlier try may have got as far
            told = store.copy_object(source, target, storage_class)
            assert (told.storage_class, told.facts.bytes, told.facts.sha256) == (
                storage_class,
                len(body),
                source.digest,
            )
        assert store.class_facts(source).storage_class is None
        assert {each.key: each.storage_class for each in store.list_objects("p1")} == {
            source: None,
            target: storage_class,
        }

    @pytest.mark.parametrize("storage_class", TERMS)
    def test_a_class_is_known_and_nothing_is_left_behind(self, azurite, storage_class):
        store = _opened(azurite)
        store.check_storage_class(storage_class)
        assert list(store.list_objects("probe")) == []

    def test_a_class_that_azure_lacks_is_refused(self, azurite):
        with pytest.raises(StoreRefused, match="no storage class deep_archive; it has infrequent, rare, archive"):
            _opened(azurite).check_storage_class(StorageClass.DEEP_ARCHIVE)

    def test_what_is_archived_is_neither_read_nor_copied_until_it_is_thawed(self, azurite):
        store = _opened(azurite)
        source, key = chunk_key(b"cold"), chunk_key(b"cold")
        store.put_bytes(source, b"cold")
        store.copy_object(source, key, StorageClass.ARCHIVE)
        for call in (
            lambda: b"".join(store.open_read(key)),
            lambda: store.copy_object(key, chunk_key(b"cold"), StorageClass.INFREQUENT),
        ):
            with pytest.raises(ObjectArchived):
                call()
        assert fetch("", store.presign_get(key, expires_in_seconds=60)).status == 409
        store.restore_object(key, 2, ThawSpeed.STANDARD)
        assert store.class_facts(key).storage_class is None
        assert b"".join(store.open_read(key)) == b"cold"


class TestWithoutTheAccountsKey:
    """An identity borrows a key from Azure, and signs with that. Azurite takes any token that looks like Entra ID's."""

    def test_a_borrowed_key_signs_tickets_that_write_once(self, azurite, tmp_path, monkeypatch):
        certificate = self_signed(tmp_path / "azurite.pem", "127.0.0.1")
        for variable in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with azurite_server(certificate) as server:
            self._borrow_and_sign(server)

    def _borrow_and_sign(self, server):
        identity = _Identity()
        store = delegated_store(parse_azure_url(server.store_url_for("delegated")), identity, capabilities=None)
        found = store.probe()
        assert (found.md5_enforced, found.conditional_put, found.signature_enforced) == (True, True, True)
        keys = [chunk_key(bytes([number])) for number in range(20)]
        tickets = [
            store.presign_put(key, stored_bytes=1, stored_sha256=key.digest, expires_in_seconds=60) for key in keys
        ]
        assert all("skoid=" in ticket.url and "spr=https" in ticket.url for ticket in tickets)
        long = store.presign_get(keys[0], expires_in_seconds=30 * 86400)
        assert 5 * 86400 < long.expires_in_seconds < 7 * 86400, "no longer than the borrowed key"
        assert identity.asked < 40
        store.close()


class _Identity:
    """Tokens as Entra ID gives them out, signed by nobody."""

    def __init__(self) -> None:
        self.asked = 0

    def get_token(self, *scopes, **_) -> AccessToken:
        self.asked += 1
        assert scopes == ("https://storage.azure.com/.default",)
        ends_at = int(time.time()) + 3600
        tenant = "11111111-1111-1111-1111-111111111111"
        claims = {
            "aud": "https://storage.azure.com",
            "iss": f"https://sts.windows.net/{tenant}/",
            "iat": ends_at - 3660,
            "nbf": ends_at - 3660,
            "exp": ends_at,
            "oid": "22222222-2222-2222-2222-222222222222",
            "tid": tenant,
        }
        parts = [{"alg": "RS256", "typ": "JWT"}, claims]
        text = ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
        return AccessToken(f"{text}.c2lnbmVk", ends_at)
