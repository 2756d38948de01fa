"""S3's storage classes and its Object Lock, and what its answers say of an object."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from holdfast_protocol.tiers import ClassTerms, StorageClass, ThawSpeed
from holdfast_service.stores.base import (
    ClassFacts,
    ObjectFacts,
    ObjectKey,
    ObjectMissing,
    StoreRefused,
    StoreUnavailable,
)
from holdfast_service.stores.bucket.bucket_calls import AlreadyDone
from holdfast_service.stores.bucket.bucket_store import ArchivingStore
from holdfast_service.stores.s3.calls import S3Calls
from holdfast_service.stores.s3.s3_location import S3Location


def facts_of(answer: Mapping[str, Any]) -> ObjectFacts:
    """What S3's answer to a HEAD or GET says, with checksum mode on: else no checksum comes back. Pure."""
    version_id = answer.get("VersionId")
    return ObjectFacts(
        int(answer["ContentLength"]),
        _hex_sha256(answer.get("ChecksumSHA256")),
        None if version_id in {None, "null"} else str(version_id),
    )


def _hex_sha256(told: str | None) -> str | None:
    """None for a missing one, and for a multipart's digest of digests (`...-3`), which is no SHA-256 of the bytes."""
    try:
        digest = base64.b64decode(told or "", validate=True)
    except binascii.Error:
        return None
    return digest.hex() if len(digest) == hashlib.sha256().digest_size else None


_RESTORE = re.compile(r'ongoing-request="(?P<ongoing>true|false)"(?:, *expiry-date="(?P<until>[^"]+)")?')
_NAMES = {
    StorageClass.INFREQUENT: "STANDARD_IA",
    StorageClass.RARE: "GLACIER_IR",
    StorageClass.ARCHIVE: "GLACIER",
    StorageClass.DEEP_ARCHIVE: "DEEP_ARCHIVE",
}
_CLASSES = {name: storage_class.value for storage_class, name in _NAMES.items()}
_HOUR = 3600
# Amazon's list for us-east-1, as documented in 2026:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/restoring-objects-retrieval-options.html
TERMS = {
    StorageClass.INFREQUENT: ClassTerms(30, {}, {None: 0.01}),
    StorageClass.RARE: ClassTerms(90, {}, {None: 0.03}),
    StorageClass.ARCHIVE: ClassTerms(
        90,
        {ThawSpeed.EXPEDITED: 5 * 60, ThawSpeed.STANDARD: 5 * _HOUR, ThawSpeed.BULK: 12 * _HOUR},
        {ThawSpeed.EXPEDITED: 0.03, ThawSpeed.STANDARD: 0.01, ThawSpeed.BULK: 0.0},
    ),
    StorageClass.DEEP_ARCHIVE: ClassTerms(
        180,
        {ThawSpeed.STANDARD: 12 * _HOUR, ThawSpeed.BULK: 48 * _HOUR},
        {ThawSpeed.STANDARD: 0.02, ThawSpeed.BULK: 0.0025},
    ),
}


def name_of(storage_class: str) -> str:
    """As S3 calls it; its own name if it has no neutral one."""
    return {each.value: name for each, name in _NAMES.items()}.get(storage_class, storage_class)


def class_of(name: str | None) -> str | None:
    """The inverse of `name_of`. None for S3's default class."""
    return None if name in {None, "STANDARD"} else _CLASSES.get(str(name), name)


