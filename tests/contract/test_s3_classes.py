"""S3's storage classes, on a strict fake of its archives; and the fake itself: what Amazon's own library signs goes
through, and nothing else does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import boto3
import pytest
import urllib3
from botocore.config import Config
from botocore.exceptions import ClientError

from holdfast_protocol.tiers import StorageClass, ThawSpeed
from holdfast_service.stores.base import Credentials, ObjectArchived, ObjectKey, ObjectMissing, StoreRefused
from holdfast_service.stores.registry import open_store
from holdfast_service.stores.s3.classes import restore_state
from holdfast_service.stores.s3.s3_store import S3Store
from tests.support.s3_fake.server import S3Fake, s3_fake
from tests.support.seaweedfs import SeaweedFS
from tests.support.stores import chunk_key, fetch

HOUR = 3600
BODY = b"weights that nobody reads"


@pytest.fixture
def fake() -> Iterator[S3Fake]:
    with s3_fake() as server:
        yield server


@pytest.fixture
def store(fake: S3Fake) -> Iterator[S3Store]:
    opened = open_store(
        fake.store_url_for("checkpoints"), b"k" * 32, Credentials(fake.keys.access_key, fake.keys.secret_key)
    )
    assert isinstance(opened, S3Store)
    yield opened
    opened.close()


def stored(store: S3Store, storage_class: StorageClass | None) -> ObjectKey:
    """An object, copied into the class."""
    key = chunk_key(BODY)
    store.put_bytes(key, BODY)
    if storage_class is None:
        return key
    target = chunk_key(BODY)
    store.copy_object(key, target, storage_class)
    return target


class TestTheStore:
    def test_the_probe_finds_all_that_s3_enforces(self, store: S3Store) -> None:
        found = store.probe()
        assert found.sha256_enforced
        assert found.sha256_reported
        assert found.conditional_put
        assert found.content_length_enforced

    @pytest.mark.parametrize("storage_class", StorageClass)
    def test_a_copy_in_a_class_has_the_same_bytes_by_the_stores_own_checksum(
        self, store: S3Store, storage_class: StorageClass
    ) -> None:
        told = store.class_facts(stored(store, storage_class))
        assert (told.storage_class, told.facts.bytes) == (storage_class, len(BODY))
        assert told.facts.sha256 == hashlib.sha256(BODY).hexdigest()
        assert (told.thawing, told.readable_until) == (False, None)

    def test_what_is_in_no_class_says_so(self, store: S3Store) -> None:
        assert store.class_facts(stored(store, None)).storage_class is None

    @pytest.mark.parametrize("storage_class", [StorageClass.INFREQUENT, StorageClass.RARE])
    def test_what_needs_no_thaw_is_read_at_once(self, store: S3Store, storage_class: StorageClass) -> None:
        assert b"".join(store.open_read(stored(store, storage_class))) == BODY

    @pytest.mark.parametrize("storage_class", [StorageClass.ARCHIVE, StorageClass.DEEP_ARCHIVE])
    def test_what_is_archived_is_neither_read_nor_copied_nor_taken_for_missing(
        self, store: S3Store, storage_class: StorageClass
    ) -> None:
        key = stored(store, storage_class)
        with pytest.raises(ObjectArchived):
            b"".join(store.open_read(key))
        with pytest.raises(ObjectArchived):
            store.copy_object(key, chunk_key(BODY), StorageClass.INFREQUENT)
        assert fetch("", store.presign_get(key, expires_in_seconds=60)).status == 403
        with pytest.raises(ObjectMissing):
            store.class_facts(chunk_key(b"other"))

    @pytest.mark.parametrize(
        ("storage_class", "speed", "hours"),
        [
            (StorageClass.ARCHIVE, ThawSpeed.STANDARD, 4),
            (StorageClass.ARCHIVE, ThawSpeed.BULK, 9),
            (StorageClass.DEEP_ARCHIVE, ThawSpeed.BULK, 40),
        ],
    )
    def test_a_thaw_takes_its_time_and_has_its_end(
        self, fake: S3Fake, store: S3Store, storage_class: StorageClass, speed: ThawSpeed, hours: int
    ) -> None:
        key = stored(store, storage_class)
        store.restore_object(key, 2, speed)
        fake.advance(hours * HOUR - 60)
        store.restore_object(key, 2, speed)  # 409 RestoreAlreadyInProgress: it is on its way
        assert store.class_facts(key).thawing
        with pytest.raises(ObjectArchived):
            store.open_read(key)
        fake.advance(120)
        told = store.class_facts(key)
        assert not told.thawing
        assert told.readable_until is not None
        assert timedelta(days=2) <= told.readable_until - fake.now() + timedelta(minutes=5)
        assert told.readable_until - fake.now() <= timedelta(days=3)
        assert b"".join(store.open_read(key)) == BODY
        store.restore_object(key, 7, speed)  # prolongs, at once
        longer = store.class_facts(key).readable_until
        assert longer is not None
        assert longer - told.readable_until >= timedelta(days=5)
        fake.advance(9 * 24 * HOUR)
        assert store.class_facts(key).readable_until is None
        with pytest.raises(ObjectArchived):
            store.open_read(key)

    def test_expedited_is_not_for_deep_archive(self, store: S3Store) -> None:
        with pytest.raises(StoreRefused, match="InvalidArgument"):
            store.restore_object(stored(store, StorageClass.DEEP_ARCHIVE), 1, ThawSpeed.EXPEDITED)

    def test_a_restore_of_what_is_readable_is_refused(self, store: S3Store) -> None:
        with pytest.raises(ObjectArchived):
            store.restore_object(stored(store, StorageClass.RARE), 1, ThawSpeed.BULK)

    @pytest.mark.parametrize("storage_class", StorageClass)
    def test_a_bucket_with_classes_is_known_and_nothing_is_left_behind(
        self, fake: S3Fake, store: S3Store, storage_class: StorageClass
    ) -> None:
        store.check_storage_class(storage_class)
        assert fake.objects.names("") == []

    def test_a_server_without_archives_is_found_out(self, seaweedfs: SeaweedFS) -> None:
        credentials = Credentials(seaweedfs.access_key, seaweedfs.secret_key)
        opened = open_store(seaweedfs.store_url, b"k" * 32, credentials)
        assert isinstance(opened, S3Store)
        with pytest.raises(StoreRefused, match=r"has no archive|keeps it in"):
            opened.check_storage_class(StorageClass.ARCHIVE)
        opened.close()

    def test_what_the_restore_header_says(self) -> None:
        assert restore_state(None) == (False, None)
        assert restore_state('ongoing-request="true"') == (True, None)
        thawing, until = restore_state('ongoing-request="false", expiry-date="Fri, 21 Dec 2012 00:00:00 GMT"')
        assert not thawing
        assert until is not None
        assert until.isoformat() == "2012-12-21T00:00:00+00:00"


class TestTheFake:
    @pytest.fixture
    def amazon(self, fake: S3Fake):
        """Amazon's own library."""
        return boto3.client(
            "s3",
            endpoint_url=fake.endpoint,
            region_name=fake.keys.region,
            aws_access_key_id=fake.keys.access_key,
            aws_secret_access_key=fake.keys.secret_key,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                retries={"max_attempts": 1},
            ),
        )

    def test_amazons_library_goes_the_whole_way(self, fake: S3Fake, amazon) -> None:
        amazon.put_object(Bucket=fake.bucket, Key="a/b", Body=BODY)
        amazon.copy_object(
            Bucket=fake.bucket, Key="c", CopySource={"Bucket": fake.bucket, "Key": "a/b"}, StorageClass="GLACIER"
        )
        with pytest.raises(ClientError, match="InvalidObjectState"):
            amazon.get_object(Bucket=fake.bucket, Key="c")
        with pytest.raises(ClientError, match="ObjectNotInActiveTierError"):
            amazon.copy_object(Bucket=fake.bucket, Key="d", CopySource={"Bucket": fake.bucket, "Key": "c"})
        asked = {"Days": 1, "GlacierJobParameters": {"Tier": "Expedited"}}
        amazon.restore_object(Bucket=fake.bucket, Key="c", RestoreRequest=asked)
        with pytest.raises(ClientError, match="RestoreAlreadyInProgress"):
            amazon.restore_object(Bucket=fake.bucket, Key="c", RestoreRequest=asked)
        fake.advance(HOUR)
        assert amazon.get_object(Bucket=fake.bucket, Key="c")["Body"].read() == BODY
        assert 'ongoing-request="false"' in amazon.head_object(Bucket=fake.bucket, Key="c")["Restore"]

    def test_a_url_is_good_for_what_it_was_signed_for_and_for_nothing_else(self, fake: S3Fake, store: S3Store) -> None:
        ticket = store.presign_get(stored(store, None), expires_in_seconds=60)
        assert fetch("", ticket).data == BODY
        other = chunk_key(b"other").generation
        for url in (
            ticket.url.replace("X-Amz-Expires=60", "X-Amz-Expires=61"),
            ticket.url.replace(ticket.url.partition("?")[0][-32:], other),
            ticket.url[:-1] + ("0" if ticket.url[-1] != "0" else "1"),
            ticket.url.replace("us-east-1", "eu-central-1"),
        ):
            assert fetch("", replace(ticket, url=url)).status == 403
        assert urllib3.request("PUT", ticket.url, body=b"", retries=False).status == 403
        added = urllib3.request("GET", ticket.url, headers={"x-amz-storage-class": "GLACIER"}, retries=False)
        assert added.status == 403

    def test_what_it_does_not_know_is_refused(self, fake: S3Fake, amazon) -> None:
        amazon.put_object(Bucket=fake.bucket, Key="a", Body=BODY)
        for call in (
            lambda: amazon.put_object(Bucket=fake.bucket, Key="a", Body=BODY, StorageClass="ONEZONE_IA"),
            lambda: amazon.put_object(Bucket=fake.bucket, Key="a", Body=BODY, Tagging="a=b"),
            lambda: amazon.list_multipart_uploads(Bucket=fake.bucket),
            lambda: amazon.get_object_tagging(Bucket=fake.bucket, Key="a"),
        ):
            with pytest.raises(ClientError, match=r"NotImplemented|InvalidStorageClass"):
                call()
