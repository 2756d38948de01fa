"""Chunks in a bucket of Google Cloud Storage. Clients send and read by V4 signed URLs, never through the service.

Google compares MD5 and CRC32C and knows no SHA-256. So a ticket has the length, the MD5 that the client was asked for
(rule reuse-only-hashed) and "only if there is none yet" signed in, and a copy that came in by one is unproven until the
service has read it: head() never reports a SHA-256. Every object has a generation, in buckets without versions too; a
delete that names it removes those bytes and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from google.cloud.storage import Blob

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
from holdfast_service.stores.gcs.calls import AlreadyThere, GcsCalls
from holdfast_service.stores.gcs.gcs_location import EXAMPLE, GcsLocation, parse_gcs_url
from holdfast_service.stores.gcs.identity import default_identity
from holdfast_service.stores.gcs.probe import probe_gcs
from holdfast_service.stores.gcs.signer import TicketSigner, signer_for

_ONLY_NEW = {"x-goog-if-generation-match": "0"}


class GcsStore:
    """A Store, and a RemotelySignedStore."""

    kind = "gcs"

    def __init__(
        self,
        location: GcsLocation,
        calls: GcsCalls,
        signer: TicketSigner,
        *,
        capabilities: Capabilities | None = None,
    ) -> None:
        self.location = location
        self.calls = calls
        self.capabilities = capabilities
        self.tickets_at_once = signer.at_once
        self.signer = signer

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
        url = self.calls.blob(self.location.key_of(key.path)).generate_signed_url(
            version="v4",
            method=method,
            headers=dict(headers),
            expiration=lives_seconds,
            api_access_endpoint=self.location.public_origin if public else self.location.origin,
            generation=key.version_id if method == "GET" else None,
            credentials=self.signer.credentials,
        )
        return str(url), lives_seconds

    # What the service itself reads and writes.

    def head(self, key: ObjectKey) -> ObjectFacts:
        found = self.calls.described(self.location.key_of(key.path), key.version_id)
        return ObjectFacts(int(found.size), None, str(found.generation))

    def open_read(self, key: ObjectKey) -> Iterator[bytes]:
        return self.calls.read_pieces(self.location.key_of(key.path), key.version_id)

    def put_bytes(self, key: ObjectKey, data: bytes, *, storage_class: str | None = None) -> ObjectFacts:
        try:
            generation = self.calls.put(
                self.location.key_of(key.path), data, only_new=True, storage_class=storage_class
            )
        except AlreadyThere:
            return self.head(key)
        # The service has hashed these very bytes, and Google has compared them with what arrived.
        return ObjectFacts(len(data), hashlib.sha256(data).hexdigest(), generation)

    def delete(self, key: ObjectKey, version_id: str | None = None) -> None:
        self._delete(self.location.key_of(key.path), version_id)

    def _delete(self, key: str, generation: str | None) -> None:
        for each in self._generations(key) if generation is None else [generation]:
            with suppress(ObjectMissing):
                self.calls.delete(key, each)

    def _generations(self, key: str) -> list[str]:
        entries = self.calls.listed(key, "name,generation", versions=True)
        return [str(_field(entry, "generation")) for entry in entries if _field(entry, "name") == key]

    def hides_deleted(self, key: ObjectKey) -> bool:
        """For the probe: deletes without naming a generation, and says whether the bytes are still there."""
        path = self.location.key_of(key.path)
        self.calls.delete(path, None)
        return bool(self._generations(path))

    def is_retained(self, key: ObjectKey) -> bool:
        """For the probe: whether the bucket keeps the object, for a time or until it is let go, by itself."""
        found = self.calls.described(self.location.key_of(key.path))
        return bool(found.retention_expiration_time or found.event_based_hold)

    def list_objects(self, project_id: str | None) -> Iterator[StoredObject]:
        folder = "" if project_id is None else f"{validated_project_id(project_id)}/{CHUNKS}/"
        for entry in self.calls.listed(self.location.key_of(folder), "name,size,timeCreated"):
            yield from self._described(entry)

    def _described(self, entry: Blob) -> Iterator[StoredObject]:
        """Nothing for what is no chunk of ours."""
        try:
            key = ObjectKey.from_path(_field(entry, "name").removeprefix(self.location.key_prefix))
        except ValueError:
            return
        yield StoredObject(key, int(_field(entry, "size")), _field(entry, "time_created"))

    def write_named(self, name: str, data: bytes) -> None:
        self.calls.put(self.location.key_of(validated_name(name)), data)

    def read_named(self, name: str) -> bytes:
        return self.calls.read_whole(self.location.key_of(validated_name(name)))

    def delete_named(self, name: str) -> None:
        self._delete(self.location.key_of(validated_name(name)), None)

    def list_named(self, folder: str) -> Iterator[str]:
        for entry in self.calls.listed(self.location.key_of(f"{validated_name(folder)}/"), "name"):
            yield _field(entry, "name").removeprefix(self.location.key_prefix)

    def guard_changes(self, guard: Callable[[], None]) -> None:
        self.calls.guard = guard

    def probe(self) -> Capabilities:
        self.capabilities = probe_gcs(self)
        return self.capabilities

    def clock(self) -> datetime:
        return self.calls.clock()

    def ping(self) -> None:
        self.calls.ping()

    def close(self) -> None:
        self.calls.close()


def _field(entry: Blob, name: str) -> Any:
    try:
        found = getattr(entry, name)
    except ValueError:  # a date that is none
        found = None
    if found is None:
        # A listing that leaves something out must not pass for a short one: what is not listed looks deletable.
        raise StoreUnavailable(f"the store's listing lacks {name}; try again")
    return found


def open_store(url: str, opening: Opening) -> GcsStore:
    """Raises StoreUrlError, and StoreRefused if there are no credentials. Google's come from the environment only."""
    try:
        location = parse_gcs_url(url)
    except ValueError as error:
        raise StoreUrlError(url, str(error), EXAMPLE) from error
    identity = default_identity()
    calls = GcsCalls(location, identity)
    return GcsStore(location, calls, signer_for(location, identity), capabilities=opening.capabilities)
