"""Buckets that a key of a KMS encrypts: the real SeaweedFS with its own KMS, and the requests beside botocore's."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import boto3
import botocore.auth
import pytest
import urllib3
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest

from holdfast_protocol.tiers import StorageClass
from holdfast_service.stores.base import Credentials, ObjectMissing, StoreRefused, StoreUrlError
from holdfast_service.stores.registry import open_store
from holdfast_service.stores.s3.s3_location import S3Credentials, parse_s3_url
from holdfast_service.stores.s3.s3_store import S3Store
from tests.support.seaweedfs import SeaweedFS, seaweedfs_server
from tests.support.stores import chunk_key, fetch, put_ticket, send

ARN = "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"


class Bucket:
    """One of its own, with the owner's client."""

    def __init__(self, server: SeaweedFS, name: str) -> None:
        self.server, self.name = server, name
        self.keys = Credentials(server.access_key, server.secret_key)
        self.owner: Any = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
            region_name="us-east-1",
        )
        self.owner.create_bucket(Bucket=name)

    def encrypt_by_default(self, key: str) -> None:
        default = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}
        rules = {"Rules": [{"ApplyServerSideEncryptionByDefault": default}]}
        self.owner.put_bucket_encryption(Bucket=self.name, ServerSideEncryptionConfiguration=rules)

    def open(self, **options: str) -> S3Store:
        more = "".join(f"&{name}={value}" for name, value in options.items())
        store = open_store(self.server.store_url_for("checkpoints", self.name) + more, b"k" * 32, self.keys)
        assert isinstance(store, S3Store)
        return store

    def encrypted_by(self, store: S3Store, path: str) -> tuple[str | None, str | None]:
        told = self.owner.head_object(Bucket=self.name, Key=store.location.key_of(path))
        return told.get("ServerSideEncryption"), told.get("SSEKMSKeyId")


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedFS]:
    with seaweedfs_server(kms=True) as running:
        yield running


@pytest.fixture
def bucket(server: SeaweedFS) -> Bucket:
    return Bucket(server, f"kms-{secrets.token_hex(4)}")


def test_a_bucket_that_encrypts_by_default_needs_nothing_in_a_ticket(bucket: Bucket) -> None:
    plain = secrets.token_bytes(2_000_000)
    store = bucket.open()
    key = chunk_key(plain)
    assert send("", put_ticket(store, key, plain), plain).status == 200
    assert bucket.server.keeps_on_disk(plain[:64]), "else the next line would say nothing"
    bucket.encrypt_by_default("of-the-team")
    enforced = store.probe()
    assert (enforced.sha256_enforced, enforced.sha256_reported, enforced.conditional_put) == (True, True, True)
    body = secrets.token_bytes(2_000_000)
    key = chunk_key(body)
    ticket = put_ticket(store, key, body)
    assert not [name for name in ticket.headers if "encryption" in name]
    assert send("", ticket, body).status == 200
    assert bucket.encrypted_by(store, key.path) == ("aws:kms", "of-the-team")
    assert not bucket.server.keeps_on_disk(body[:64])
    # The checksum is that of the plain bytes; an ETag is none of a KMS's objects, and nothing here reads it.
    assert store.head(key).sha256 == key.digest
    assert b"".join(store.open_read(key)) == body
    assert fetch("", store.presign_get(key, expires_in_seconds=60), byte_range="10-19").data == body[10:20]


def test_wrong_bytes_are_refused_under_a_kms_too(bucket: Bucket) -> None:
    bucket.encrypt_by_default("of-the-team")
    store = bucket.open(kms_key="of-the-team")
    store.probe()
    body = secrets.token_bytes(1000)
    key = chunk_key(body)
    assert send("", put_ticket(store, key, body), body[::-1]).status == 400
    with pytest.raises(ObjectMissing):
        store.head(key)


