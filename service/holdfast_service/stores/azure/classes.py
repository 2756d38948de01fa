"""Azure's access tiers as storage classes, and its legal holds.

Azure hashes nothing by SHA-256, so a copy into a class goes through the service, which hashes what it reads and sends.
Azure compares the MD5 of what arrives. A thaw makes no temporary copy. It moves the blob to the hot tier, where it
stays until a policy cools it again. Sources: https://learn.microsoft.com/azure/storage/blobs/access-tiers-overview and
https://learn.microsoft.com/azure/storage/blobs/immutable-storage-overview
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any

from azure.storage.blob import BlobClient, BlobProperties, ContainerProperties, RehydratePriority, StandardBlobTier

from holdfast_protocol.checkpoints import MAX_CHUNK_BYTES
from holdfast_protocol.tiers import ClassTerms, StorageClass, ThawSpeed
from holdfast_service.stores.azure.azure_location import AzureLocation
from holdfast_service.stores.azure.calls import AzureCalls
from holdfast_service.stores.base import (
    ClassFacts,
    ObjectArchived,
    ObjectFacts,
    ObjectKey,
    ObjectMismatch,
    ObjectTooLarge,
    StoreRefused,
    StoreUnavailable,
)
from holdfast_service.stores.bucket.bucket_calls import AlreadyDone
from holdfast_service.stores.bucket.bucket_store import ArchivingStore

_HOUR = 3600
_TIERS = {
    StorageClass.INFREQUENT: StandardBlobTier.COOL,
    StorageClass.RARE: StandardBlobTier.COLD,
    StorageClass.ARCHIVE: StandardBlobTier.ARCHIVE,
}
_CLASSES = {tier.value: storage_class.value for storage_class, tier in _TIERS.items()}
# As documented in 2026; dollars are list prices for East US, locally redundant:
# https://learn.microsoft.com/azure/storage/blobs/archive-rehydrate-overview and
# https://azure.microsoft.com/pricing/details/storage/blobs/
TERMS = {
    StorageClass.INFREQUENT: ClassTerms(30, {}, {None: 0.01}),
    StorageClass.RARE: ClassTerms(90, {}, {None: 0.03}),
    StorageClass.ARCHIVE: ClassTerms(
        180,
        {ThawSpeed.EXPEDITED: _HOUR, ThawSpeed.STANDARD: 15 * _HOUR},
        {ThawSpeed.EXPEDITED: 0.1, ThawSpeed.STANDARD: 0.02},
    ),
}


def tier_of(storage_class: str) -> StandardBlobTier:
    """StoreRefused for a class that Azure does not have."""
    try:
        return _TIERS[StorageClass(storage_class)]
    except (KeyError, ValueError):
        raise StoreRefused(f"Azure has no storage class {storage_class}; it has {', '.join(_TIERS)}") from None


def class_of(properties: BlobProperties) -> str | None:
    """None for hot, and for the account's default tier, whichever that is."""
    tier: Any = properties.blob_tier
    if tier is None or properties.blob_tier_inferred or tier == StandardBlobTier.HOT:
        return None
    return _CLASSES.get(str(getattr(tier, "value", tier)), str(tier))


def facts_of(properties: BlobProperties) -> ObjectFacts:
    """Azure reports no SHA-256. Its MD5 may be the client's word, so it is left out. Raises ObjectMismatch for
    an object that is said to be encoded: a SAS binds no header, and readers would get other bytes than were announced.
    """
    if properties.content_settings.content_encoding:
        raise ObjectMismatch("the object has a Content-Encoding, and no chunk has one")
    if properties.size is None:
        raise StoreUnavailable("the store does not say how large the object is; try again")
    return ObjectFacts(properties.size, None, _version(properties.version_id))


def _version(told: str | None) -> str | None:
    return told or None