class S3StorageClasses(ArchivingStore):
    """A ClassedStore: server-side copies into a class, what S3 says of them, and restore requests. S3Store is made of
    this and of what every store does.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html and API_RestoreObject.html
    """

    class_terms = TERMS
    location: S3Location
    calls: S3Calls

    def copy_object(self, source: ObjectKey, target: ObjectKey, storage_class: StorageClass) -> ClassFacts:
        copied = self.calls.do(
            "copy_object",
            Key=self.location.key_of(target.path),
            CopySource={
                "Bucket": self.location.bucket,
                "Key": self.location.key_of(source.path),
                **version_of(source.version_id),
            },
            StorageClass=name_of(storage_class),
            ChecksumAlgorithm="SHA256",
            **self.location.encryption,
        )
        # S3 may begin its answer with 200 and find out later that the copy failed; botocore raises that.
        if not copied.get("CopyObjectResult"):
            raise StoreUnavailable("the store does not say that it copied the object; try again")
        return self.class_facts(target)

    def class_facts(self, key: ObjectKey) -> ClassFacts:
        answer = self.described(key)
        thawing, readable_until = restore_state(answer.get("Restore"))
        return ClassFacts(facts_of(answer), class_of(answer.get("StorageClass")), thawing, readable_until)

    def described(self, key: ObjectKey) -> Mapping[str, Any]:
        """boto3's description of an object. ObjectMissing only if the bucket is there."""
        asked: dict[str, Any] = {
            "Key": self.location.key_of(key.path),
            "ChecksumMode": "ENABLED",
            **version_of(key.version_id),
        }
        try:
            return self.calls.ask("head_object", **asked)
        except (ObjectMissing, StoreRefused):
            # A HEAD cannot say whether the object or the whole bucket is missing, and the difference is everything; nor
            # that it is refused only for now.
            answer = self.calls.ask("get_object", **asked)
            answer["Body"].close()  # it may have appeared meanwhile: what is said of it is enough
            return answer

    def restore_object(self, key: ObjectKey, days: int, speed: ThawSpeed) -> None:
        wanted = {"Days": days, "GlacierJobParameters": {"Tier": speed.value.capitalize()}}
        path = self.location.key_of(key.path)
        with suppress(AlreadyDone):
            self.calls.do("restore_object", Key=path, RestoreRequest=wanted, **version_of(key.version_id))


def version_of(version_id: str | None) -> dict[str, Any]:
    """What makes a call one for that version, as boto3 has it; empty for the newest."""
    return {"VersionId": version_id} if version_id else {}


def restore_state(header: str | None) -> tuple[bool, datetime | None]:
    """`x-amz-restore` -> (under way, readable until). Pure. No header: there is no thawed copy and no request."""
    if header is None:
        return False, None
    match = _RESTORE.fullmatch(header.strip())
    if match is None:
        raise StoreUnavailable("the store's x-amz-restore cannot be read; ask again")
    until = match["until"]
    if match["ongoing"] == "true" or until is None:
        return match["ongoing"] == "true", None
    return False, parsedate_to_datetime(until).astimezone(UTC)


def base64_sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


class S3ObjectLock:
    """What makes an S3Store a LockingStore: what the bucket says of its Object Lock, and the legal hold of one version.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_PutObjectLegalHold.html and
    https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObjectLockConfiguration.html.
    """

    location: S3Location
    calls: S3Calls

    def has_object_lock(self) -> bool:
        return self._configuration().get("ObjectLockEnabled") == "Enabled"

    def set_legal_hold(self, key: ObjectKey, version_id: str | None, *, on: bool) -> None:
        path, hold = self.location.key_of(key.path), {"Status": "ON" if on else "OFF"}
        self.calls.do("put_object_legal_hold", Key=path, LegalHold=hold, **version_of(version_id))

    def refuse_default_retention(self) -> None:
        """Raises StoreRefused: such a bucket locks every upload, and nothing could be deleted (rule holds-outrank)."""
        if self._configuration().get("Rule", {}).get("DefaultRetention"):
            raise StoreRefused(
                f"the bucket {self.location.bucket} has a default retention, which locks every upload, so that nothing "
                "could be deleted; take the default retention off (Object Lock itself may stay), or use another bucket"
            )

    def _configuration(self) -> Mapping[str, Any]:
        try:
            answer = self.calls.ask("get_object_lock_configuration")
        except StoreRefused:
            # What buckets without it, stores that do not know it, and services that may not ask for it are answered.
            return {}
        return answer.get("ObjectLockConfiguration") or {}
