"""Chunks in a bucket of Google Cloud Storage. Clients send and read by V4 signed URLs, never through the service.

Google compares MD5 and CRC32C and knows no SHA-256. So a ticket has the length, the MD5 that the client was asked for
(rule reuse-only-hashed) and "only if there is none yet" signed in, and a copy that came in by one is unproven until the
service has read it: head() never reports a SHA-256. Every object has a generation, in buckets without versions too; a
delete that names it removes those bytes and nothing else.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime

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
from holdfast_service.stores.bucket.bucket_store import BucketStore, Entry
from holdfast_service.stores.gcs.calls import GcsCalls
from holdfast_service.stores.gcs.gcs_location import EXAMPLE, GcsLocation, parse_gcs_url
from holdfast_service.stores.gcs.identity import default_identity
from holdfast_service.stores.gcs.probe import probe_gcs
from holdfast_service.stores.gcs.signer import TicketSigner, signer_for

_ONLY_NEW = {"x-goog-if-generation-match": "0"}


class GcsStore(BucketStore):
    """A Store, and a RemotelySignedStore."""

    kind = "gcs"
    location: GcsLocation
    calls: GcsCalls

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

    def write(self, key: str, data: bytes, *, overwrite: bool, storage_class: str | None = None) -> str | None:
        return self.calls.put(key, data, only_new=not overwrite, storage_class=storage_class)

    def read_whole(self, key: str, *, most_bytes: int) -> bytes:
        return self.calls.read_whole(key, most_bytes)

    def remove(self, key: str, version_id: str | None = None) -> None:
        for each in self._generations(key) if version_id is None else [version_id]:
            with suppress(ObjectMissing):
                self.calls.delete(key, each)

    def _generations(self, key: str) -> list[str]:
        entries = list(self.calls.listed(key, "name,generation", versions=True))
        if any(each.name is None or each.generation is None for each in entries):
            raise StoreUnavailable("the store's listing lacks a name or a generation; try again")
        return [str(each.generation) for each in entries if each.name == key]

    def hides_deleted(self, key: ObjectKey) -> bool:
        """For the probe: deletes without naming a generation, and says whether the bytes are still there."""
        path = self.location.key_of(key.path)
        self.calls.delete(path, None)
        return bool(self._generations(path))

    def is_retained(self, key: ObjectKey) -> bool:
        """For the probe: whether the bucket keeps the object, for a time or until it is let go, by itself."""
        found = self.calls.described(self.location.key_of(key.path))
        return self.calls.read(lambda: bool(found.retention_expiration_time or found.event_based_hold))

    def entries(self, prefix: str) -> Iterator[Entry]:
        for each in self.calls.listed(prefix, "name,size,timeCreated"):
            try:
                yield Entry(each.name, each.size, each.time_created)
            except ValueError:
                raise StoreUnavailable("the store's listing has a date that is none; try again") from None

    def probe(self) -> Capabilities:
        self.capabilities = probe_gcs(self)
        return self.capabilities

    def clock(self) -> datetime:
        return self.calls.clock()

    def ping(self) -> None:
        self.calls.ping()


def open_store(url: str, opening: Opening) -> GcsStore:
    """Raises StoreUrlError, and StoreRefused if there are no credentials. Google's come from the environment only."""
    try:
        location = parse_gcs_url(url)
    except ValueError as error:
        raise StoreUrlError(url, str(error), EXAMPLE) from error
    identity = default_identity()
    calls = GcsCalls(location, identity)
    return GcsStore(location, calls, signer_for(location, identity), capabilities=opening.capabilities)