class AzureClasses(ArchivingStore):
    """A ClassedStore and a LockingStore."""

    class_terms = TERMS
    location: AzureLocation
    calls: AzureCalls

    def blob(self, key: str) -> BlobClient:
        """The library's client of one blob."""
        return self.calls.container.get_blob_client(key)

    def blob_of(self, key: ObjectKey) -> BlobClient:
        """The library's client of a chunk's blob."""
        return self.blob(self.location.key_of(key.path))

    def read_whole(self, key: str, *, most_bytes: int, version_id: str | None = None) -> bytes:
        # As they lie there: the library would decode what an uploader has called encoded.
        blob = self.blob(key)

        def once() -> bytes:
            found = blob.download_blob(version_id=version_id, decompress=False)  # reads at most 32 MiB yet
            if found.size > most_bytes:
                raise ObjectTooLarge(most_bytes)
            return found.readall()

        return self.calls.read(once)

    def write(self, key: str, data: bytes, *, overwrite: bool, storage_class: str | None = None) -> str | None:
        tier = None if storage_class is None else tier_of(storage_class)
        written = self.calls.change(
            lambda: self.blob(key).upload_blob(
                data, length=len(data), overwrite=overwrite, validate_content=True, standard_blob_tier=tier
            )
        )
        return _version(written.get("version_id"))

    def copy_object(self, source: ObjectKey, target: ObjectKey, storage_class: StorageClass) -> ClassFacts:
        data = self.read_whole(
            self.location.key_of(source.path), most_bytes=MAX_CHUNK_BYTES, version_id=source.version_id
        )
        path = self.location.key_of(target.path)
        try:
            self.write(path, data, overwrite=False, storage_class=storage_class.value)
        except (AlreadyDone, ObjectArchived):
            # An earlier try's, which stays whatever it is: a worker that took this copy over may have settled it since,
            # and taken the hot one away. Then a thaw may have changed its class. The MD5 is Azure's own word: the
            # service alone writes what was copied.
            there = self.properties(target).content_settings.content_md5
            if there is None or bytes(there) != hashlib.md5(data, usedforsecurity=False).digest():
                raise ObjectMismatch("other bytes are under the copy's key") from None
        told = self.class_facts(target)
        # The service has hashed these very bytes, and Azure has compared their MD5 with what arrived.
        facts = ObjectFacts(told.facts.bytes, hashlib.sha256(data).hexdigest(), told.facts.version_id)
        return ClassFacts(facts, told.storage_class, told.thawing, told.readable_until)

    def class_facts(self, key: ObjectKey) -> ClassFacts:
        properties = self.properties(key)
        thawing = str(properties.archive_status or "").startswith("rehydrate-pending")
        return ClassFacts(facts_of(properties), class_of(properties), thawing, None)

    def properties(self, key: ObjectKey) -> BlobProperties:
        return self.calls.read(lambda: self.blob_of(key).get_blob_properties(version_id=key.version_id))

    def restore_object(self, key: ObjectKey, days: int, speed: ThawSpeed) -> None:
        """`days` have no meaning here: what was moved to the hot tier stays there until it is cooled again. It is asked
        for without its version: Azure rehydrates the newest one only, and nothing overwrites ours."""
        del days
        priority = RehydratePriority("High" if speed is ThawSpeed.EXPEDITED else "Standard")
        with suppress(ObjectArchived):  # BlobBeingRehydrated: it is on its way
            self.calls.change(
                lambda: self.blob_of(key).set_standard_blob_tier(StandardBlobTier.HOT, rehydrate_priority=priority)
            )

    def has_object_lock(self) -> bool:
        return _yes(self.container_properties().immutable_storage_with_versioning_enabled)

    def set_legal_hold(self, key: ObjectKey, version_id: str | None, *, on: bool) -> None:
        self.calls.change(lambda: self.blob_of(key).set_legal_hold(on, version_id=version_id))

    def refuse_retention(self) -> None:
        """Raises StoreRefused: such a container locks every upload, and nothing could be deleted (rule
        holds-outrank)."""
        properties = self.container_properties()
        if _yes(properties.has_immutability_policy) or _yes(properties.has_legal_hold):
            raise StoreRefused(
                f"the container {self.location.bucket} has a retention policy or a legal hold of its own, which locks "
                "every upload, so that nothing could be deleted; take that off the container (immutability with "
                "versions itself may stay), or use another one"
            )

    def refuse_folders(self) -> None:
        """Raises StoreRefused for Data Lake Storage: its listings have folders among the objects, and these would pass
        for empty records."""
        try:
            told = self.calls.read(self.calls.container.get_account_information)
        except StoreRefused:
            return  # this identity may not ask; docs/operating/set-up.md tells its operator
        if _yes(told.get("is_hns_enabled")):
            raise StoreRefused(
                f"the account {self.location.account} has a hierarchical namespace (Data Lake Storage), whose listings "
                "have folders in them; use an account without one"
            )

    def container_properties(self) -> ContainerProperties:
        return self.calls.read(self.calls.container.get_container_properties)


def _yes(told: Any) -> bool:
    """What is a header in one answer of Azure is a truth value in another."""
    return str(told).lower() == "true"
