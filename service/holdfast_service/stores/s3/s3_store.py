"""Chunks in a bucket: S3 and what speaks like it. Clients send and read by presigned URLs, never through the service.

A ticket has Content-Length and the SHA-256 of the bytes signed in: a store that enforces them takes these bytes or
none. probe.py asks whether it does, and head() repeats only what the store itself computed. The service signs
`If-None-Match` in if the probe saw it work: its 412 on a retry means that the object is there.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from holdfast_service.stores.base import (
    Capabilities,
    ObjectFacts,
    ObjectKey,
    ObjectMissing,
    Opening,
    PutTicket,
    StoreUnavailable,
    StoreUrlError,
)
from holdfast_service.stores.bucket.bucket_calls import AlreadyDone
from holdfast_service.stores.bucket.bucket_store import Entry
from holdfast_service.stores.s3.calls import S3Calls
from holdfast_service.stores.s3.classes import (
    S3ObjectLock,
    S3StorageClasses,
    base64_sha256,
    class_of,
    facts_of,
    name_of,
    version_of,
)
from holdfast_service.stores.s3.probe import probe_s3
from holdfast_service.stores.s3.s3_location import EXAMPLE, S3Credentials, S3Location, parse_s3_url
from holdfast_service.stores.s3.signer import LONGEST_URL_SECONDS, SigV4Signer


class S3Store(S3StorageClasses, S3ObjectLock):
    """A Store, a ClassedStore and a LockingStore."""

    kind = "s3"

    def __init__(
        self,
        location: S3Location,
        credentials: S3Credentials,
        *,
        capabilities: Capabilities | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.location = location
        self.capabilities = capabilities
        self._credentials = credentials
        self._now = now
        self._signer = SigV4Signer(location.region)
        self.calls = S3Calls(location, credentials)

    # Tickets.

    def presign_put(
        self, key: ObjectKey, *, stored_bytes: int, stored_sha256: str, md5: str | None = None, expires_in_seconds: int
    ) -> PutTicket:
        headers = {"content-length": str(stored_bytes), "x-amz-checksum-sha256": _base64(stored_sha256)}
        headers |= self.location.encryption_headers
        if md5 is not None:
            headers["content-md5"] = _base64(md5)
        if self.capabilities is not None and self.capabilities.conditional_put:
            headers["if-none-match"] = "*"
        url, lives_seconds = self.presign("PUT", key, headers, expires_in_seconds)
        return PutTicket("PUT", url, headers, lives_seconds)

    def presign(
        self, method: str, key: ObjectKey, headers: Mapping[str, str], expires_in_seconds: int, *, public: bool = True
    ) -> tuple[str, int]:
        """The URL and how long it really lives: until its own end or that of the credentials. `public` as clients
        reach the store, else as the service does."""
        credentials, end_at = self._credentials.current()
        now = self._now()
        lives_seconds = min(expires_in_seconds, LONGEST_URL_SECONDS)
        if end_at is not None:
            lives_seconds = min(lives_seconds, int((end_at - now).total_seconds()))
        if lives_seconds <= 0:
            raise StoreUnavailable("the store's credentials have ended and were not refreshed; check their source")
        url = self._signer.presign(
            credentials,
            method,
            self.location.public_origin if public else self.location.origin,
            self.location.path_of(key.path),
            headers=headers,
            expires_in_seconds=lives_seconds,
            at=now,
            query=[("versionId", key.version_id)] if method == "GET" and key.version_id else (),
        )
        return url, lives_seconds

    # What the service itself reads and writes.

    def head(self, key: ObjectKey) -> ObjectFacts:
        return facts_of(self.described(key))

    def open_read(self, key: ObjectKey) -> Iterator[bytes]:
        return self.calls.read_pieces(self.location.key_of(key.path), version_of(key.version_id))

    def put_bytes(self, key: ObjectKey, data: bytes, *, storage_class: str | None = None) -> ObjectFacts:
        with suppress(AlreadyDone):
            self.write(self.location.key_of(key.path), data, overwrite=False, storage_class=storage_class)
        # What the store itself has hashed is what counts.
        return self.head(key)

    def write(self, key: str, data: bytes, *, overwrite: bool, storage_class: str | None = None) -> str | None:
        more = {"ChecksumSHA256": base64_sha256(data), **self.location.encryption}
        if storage_class is not None:
            more["StorageClass"] = name_of(storage_class)
        if not overwrite and self.capabilities is not None and self.capabilities.conditional_put:
            more["IfNoneMatch"] = "*"
        version_id: str | None = self.calls.put(key, data, **more).get("VersionId")
        return version_id

    def read_whole(self, key: str, *, most_bytes: int) -> bytes:
        return self.calls.read_whole(key, most_bytes)

    def remove(self, key: str, version_id: str | None = None) -> None:
        if version_id is not None:
            with suppress(ObjectMissing):
                self.calls.do("delete_object", Key=key, **version_of(version_id))
            return
        # In a versioned bucket a plain delete only hides the object: all its bytes stay until the versions go. If that
        # were cut off in between, no listing would ever show it again.
        versioned = self.capabilities is not None and self.capabilities.versioned
        if versioned or self.calls.do("delete_object", Key=key).get("DeleteMarker"):
            self._remove_versions(key)

    def _remove_versions(self, key: str) -> None:
        """A page at a time: of a name that is written again and again there may be millions. Markers first, which hide
        the others, then the oldest, and the newest as the last of all: what is left of an object whose deletion is cut
        off is listed, and is what it was before."""
        more = True
        while more:
            page = self.calls.ask("list_object_versions", Prefix=key)
            markers, versions = (
                [_field(entry, "VersionId") for entry in page.get(kind, []) if _field(entry, "Key") == key]
                for kind in ("DeleteMarkers", "Versions")
            )
            # Asked from the start each time: every page begins with the newest, which stays until no other is left.
            more = page.get("IsTruncated", False) and len(markers) + len(versions) > 1
            for version in (*markers, *reversed(versions[1:] if more else versions)):
                self.remove(key, version)

    def entries(self, prefix: str) -> Iterator[Entry]:
        asked: dict[str, Any] = {"Prefix": prefix}
        while True:
            page = self.calls.ask("list_objects_v2", **asked)
            for each in page.get("Contents", []):
                storage_class = class_of(each.get("StorageClass"))
                yield Entry(each.get("Key"), each.get("Size"), each.get("LastModified"), storage_class)
            if not _field(page, "IsTruncated"):
                return
            asked["ContinuationToken"] = _field(page, "NextContinuationToken")

    def probe(self) -> Capabilities:
        self.refuse_default_retention()
        self.capabilities = probe_s3(self)
        return self.capabilities

    def clock(self) -> datetime:
        return self.calls.clock()

    def ping(self) -> None:
        found = self.calls.ask("list_objects_v2", tries=1, Prefix=self.location.key_prefix, MaxKeys=1)
        _field(found, "IsTruncated")  # else it is something else that answers


def _field(answer: Mapping[str, Any], name: str) -> Any:
    try:
        return answer[name]
    except KeyError:
        # A listing that leaves something out must not pass for a short one: what is not listed looks deletable.
        raise StoreUnavailable(f"the store's listing lacks {name}; try again") from None


def _base64(hex_digest: str) -> str:
    return base64.b64encode(bytes.fromhex(hex_digest)).decode()


def open_store(url: str, opening: Opening) -> S3Store:
    """Raises StoreUrlError, and StoreRefused if there are no credentials."""
    try:
        location = parse_s3_url(url)
    except ValueError as error:
        raise StoreUrlError(url, str(error), EXAMPLE) from error
    credentials = S3Credentials(opening.credentials, location.profile)
    return S3Store(location, credentials, capabilities=opening.capabilities)
