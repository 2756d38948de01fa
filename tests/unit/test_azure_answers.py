"""What the azure store asks of Azure, and what it makes of the answers that Azurite never gives.

Azurite knows neither versions nor legal holds nor retention, and a rehydration is over at once there. Here a server
says what Azure's documentation says, and looks at what it is asked.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from holdfast_client.chunks.connections import refusal
from holdfast_client.errors import ChecksumMismatch, ChunkNotFound, StoreUnavailable
from holdfast_protocol.tiers import StorageClass, ThawSpeed
from holdfast_service.stores.azure.azure_store import AzureStore
from holdfast_service.stores.base import (
    ClassFacts,
    Credentials,
    ObjectArchived,
    ObjectMismatch,
    ObjectMissing,
    StoreError,
    StoreRefused,
)
from holdfast_service.stores.base import StoreUnavailable as StoreDoesNotAnswer
from holdfast_service.stores.registry import open_store
from tests.support.scripted_http import Reply, ScriptedServer, Seen
from tests.support.stores import chunk_key

_KEY = base64.b64encode(b"k" * 64).decode()
_VERSION = "2026-03-01T10:00:00.1234567Z"


@contextmanager
def _answering(reply: Callable[[Seen], Reply]) -> Iterator[AzureStore]:
    server = ScriptedServer(reply)
    try:
        url = f"az://holdfast/ck?account=myaccount&endpoint={server.url}"
        store = open_store(url, b"k" * 32, Credentials("myaccount", _KEY))
        assert isinstance(store, AzureStore)
        yield store
        store.close()
    finally:
        server.close()


def _error(status: int, code: str, **headers: str) -> Reply:
    body = f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{code}</Code><Message>No.</Message></Error>'.encode()
    return Reply(status, body, {"Content-Type": "application/xml", "x-ms-error-code": code, **headers})


def _blob(**headers: str) -> Reply:
    usual = {"Content-Length": "0", "Last-Modified": "Sun, 01 Mar 2026 10:00:00 GMT", "ETag": '"1"'}
    return Reply(200, b"", {**usual, "x-ms-blob-type": "BlockBlob", **headers})


@pytest.mark.parametrize(
    ("status", "code", "becomes", "says"),
    [
        (404, "BlobNotFound", ObjectMissing, "no such object"),
        (404, "ContainerNotFound", StoreRefused, "make the container"),
        (409, "BlobArchived", ObjectArchived, "thaw it"),
        (409, "BlobBeingRehydrated", ObjectArchived, "thaw it"),
        (400, "Md5Mismatch", ObjectMismatch, "refused the bytes"),
        (409, "BlobImmutableDueToLegalHold", StoreRefused, "holds the object"),
        (503, "ServerBusy", StoreDoesNotAnswer, "come back later"),
        (500, "OperationTimedOut", StoreDoesNotAnswer, "come back later"),
        (403, "AuthorizationPermissionMismatch", StoreRefused, "AZURE_STORAGE_KEY"),
    ],
)
def test_what_azure_says_becomes_the_contracts_error(status, code, becomes, says):
    with _answering(lambda _: _error(status, code)) as store:
        with pytest.raises(becomes, match=says) as raised:
            store.calls.read(store.calls.container.get_container_properties, tries=1)
        assert type(raised.value) is becomes
        assert _KEY not in str(raised.value)


def test_a_clock_that_is_off_is_named_and_the_stores_time_is_told_all_the_same():
    theirs = datetime.now(UTC) + timedelta(hours=3)

    def reply(_: Seen) -> Reply:
        return _error(403, "AuthenticationFailed", Date=format_datetime(theirs, usegmt=True))

    with _answering(reply) as store:
        with pytest.raises(StoreRefused, match="set both by NTP"):
            store.ping()
        assert abs(store.clock() - theirs) < timedelta(seconds=2)


@pytest.mark.rule("mark-before-delete")
def test_deleting_where_versions_are_kept_leaves_no_bytes():
    key, deleted = chunk_key(b"versions"), []

    def reply(seen: Seen) -> Reply:
        if seen.method == "DELETE":
            deleted.append(seen.query.get("versionid"))
            return Reply(202)
        assert (seen.query["comp"], seen.query["include"]) == ("list", "versions")
        entries = "".join(
            f"<Blob><Name>{name}</Name><VersionId>{version}</VersionId><Properties><BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name, version in ((f"ck/{key.path}", "1"), (f"ck/{key.path}", "2"), (f"ck/{key.path}0", "3"))
        )
        body = f"<EnumerationResults><Blobs>{entries}</Blobs><NextMarker/></EnumerationResults>".encode()
        return Reply(200, body, {"Content-Type": "application/xml"})

    with _answering(reply) as store:
        store.delete(key)
        assert deleted == [None, "1", "2"]
        store.delete(key, "9")
        assert deleted[3:] == ["9"]


@pytest.mark.rule("no-ticket-reuse")
def test_a_version_is_read_and_signed_as_that_version():
    key = chunk_key(b"version")
    exact = type(key)(key.project_id, key.digest, key.generation, _VERSION)

    def reply(seen: Seen) -> Reply:
        assert seen.query["versionid"] == _VERSION
        return _blob(**{"x-ms-version-id": _VERSION})

    with _answering(reply) as store:
        assert store.head(exact).version_id == _VERSION
        url = store.presign_get(exact, expires_in_seconds=60).url
    assert "versionid=2026-03-01T10%3A00%3A00.1234567Z&" in url
    assert "sr=bv" in url


def _copies(answers: list[Reply], tier: str, md5_of: bytes) -> tuple[ClassFacts, list[str]]:
    """A copy of `bytes` into the archive: what it says, and the methods that were called."""
    md5 = base64.b64encode(hashlib.md5(md5_of, usedforsecurity=False).digest()).decode()
    done = []

    def reply(seen: Seen) -> Reply:
        done.append(seen.method)
        if seen.method == "PUT":
            return answers.pop(0)
        if seen.method == "HEAD":
            return _blob(**{"Content-Length": "5", "x-ms-access-tier": tier, "Content-MD5": md5})
        return Reply(206, b"bytes", {"Content-Range": "bytes 0-4/5", "Content-Type": "application/octet-stream"})

    with _answering(reply) as store:
        told = store.copy_object(chunk_key(b"warm"), chunk_key(b"cold copy"), StorageClass.ARCHIVE)
    assert answers == []
    return told, done


def test_a_copy_whose_write_loses_its_reply_is_there_and_no_failure():
    told, _ = _copies([_error(500, "OperationTimedOut"), _error(409, "BlobArchived")], "Archive", b"bytes")
    assert (told.facts.bytes, told.storage_class) == (5, StorageClass.ARCHIVE)


@pytest.mark.rule("row-before-copy")
@pytest.mark.parametrize(
    ("code", "tier", "found"),
    [("BlobArchived", "Archive", StorageClass.ARCHIVE), ("BlobAlreadyExists", "Hot", None)],
)
def test_a_copy_that_an_earlier_try_has_made_is_never_deleted(code, tier, found):
    """Another worker may have settled it since, and have taken the hot one away: it may be the only one. A thaw may
    have changed its class."""
    told, done = _copies([_error(409, code)], tier, b"bytes")
    assert (told.facts.bytes, told.storage_class) == (5, found)
    assert set(done) == {"GET", "PUT", "HEAD"}


def test_other_bytes_under_a_copys_key_are_no_copy():
    with pytest.raises(ObjectMismatch, match="other bytes"):
        _copies([_error(409, "BlobAlreadyExists")], "Archive", b"other")


@pytest.mark.parametrize(("speed", "priority"), [(ThawSpeed.EXPEDITED, "High"), (ThawSpeed.STANDARD, "Standard")])
def test_a_thaw_moves_to_the_hot_tier_and_is_under_way_until_it_is_there(speed, priority):
    asked = []

    def reply(seen: Seen) -> Reply:
        if seen.method == "PUT":
            assert (seen.query["comp"], seen.headers["x-ms-access-tier"]) == ("tier", "Hot")
            asked.append(seen.headers["x-ms-rehydrate-priority"])
            return Reply(202) if len(asked) == 1 else _error(409, "BlobBeingRehydrated")
        return _blob(**{"x-ms-access-tier": "Archive", "x-ms-archive-status": "rehydrate-pending-to-hot"})

    with _answering(reply) as store:
        key = chunk_key(b"cold")
        store.restore_object(key, 3, speed)
        store.restore_object(key, 3, speed)  # on its way already
        told = store.class_facts(key)
    assert asked == [priority, priority]
    assert (told.storage_class, told.thawing, told.readable_until) == (StorageClass.ARCHIVE, True, None)


def test_the_accounts_default_tier_is_no_class_of_its_own():
    with _answering(lambda _: _blob(**{"x-ms-access-tier": "Cool", "x-ms-access-tier-inferred": "true"})) as store:
        assert store.class_facts(chunk_key(b"default")).storage_class is None


@pytest.mark.rule("holds-outrank")
def test_a_legal_hold_is_put_on_a_version_and_taken_off():
    asked = []

    def reply(seen: Seen) -> Reply:
        if seen.query.get("comp") == "legalhold":
            asked.append((seen.query.get("versionid"), seen.headers["x-ms-legal-hold"].lower()))
            return Reply(200, headers={"x-ms-legal-hold": seen.headers["x-ms-legal-hold"]})
        return Reply(200, headers={"x-ms-immutable-storage-with-versioning-enabled": "true"})

    with _answering(reply) as store:
        assert store.has_object_lock()
        store.set_legal_hold(chunk_key(b"held"), _VERSION, on=True)
        store.set_legal_hold(chunk_key(b"held"), None, on=False)
    assert asked == [(_VERSION, "true"), (None, "false")]


@pytest.mark.rule("holds-outrank")
@pytest.mark.parametrize("header", ["x-ms-has-immutability-policy", "x-ms-has-legal-hold"])
def test_a_container_that_locks_whatever_is_written_is_refused_at_the_probe(header):
    with _answering(lambda _: Reply(200, headers={header: "true"})) as store:
        with pytest.raises(StoreRefused, match="locks every upload"):
            store.probe()
        assert store.capabilities is None


def test_an_account_with_folders_is_refused_at_the_probe():
    with _answering(lambda _: Reply(200, headers={"x-ms-is-hns-enabled": "true"})) as store:
        with pytest.raises(StoreRefused, match="hierarchical namespace"):
            store.probe()


def test_a_listing_goes_on_behind_each_page_and_never_ends_for_a_failure():
    keys = [chunk_key(bytes([number])) for number in range(2)]
    asked = []

    def reply(seen: Seen) -> Reply:
        asked.append(seen.query.get("marker"))
        if len(asked) == 2:
            return _error(503, "ServerBusy")
        number = 0 if seen.query.get("marker") is None else 1
        entry = (
            f"<Blob><Name>ck/{keys[number].path}</Name><Properties><Last-Modified>Sun, 01 Mar 2026 10:00:00 GMT"
            "</Last-Modified><Content-Length>7</Content-Length><BlobType>BlockBlob</BlobType></Properties></Blob>"
        )
        marker = "" if number else "next"
        body = f"<EnumerationResults><Blobs>{entry}</Blobs><NextMarker>{marker}</NextMarker></EnumerationResults>"
        return Reply(200, body.encode(), {"Content-Type": "application/xml"})

    with _answering(reply) as store:
        assert [each.key for each in store.list_objects("p1")] == keys
    assert asked == [None, "next", "next"]


def test_a_ticket_tells_the_client_what_azures_codes_mean():
    with _answering(lambda _: Reply(200)) as store:
        key = chunk_key(b"x")
        put = store.presign_put(key, stored_bytes=1, stored_sha256=key.digest, expires_in_seconds=60)
        get = store.presign_get(key, expires_in_seconds=60)
    assert {code for code, means in put.answers.items() if means == "stored"} == {
        "BlobAlreadyExists",
        "UnauthorizedBlobOverwrite",
    }
    assert isinstance(refusal(400, _error(400, "Md5Mismatch").body, put.answers), ChecksumMismatch)
    assert isinstance(refusal(404, _error(404, "BlobNotFound").body, get.answers), ChunkNotFound)
    assert isinstance(refusal(409, _error(409, "BlobArchived").body, get.answers), ChunkNotFound)
    assert isinstance(refusal(503, _error(503, "ServerBusy").body, get.answers), StoreUnavailable)


def test_more_than_one_put_takes_is_refused_before_it_is_sent():
    with _answering(lambda _: Reply(200)) as store:
        key = chunk_key(b"x")
        with pytest.raises(StoreError, match="5000 MiB"):
            store.presign_put(key, stored_bytes=5000 * 2**20 + 1, stored_sha256=key.digest, expires_in_seconds=60)