def test_a_key_that_the_store_names_is_in_every_write(bucket: Bucket) -> None:
    bucket.encrypt_by_default("another")
    store = bucket.open(kms_key="of-the-team")
    store.probe()
    body = secrets.token_bytes(1000)
    sent, put, copied = (chunk_key(body) for _ in range(3))
    ticket = put_ticket(store, sent, body)
    assert send("", ticket, body).status == 200
    store.put_bytes(put, body)
    store.write_named("records/one", b"a record")
    for path in (sent.path, put.path, "records/one"):
        assert bucket.encrypted_by(store, path) == ("aws:kms", "of-the-team"), path
    store.copy_object(sent, copied, StorageClass.INFREQUENT)
    assert bucket.encrypted_by(store, copied.path)[0] == "aws:kms"
    assert b"".join(store.open_read(copied)) == body
    # They are signed: who holds the ticket can neither leave them out nor name another key.
    name = "x-amz-server-side-encryption-aws-kms-key-id"
    for headers in (
        {each: value for each, value in ticket.headers.items() if "encryption" not in each},
        {**ticket.headers, name: "of-somebody-else"},
    ):
        assert urllib3.request("PUT", ticket.url, headers=headers, body=body, retries=False).status == 403


def test_a_store_that_does_not_encrypt_as_it_was_told_is_refused(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bucket.open(kms_key="of-the-team")
    described = store.described
    monkeypatch.setattr(store, "described", lambda key: {**described(key), "SSEKMSKeyId": "another"})
    with pytest.raises(StoreRefused, match="encrypted by another"):
        store.probe()
    monkeypatch.setattr(
        store,
        "described",
        lambda key: {name: value for name, value in described(key).items() if "SSE" not in name and "Side" not in name},
    )
    with pytest.raises(StoreRefused, match="encrypted by nothing"):
        store.probe()


def test_a_copy_is_encrypted_by_the_key_of_its_own_store(bucket: Bucket) -> None:
    other = Bucket(bucket.server, f"kms-{secrets.token_hex(4)}")
    bucket.encrypt_by_default("of-the-first")
    other.encrypt_by_default("of-the-second")
    first, second = bucket.open(), other.open()
    body = secrets.token_bytes(1000)
    key = chunk_key(body)
    first.put_bytes(key, body)
    second.put_bytes(key, b"".join(first.open_read(key)))  # as the controller does: read, hashed, written
    assert bucket.encrypted_by(first, key.path) == ("aws:kms", "of-the-first")
    assert other.encrypted_by(second, key.path) == ("aws:kms", "of-the-second")
    assert second.head(key).sha256 == key.digest


@pytest.mark.parametrize("kms_key", [ARN, "alias/checkpoints", "1234abcd-12ab-34cd-56ef-1234567890ab"])
def test_what_is_signed_equals_botocores(monkeypatch: pytest.MonkeyPatch, kms_key: str) -> None:
    at = datetime(2026, 11, 1, 12, tzinfo=UTC)
    keys = Credentials("AKIDEXAMPLE", "secret")
    location = parse_s3_url(f"s3://bucket/prefix?region=eu-central-1&kms_key={kms_key}")
    store = S3Store(location, S3Credentials(keys), now=lambda: at)
    key = chunk_key(b"weights")
    ticket = store.presign_put(key, stored_bytes=7, stored_sha256=key.digest, expires_in_seconds=900)
    headers = {
        "content-length": "7",
        "x-amz-checksum-sha256": base64.b64encode(bytes.fromhex(key.digest)).decode(),
        "x-amz-server-side-encryption": "aws:kms",
        "x-amz-server-side-encryption-aws-kms-key-id": kms_key,
    }
    assert ticket.headers == headers
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: at)
    url = f"https://bucket.s3.eu-central-1.amazonaws.com/prefix/{key.path}"
    theirs = AWSRequest("PUT", url, headers=headers)
    S3SigV4QueryAuth(
        botocore.credentials.Credentials("AKIDEXAMPLE", "secret"), "s3", "eu-central-1", expires=900
    ).add_auth(theirs)
    assert ticket.url == theirs.url
    assert json.dumps(ticket.headers)  # it goes to trainers as it is


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket?region=eu-central-1&sse_customer_key=c2VjcmV0",
        "s3://bucket?region=eu-central-1&sse-c=c2VjcmV0",
        "gs://bucket?encryption_key=c2VjcmV0",
        "az://container?account=myaccount&customer_provided_key=c2VjcmV0",
    ],
)
def test_a_key_that_every_caller_would_need_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StoreUrlError, match="SSE-C") as refused:
        open_store(url, b"k" * 32, Credentials("a", "b"))
    assert "KMS" in str(refused.value)
    assert "c2VjcmV0" not in str(refused.value)


@pytest.mark.parametrize("key", ["", "key with spaces", "https://kms.example", "a\r\nx-amz-acl: public-read"])
def test_what_is_no_key_of_a_kms_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="kms_key"):
        parse_s3_url(f"s3://bucket?region=eu-central-1&kms_key={key}")
