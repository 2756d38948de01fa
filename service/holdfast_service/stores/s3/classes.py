"""S3's storage classes and its Object Lock, and what its answers say of an object."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from holdfast_protocol.tiers import ARCHIVED, ClassTerms, StorageClass, ThawSpeed
from holdfast_service.stores.base import (
    ClassFacts,
    ObjectArchived,
    ObjectFacts,
    ObjectKey,
    StoreRefused,
    StoreUnavailable,
)
from holdfast_service.stores.bucket.presigned_probe import base64_md5
from holdfast_service.stores.bucket.wire import BucketWire, error_code
from holdfast_service.stores.s3.s3_location import S3Location

# What the headers of S3's answers say of an object. Pure.


def facts_of(headers: Mapping[str, Any]) -> ObjectFacts:
    """Of a HEAD or GET with checksum mode on: else no checksum comes back."""
    version_id = headers.get("x-amz-version-id")
    return ObjectFacts(
        int(headers["content-length"]),
        _hex_sha256(headers.get("x-amz-checksum-sha256")),
        None if version_id in {None, "null"} else str(version_id),
    )


def _hex_sha256(header: str | None) -> str | None:
    """None for a missing one, and for a multipart's digest of digests (`...-3`), which is no SHA-256 of the bytes."""
    try:
        digest = base64.b64decode(header or "", validate=True)
    except binascii.Error:
        return None
    return digest.hex() if len(digest) == hashlib.sha256().digest_size else None


# S3's storage classes: server-side copies into one, what it says of them, and restore requests (see
# stores/base.py). S3Store is made of this and of what every store does.
#
# Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html and API_RestoreObject.html

_RESTORE = re.compile(r'ongoing-request="(?P<ongoing>true|false)"(?:, *expiry-date="(?P<until>[^"]+)")?')
_PROBE_PROJECT = "probe"
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
    """As S3 calls it; its own name where it has no neutral one."""
    return {each.value: name for each, name in _NAMES.items()}.get(storage_class, storage_class)


def class_of(name: str | None) -> str | None:
    """The inverse of `name_of`. None for S3's default class."""
    return None if name in {None, "STANDARD"} else _CLASSES.get(str(name), name)


class S3StorageClasses:
    """A ClassedStore."""

    class_terms = TERMS
    location: S3Location
    wire: BucketWire

    def check_storage_class(self, storage_class: StorageClass) -> None:
        body = secrets.token_bytes(32)
        digest = hashlib.sha256(body)
        key = ObjectKey(_PROBE_PROJECT, digest.hexdigest(), secrets.token_hex(16))
        path = self.location.path_of(key.path)
        headers = {
            "x-amz-checksum-sha256": base64.b64encode(digest.digest()).decode(),
            "x-amz-storage-class": name_of(storage_class),
        }
        version = self.wire.request("PUT", path, headers=headers, body=body).headers.get("x-amz-version-id")
        try:
            told = self.class_facts(key).storage_class
            if told != storage_class:
                raise StoreRefused(f"the store takes an object for {storage_class.value} and keeps it in {told}")
            if storage_class in ARCHIVED:
                with suppress(ObjectArchived):
                    self.wire.request("GET", path)
                    raise StoreRefused(
                        f"the store lets anybody read what it says is in {storage_class.value}: it has no archive"
                    )
        finally:
            # By its version, or a bucket that keeps them would keep it.
            query = [("versionId", version)] if version else []
            self.wire.request("DELETE", path, query=query, accept=(200, 204))

    def copy_object(self, source: ObjectKey, target: ObjectKey, storage_class: StorageClass) -> ClassFacts:
        headers = {
            "x-amz-copy-source": self.location.copy_source(source.path)
            + (f"?versionId={quote(source.version_id)}" if source.version_id else ""),
            "x-amz-storage-class": name_of(storage_class),
            "x-amz-checksum-algorithm": "SHA256",
        }
        answer = self.wire.request("PUT", self.location.path_of(target.path), headers=headers)
        # S3 may begin its answer with 200 and find out later that the copy failed.
        if _root_name(answer.data) != "CopyObjectResult":
            raise StoreUnavailable(
                f"the store did not copy the object ({error_code(answer.data) or 'no reason given'})"
            )
        return self.class_facts(target)

    def class_facts(self, key: ObjectKey) -> ClassFacts:
        path, headers, query = self.location.path_of(key.path), {"x-amz-checksum-mode": "ENABLED"}, version_query(key)
        answer = self.wire.request("HEAD", path, query=query, headers=headers, accept=(200, 404))
        if answer.status == 404:
            # A HEAD cannot say whether the object or the whole bucket is missing.
            self.wire.request("GET", path, query=query, headers=headers, stream=True).close()
            raise StoreUnavailable("the object appeared while the store was asked for it; ask again")
        thawing, readable_until = restore_state(answer.headers.get("x-amz-restore"))
        told = class_of(answer.headers.get("x-amz-storage-class"))
        return ClassFacts(facts_of(answer.headers), told, thawing, readable_until)

    def restore_object(self, key: ObjectKey, days: int, speed: ThawSpeed) -> None:
        body = (
            '<RestoreRequest xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Days>{days}</Days><GlacierJobParameters><Tier>{speed.value.capitalize()}</Tier></GlacierJobParameters>"
            "</RestoreRequest>"
        ).encode()
        answer = self.wire.request(
            "POST",
            self.location.path_of(key.path),
            query=[("restore", ""), *version_query(key)],
            headers={"content-type": "application/xml", "x-amz-checksum-sha256": _base64_sha256(body)},
            body=body,
            accept=(200, 202, 409),
        )
        if answer.status == 409 and (code := error_code(answer.data)) != "RestoreAlreadyInProgress":
            raise StoreRefused(f"the store does not restore the object ({code or 'no reason given'}, status 409)")


