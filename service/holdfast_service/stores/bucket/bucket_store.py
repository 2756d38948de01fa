"""What every store in a bucket does in the same way: listings, small named objects, and what its classes keep."""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from holdfast_protocol.checkpoints import StoreAnswer
from holdfast_protocol.tiers import ARCHIVED, StorageClass
from holdfast_service.stores.base import (
    CHUNKS,
    MOST_NAMED_BYTES,
    Capabilities,
    ClassFacts,
    GetTicket,
    ObjectArchived,
    ObjectFacts,
    ObjectKey,
    StoredObject,
    StoreRefused,
    StoreUnavailable,
    validated_name,
    validated_project_id,
)
from holdfast_service.stores.bucket.bucket_calls import AlreadyDone, BucketCalls
from holdfast_service.stores.bucket.location import BucketLocation

PROBE_PROJECT = "probe"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a listing, with the bucket's own name of the object."""

    name: str
    bytes: int
    modified_at: datetime
    storage_class: str | None = None

    def __post_init__(self) -> None:
        for value, what in ((self.name, "a name"), (self.bytes, "a size"), (self.modified_at, "a date")):
            if value is None:
                # A listing that leaves something out must not pass for a short one: what is not listed looks deletable.
                raise StoreUnavailable(f"the store's listing lacks {what}; try again")


class BucketStore(ABC):
    """Half of a Store. Keys are the bucket's, with the prefix, where a parameter is a text."""

    location: BucketLocation
    calls: BucketCalls
    capabilities: Capabilities | None
    get_answers: Mapping[str, StoreAnswer] = {}

    @abstractmethod
    def presign(
        self, method: str, key: ObjectKey, headers: Mapping[str, str], expires_in_seconds: int, *, public: bool = True
    ) -> tuple[str, int]:
        """The URL and how long it really lives. `public` as clients reach the store, else as the service does."""

    @abstractmethod
    def head(self, key: ObjectKey) -> ObjectFacts:
        """As the contract has it."""

    @abstractmethod
    def write(self, key: str, data: bytes, *, overwrite: bool, storage_class: str | None = None) -> str | None:
        """The version that it became, if there are versions. Raises AlreadyDone where nothing is to be overwritten."""

    @abstractmethod
    def read_whole(self, key: str, *, most_bytes: int) -> bytes:
        """A small object. Raises ObjectTooLarge."""

    @abstractmethod
    def remove(self, key: str, version_id: str | None = None) -> None:
        """The object with all its versions, or the one named. Its absence is fine."""

    @abstractmethod
    def entries(self, prefix: str) -> Iterator[Entry]:
        """A listing, page by page. A page that fails raises rather than end it."""

    def presign_get(self, key: ObjectKey, *, expires_in_seconds: int) -> GetTicket:
        url, lives_seconds = self.presign("GET", key, {}, expires_in_seconds)
        return GetTicket(url, {}, lives_seconds, dict(self.get_answers))

    def put_bytes(self, key: ObjectKey, data: bytes, *, storage_class: str | None = None) -> ObjectFacts:
        try:
            version_id = self.write(self.location.key_of(key.path), data, overwrite=False, storage_class=storage_class)
        except AlreadyDone:
            return self.head(key)
        # The service has hashed these very bytes, and the store has compared their MD5 with what arrived.
        return ObjectFacts(len(data), hashlib.sha256(data).hexdigest(), version_id)

    def delete(self, key: ObjectKey, version_id: str | None = None) -> None:
        self.remove(self.location.key_of(key.path), version_id)

    def list_objects(self, project_id: str | None) -> Iterator[StoredObject]:
        folder = "" if project_id is None else f"{validated_project_id(project_id)}/{CHUNKS}/"
        for entry in self.entries(self.location.key_of(folder)):
            try:
                key = ObjectKey.from_path(entry.name.removeprefix(self.location.key_prefix))
            except ValueError:
                continue  # no chunk of ours
            yield StoredObject(key, entry.bytes, entry.modified_at, entry.storage_class)

    def write_named(self, name: str, data: bytes) -> None:
        self.write(self.location.key_of(validated_name(name)), data, overwrite=True)

    def read_named(self, name: str, *, most_bytes: int = MOST_NAMED_BYTES) -> bytes:
        return self.read_whole(self.location.key_of(validated_name(name)), most_bytes=most_bytes)

    def delete_named(self, name: str) -> None:
        self.remove(self.location.key_of(validated_name(name)))

    def list_named(self, folder: str) -> Iterator[str]:
        for entry in self.entries(self.location.key_of(f"{validated_name(folder)}/")):
            yield entry.name.removeprefix(self.location.key_prefix)

    def guard_changes(self, guard: Callable[[], None]) -> None:
        self.calls.guard = guard

    def close(self) -> None:
        self.calls.close()


class ArchivingStore(BucketStore):
    """A BucketStore with storage classes."""

    @abstractmethod
    def class_facts(self, key: ObjectKey) -> ClassFacts:
        """As the contract has it."""

    def check_storage_class(self, storage_class: StorageClass) -> None:
        body = secrets.token_bytes(32)
        key = ObjectKey(PROBE_PROJECT, hashlib.sha256(body).hexdigest(), secrets.token_hex(16))
        path = self.location.key_of(key.path)
        self.write(path, body, overwrite=False, storage_class=storage_class.value)
        try:
            told = self.class_facts(key).storage_class
            if told != storage_class:
                raise StoreRefused(f"the store takes an object for {storage_class.value} and keeps it in {told}")
            if storage_class in ARCHIVED:
                with suppress(ObjectArchived):
                    self.read_whole(path, most_bytes=len(body))
                    raise StoreRefused(
                        f"the store lets anybody read what it says is in {storage_class.value}: it has no archive"
                    )
        finally:
            self.delete(key)
