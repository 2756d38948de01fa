"""Chunks in a bucket: S3 and what speaks like it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from xml.etree import ElementTree

from holdfast_service.stores.base import (
    CHUNKS,
    Capabilities,
    GetTicket,
    ObjectFacts,
    ObjectKey,
    Opening,
    PutTicket,
    StoredObject,
    StoreUnavailable,
    StoreUrlError,
    validated_name,
    validated_project_id,
)
from holdfast_service.stores.bucket.wire import BucketWire, date_of
from holdfast_service.stores.s3.classes import (
    S3ObjectLock,
    S3StorageClasses,
    class_of,
    facts_of,
    name_of,
    version_query,
)
from holdfast_service.stores.s3.probe import probe_s3
from holdfast_service.stores.s3.s3_location import (
    EXAMPLE,
    CredentialSource,
    DefaultChainCredentials,
    FixedCredentials,
    S3Location,
    parse_s3_url,
)
from holdfast_service.stores.s3.signer import EMPTY_SHA256, LONGEST_URL_SECONDS, SigV4Signer

# How the service's own requests to S3 are signed. The rest of a request is stores/bucket/wire.py's.


class S3Wire(BucketWire):
    """Header-signed requests from the service to the store."""

    def __init__(self, location: S3Location, credentials: CredentialSource, signer: SigV4Signer) -> None:
        super().__init__(
            location.origin,
            name=f"the store at {location.origin}, bucket {location.bucket},",
            remedy="check credentials, permissions, region and clock",
        )
        self._credentials = credentials
        self._signer = signer

    def _signed(
        self, method: str, path: str, *, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> dict[str, str]:
        credentials, _ = self._credentials.current()
        return self._signer.sign_headers(
            credentials,
            method,
            self._origin,
            path,
            headers=headers,
            payload_sha256=hashlib.sha256(body).hexdigest() if body else EMPTY_SHA256,
            at=datetime.now(UTC),
            query=query,
        )


# Chunks in a bucket: S3 and what speaks like it. Clients send and read by presigned URLs, never through the service.
#
# A ticket has Content-Length and the SHA-256 of the bytes signed in, so a store that enforces them takes these bytes or
# none; whether it does is probe.py's question, and head() repeats only what the store itself computed. `If-None-Match`
# is signed in where the probe saw it work: its 412 on a retry means that the object is there.


class S3Store(S3StorageClasses, S3ObjectLock):
    """A Store, a ClassedStore and a LockingStore."""

    kind = "s3"

    def __init__(
        self,
        location: S3Location,
        credentials: CredentialSource,
        *,
        capabilities: Capabilities | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.location = location
        self.capabilities = capabilities
        self._credentials = credentials
        self._now = now
        self._signer = SigV4Signer(location.region)
        self.wire = S3Wire(location, credentials, self._signer)

    # Tickets.

    def presign_put(
        self, key: ObjectKey, *, stored_bytes: int, stored_sha256: str, md5: str | None = None, expires_in_seconds: int
    ) -> PutTicket:
        headers = {"content-length": str(stored_bytes), "x-amz-checksum-sha256": _base64(stored_sha256)}
        if md5 is not None:
            headers["content-md5"] = _base64(md5)
        if self.capabilities is not None and self.capabilities.conditional_put:
            headers["if-none-match"] = "*"
        url, lives_seconds = self.presign("PUT", key, headers, expires_in_seconds)
        return PutTicket("PUT", url, headers, lives_seconds)

    def presign_get(self, key: ObjectKey, *, expires_in_seconds: int) -> GetTicket:
        url, lives_seconds = self.presign("GET", key, {}, expires_in_seconds)
        return GetTicket(url, {}, lives_seconds)

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
            query=version_query(key) if method == "GET" else (),
        )
        return url, lives_seconds

    # What the service itself reads and writes.

    def head(self, key: ObjectKey) -> ObjectFacts:
        path, headers, query = self.location.path_of(key.path), {"x-amz-checksum-mode": "ENABLED"}, version_query(key)
        answer = self.wire.request("HEAD", path, query=query, headers=headers, accept=(200, 404))
        if answer.status == 404:
            # A HEAD cannot say whether the object or the whole bucket is missing, and the difference is everything.
            answer = self.wire.request("GET", path, query=query, headers=headers, stream=True)
            answer.close()  # it may have appeared meanwhile: its facts are enough
        return facts_of(answer.headers)

    def open_read(self, key: ObjectKey) -> Iterator[bytes]:
        return self.wire.read(self.location.path_of(key.path), version_query(key))

    def put_bytes(self, key: ObjectKey, data: bytes, *, storage_class: str | None = None) -> ObjectFacts:
        headers = {"x-amz-checksum-sha256": _base64(hashlib.sha256(data).hexdigest())}
        if storage_class is not None:
            headers["x-amz-storage-class"] = name_of(storage_class)
        if self.capabilities is not None and self.capabilities.conditional_put:
            headers["if-none-match"] = "*"
        self.wire.request("PUT", self.location.path_of(key.path), headers=headers, body=data, accept=(200, 412))
        return self.head(key)

    def delete(self, key: ObjectKey, version_id: str | None = None) -> None:
        self._delete(key.path, version_id)

    def _delete(self, relative_key: str, version_id: str | None = None) -> None:
        query = [("versionId", version_id)] if version_id else []
        answer = self.wire.request("DELETE", self.location.path_of(relative_key), query=query, accept=(200, 204))
        if version_id is None and answer.headers.get("x-amz-delete-marker") == "true":
            # In a versioned bucket that only hid the object: all its bytes stay until the versions go.
            for version in self._versions(relative_key):
                self._delete(relative_key, version)

    def _versions(self, relative_key: str) -> list[str]:
        wanted = self.location.key_prefix + relative_key
        found = self._listing([("prefix", wanted), ("versions", "")])
        entries = [*found.iterfind("{*}Version"), *found.iterfind("{*}DeleteMarker")]
        return [_text(entry, "VersionId") for entry in entries if _text(entry, "Key") == wanted]

    def list_objects(self, project_id: str | None) -> Iterator[StoredObject]:
        folder = "" if project_id is None else f"{validated_project_id(project_id)}/{CHUNKS}/"
        for entry in self._entries(folder):
            yield from self._described(entry)

    def _entries(self, folder: str) -> Iterator[ElementTree.Element]:
        query = [("list-type", "2"), ("prefix", self.location.key_prefix + folder)]
        page = self._listing(query)
        while True:
            yield from page.iterfind("{*}Contents")
            if _text(page, "IsTruncated") != "true":
                return
            page = self._listing([*query, ("continuation-token", _text(page, "NextContinuationToken"))])

    def _described(self, entry: ElementTree.Element) -> Iterator[StoredObject]:
        """Nothing for what is no chunk of ours."""
        try:
            key = ObjectKey.from_path(_text(entry, "Key").removeprefix(self.location.key_prefix))
        except ValueError:
            return
        yield StoredObject(
            key,
            int(_text(entry, "Size")),
            datetime.fromisoformat(_text(entry, "LastModified")),
            class_of(entry.findtext("{*}StorageClass")),
        )

    def _listing(self, query: list[tuple[str, str]], *, tries: int = 4) -> ElementTree.Element:
        answer = self.wire.request("GET", self.location.bucket_path + "/", query=query, tries=tries)
        try:
            return ElementTree.fromstring(answer.data)  # noqa: S314  (our own store's answer)
        except ElementTree.ParseError as error:
            raise StoreUnavailable("the store answered a listing with something else; try again") from error

    def write_named(self, name: str, data: bytes) -> None:
        headers = {"x-amz-checksum-sha256": _base64(hashlib.sha256(data).hexdigest())}
        self.wire.request("PUT", self.location.path_of(validated_name(name)), headers=headers, body=data)

    def read_named(self, name: str) -> bytes:
        return self.wire.request("GET", self.location.path_of(validated_name(name))).data

    def delete_named(self, name: str) -> None:
        self._delete(validated_name(name))

    def list_named(self, folder: str) -> Iterator[str]:
        for entry in self._entries(f"{validated_name(folder)}/"):
            yield _text(entry, "Key").removeprefix(self.location.key_prefix)

    def guard_changes(self, guard: Callable[[], None]) -> None:
        self.wire.guard = guard

    def probe(self) -> Capabilities:
        self.refuse_default_retention()
        self.capabilities = probe_s3(self)
        return self.capabilities

    def clock(self) -> datetime:
        query = [("list-type", "2"), ("max-keys", "1"), ("prefix", self.location.key_prefix)]
        # Whom the store refuses for a clock that is too far off, it tells the time all the same.
        return date_of(self.wire.request("GET", self.location.bucket_path + "/", query=query, accept=(200, 403)))

    def ping(self) -> None:
        self._listing([("list-type", "2"), ("max-keys", "1"), ("prefix", self.location.key_prefix)], tries=1)

    def close(self) -> None:
        self.wire.close()


def _text(element: ElementTree.Element, name: str) -> str:
    found = element.findtext(f"{{*}}{name}")
    if found is None:
        # A listing that leaves something out must not pass for a short one: what is not listed looks deletable.
        raise StoreUnavailable(f"the store's listing lacks {name}; try again")
    return found


def _base64(hex_digest: str) -> str:
    return base64.b64encode(bytes.fromhex(hex_digest)).decode()


def open_store(url: str, opening: Opening) -> S3Store:
    """Raises StoreUrlError, and StoreRefused if there are no credentials."""
    try:
        location = parse_s3_url(url)
    except ValueError as error:
        raise StoreUrlError(url, str(error), EXAMPLE) from error
    given = opening.credentials
    source = FixedCredentials(given) if given is not None else DefaultChainCredentials(location.profile)
    return S3Store(location, source, capabilities=opening.capabilities)