def version_query(key: ObjectKey) -> list[tuple[str, str]]:
    """What makes a request one for the version that the key names; nothing for the newest."""
    return [("versionId", key.version_id)] if key.version_id else []


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


def _root_name(document: bytes) -> str:
    try:
        return ElementTree.fromstring(document).tag.rpartition("}")[2]  # noqa: S314  (our own store's answer)
    except ElementTree.ParseError:
        return ""


def _base64_sha256(body: bytes) -> str:
    return base64.b64encode(hashlib.sha256(body).digest()).decode()


# S3's Object Lock: what the bucket says of it, and the legal hold of one version.
#
# Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_PutObjectLegalHold.html and
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObjectLockConfiguration.html.

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
# What buckets without it, stores that do not know it, and services that may not ask for it are answered.
_NONE = (400, 403, 404, 405, 501)


@dataclass(frozen=True)
class _Configuration:
    enabled: bool = False
    default_retention: bool = False


class S3ObjectLock:
    """What makes an S3Store a LockingStore."""

    location: S3Location
    wire: BucketWire

    def has_object_lock(self) -> bool:
        return self._configuration().enabled

    def set_legal_hold(self, key: ObjectKey, version_id: str | None, *, on: bool) -> None:
        status = "ON" if on else "OFF"
        body = f'<LegalHold xmlns="{_NAMESPACE}"><Status>{status}</Status></LegalHold>'.encode()
        query = [("legal-hold", "")] + ([("versionId", version_id)] if version_id else [])
        # S3 wants a checksum of the body of this call, and every store that speaks like it knows this one.
        headers = {"content-md5": base64_md5(body)}
        self.wire.request("PUT", self.location.path_of(key.path), query=query, headers=headers, body=body)

    def refuse_default_retention(self) -> None:
        """Raises StoreRefused: such a bucket locks every upload, and nothing could be deleted (rule holds-outrank)."""
        if self._configuration().default_retention:
            raise StoreRefused(
                f"the bucket {self.location.bucket} has a default retention, which locks every upload, so that nothing "
                "could be deleted; take the default retention off (Object Lock itself may stay), or use another bucket"
            )

    def _configuration(self) -> _Configuration:
        path = f"{self.location.bucket_path}/"
        answer = self.wire.request("GET", path, query=[("object-lock", "")], accept=(200, *_NONE))
        if answer.status != 200:
            return _Configuration()
        try:
            document = ElementTree.fromstring(answer.data)  # noqa: S314  (our own store's answer)
        except ElementTree.ParseError:  # of a store that does not know the question
            return _Configuration()
        return _Configuration(
            enabled=document.findtext("{*}ObjectLockEnabled") == "Enabled",
            default_retention=document.find("{*}Rule/{*}DefaultRetention") is not None,
        )
