"""Chunks in a bucket of Google Cloud Storage. Clients send and read by V4 signed URLs, never through the service.

Google compares MD5 and CRC32C and knows no SHA-256. So a ticket has the length, the MD5 that the client was asked for
(rule reuse-only-hashed) and "only if there is none yet" signed in, and a copy that came in by one is unproven until the
service has read it: head() never reports a SHA-256. Objects go over the XML API, whose errors tell a missing object
from a missing bucket; listings over the JSON API, whose entries have generations. Every object has a generation, in
buckets without versions too; a delete that names it removes those bytes and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from holdfast_service.stores.base import (
    CHUNKS,
    Capabilities,
    GetTicket,
    ObjectFacts,
    ObjectKey,
    ObjectMissing,
    Opening,
    PutTicket,
    StoredObject,
    StoreUnavailable,
    StoreUrlError,
    validated_name,
    validated_project_id,
)
from holdfast_service.stores.bucket.presigned_probe import base64_md5
from holdfast_service.stores.bucket.wire import StorePool, date_of
from holdfast_service.stores.gcs.gcs_location import EXAMPLE, GcsLocation, parse_gcs_url
from holdfast_service.stores.gcs.identity import GcsWire, default_identity
from holdfast_service.stores.gcs.probe import probe_gcs
from holdfast_service.stores.gcs.signer import RsaSigner, presign, signer_for

_ONLY_NEW = {"x-goog-if-generation-match": "0"}


class GcsStore:
    """A Store, and a RemotelySignedStore."""

    kind = "gcs"

    def __init__(
        self,
        location: GcsLocation,
        wire: GcsWire,
        signer: RsaSigner,
        *,
        capabilities: Capabilities | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.location = location
        self.calls = wire
        self.capabilities = capabilities
        self.tickets_at_once = signer.at_once
        self.signer = signer
        self._now = now

    # Tickets.

    def presign_put(
        self, key: ObjectKey, *, stored_bytes: int, stored_sha256: str, md5: str | None = None, expires_in_seconds: int
    ) -> PutTicket:
        headers = {"content-length": str(stored_bytes), **_ONLY_NEW}
        if md5 is not None:
            headers["x-goog-hash"] = f"md5={base64.b64encode(bytes.fromhex(md5)).decode()}"
        url, lives_seconds = self.presign("PUT", key, headers, expires_in_seconds)
        return PutTicket("PUT", url, headers, lives_seconds)

    def presign_get(self, key: ObjectKey, *, expires_in_seconds: int) -> GetTicket:
        url, lives_seconds = self.presign("GET", key, {}, expires_in_seconds)
        return GetTicket(url, {}, lives_seconds)

    def presign(
        self, method: str, key: ObjectKey, headers: Mapping[str, str], expires_in_seconds: int, *, public: bool = True
    ) -> tuple[str, int]:
        """The URL and how long it really lives. `public` as clients reach the store, else as the service does."""
        lives_seconds = min(expires_in_seconds, self.signer.longest_seconds)
        url = presign(
            self.signer,
            method,
            self.location.public_origin if public else self.location.origin,
            self.location.path_of(key.path),
            headers=headers,
            expires_in_seconds=lives_seconds,
            at=self._now(),
            query=_version_query(key) if method == "GET" else (),
        )
        return url, lives_seconds

    # What the service itself reads and writes.

    def head(self, key: ObjectKey) -> ObjectFacts:
        path = self.location.path_of(key.path)
        query = _version_query(key)
        answer = self.calls.request("HEAD", path, query=query, accept=(200, 404))
        if answer.status == 404:
            # A HEAD cannot say whether the object or the whole bucket is missing, and the difference is everything.
            answer = self.calls.request("GET", path, query=query, stream=True)
            answer.close()  # it may have appeared meanwhile: its facts are enough
        headers = answer.headers
        return ObjectFacts(int(headers["x-goog-stored-content-length"]), None, headers["x-goog-generation"])

    def open_read(self, key: ObjectKey) -> Iterator[bytes]:
        return self.calls.read(self.location.path_of(key.path), _version_query(key))

    def put_bytes(self, key: ObjectKey, data: bytes, *, storage_class: str | None = None) -> ObjectFacts:
        headers = {**_ONLY_NEW, "x-goog-hash": f"md5={base64_md5(data)}"}
        if storage_class is not None:
            headers["x-goog-storage-class"] = storage_class
        path = self.location.path_of(key.path)
        answer = self.calls.request("PUT", path, headers=headers, body=data, accept=(200, 412))
        if answer.status == 412:
            return self.head(key)
        # The service has hashed these very bytes, and Google has compared them with what arrived.
        return ObjectFacts(len(data), hashlib.sha256(data).hexdigest(), answer.headers["x-goog-generation"])

    def delete(self, key: ObjectKey, version_id: str | None = None) -> None:
        self._delete(key.path, version_id)

    def _delete(self, relative_key: str, generation: str | None) -> None:
        path = self.location.path_of(relative_key)
        for each in self._generations(relative_key) if generation is None else [generation]:
            with suppress(ObjectMissing):
                self.calls.request("DELETE", path, query=[("generation", each)])

    def _generations(self, relative_key: str) -> list[str]:
        wanted = self.location.key_prefix + relative_key
        entries = self._listed([("prefix", wanted), ("versions", "true")], "name,generation")
        return [_field(entry, "generation") for entry in entries if _field(entry, "name") == wanted]

    def hides_deleted(self, key: ObjectKey) -> bool:
        """For the probe: deletes without naming a generation, and says whether the bytes are still there."""
        self.calls.request("DELETE", self.location.path_of(key.path))
        return bool(self._generations(key.path))

    def is_retained(self, key: ObjectKey) -> bool:
        """For the probe: whether the bucket keeps the object, for a time or until it is let go, by itself."""
        fields = "name,retentionExpirationTime,eventBasedHold"
        entries = self._listed([("prefix", self.location.key_prefix + key.path)], fields)
        return any(entry.get("retentionExpirationTime") or entry.get("eventBasedHold") for entry in entries)

    def list_objects(self, project_id: str | None) -> Iterator[StoredObject]:
        folder = "" if project_id is None else f"{validated_project_id(project_id)}/{CHUNKS}/"
        for entry in self._listed([("prefix", self.location.key_prefix + folder)], "name,size,timeCreated"):
            yield from self._described(entry)

    def _described(self, entry: Mapping[str, Any]) -> Iterator[StoredObject]:
        """Nothing for what is no chunk of ours."""
        try:
            key = ObjectKey.from_path(_field(entry, "name").removeprefix(self.location.key_prefix))
        except ValueError:
            return
        yield StoredObject(key, int(_field(entry, "size")), datetime.fromisoformat(_field(entry, "timeCreated")))

    def _listed(self, query: list[tuple[str, str]], fields: str) -> Iterator[Mapping[str, Any]]:
        page: list[tuple[str, str]] = []
        while True:
            found = self._listing([*query, *page, ("fields", f"items({fields}),nextPageToken")])
            yield from found.get("items", [])
            if "nextPageToken" not in found:
                return
            page = [("pageToken", str(found["nextPageToken"]))]

    def _listing(self, query: list[tuple[str, str]], *, tries: int = 4) -> Mapping[str, Any]:
        path = f"/storage/v1/b/{self.location.bucket}/o"
        answer = self.calls.request("GET", path, query=query, tries=tries)
        try:
            found = json.loads(answer.data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise StoreUnavailable("the store answered a listing with something else; try again")
        return found

    def write_named(self, name: str, data: bytes) -> None:
        headers = {"x-goog-hash": f"md5={base64_md5(data)}"}
        self.calls.request("PUT", self.location.path_of(validated_name(name)), headers=headers, body=data)

    def read_named(self, name: str) -> bytes:
        return self.calls.request("GET", self.location.path_of(validated_name(name))).data

    def delete_named(self, name: str) -> None:
        self._delete(validated_name(name), None)

    def list_named(self, folder: str) -> Iterator[str]:
        for entry in self._listed([("prefix", f"{self.location.key_prefix}{validated_name(folder)}/")], "name"):
            yield _field(entry, "name").removeprefix(self.location.key_prefix)

    def guard_changes(self, guard: Callable[[], None]) -> None:
        self.calls.guard = guard

    def probe(self) -> Capabilities:
        self.capabilities = probe_gcs(self)
        return self.capabilities

    def clock(self) -> datetime:
        query = [("maxResults", "1"), ("prefix", self.location.key_prefix)]
        return date_of(self.calls.request("GET", f"/storage/v1/b/{self.location.bucket}/o", query=query))

    def ping(self) -> None:
        self._listing([("maxResults", "1"), ("prefix", self.location.key_prefix)], tries=1)

    def close(self) -> None:
        self.calls.close()


def _version_query(key: ObjectKey) -> list[tuple[str, str]]:
    return [("generation", key.version_id)] if key.version_id else []


def _field(entry: Mapping[str, Any], name: str) -> str:
    try:
        return str(entry[name])
    except KeyError:
        # A listing that leaves something out must not pass for a short one: what is not listed looks deletable.
        raise StoreUnavailable(f"the store's listing lacks {name}; try again") from None


def open_store(url: str, opening: Opening) -> GcsStore:
    """Raises StoreUrlError, and StoreRefused if there are no credentials. Google's come from the environment only."""
    try:
        location = parse_gcs_url(url)
    except ValueError as error:
        raise StoreUrlError(url, str(error), EXAMPLE) from error
    pool = StorePool()
    identity = default_identity(pool)
    wire = GcsWire(location, identity, pool)
    return GcsStore(location, wire, signer_for(location, identity, pool), capabilities=opening.capabilities)
