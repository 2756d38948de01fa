"""What a store with storage classes offers beside the Store contract: copies in another class, and thawing them.

    copy_object (server-side, into a class) -> class_facts ... restore_object -> class_facts until it is readable

GLACIER and DEEP_ARCHIVE have to be thawed before anybody can read them; the other classes are readable at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, runtime_checkable

from holdfast_protocol.tiers import StorageClass, ThawSpeed
from holdfast_service.stores.base import ObjectFacts, ObjectKey


@dataclass(frozen=True, slots=True)
class ClassFacts:
    """What the store says of an object and its class. `storage_class` is None for the store's default one.

    `thawing`: a restore request is under way. `readable_until`: the end of a thawed object's time; None for one that
    is not thawed, or needs no thaw.
    """

    facts: ObjectFacts
    storage_class: str | None
    thawing: bool
    readable_until: datetime | None


@runtime_checkable
class ClassedStore(Protocol):
    """A store whose objects have storage classes. Raises StoreError as a Store does."""

    def check_storage_class(self, storage_class: StorageClass) -> None:
        """Finds out by trying, with a small object that is gone afterwards. StoreRefused if the store does not keep it
        in that class, or would let everybody read at once what it calls archived."""

    def copy_object(self, source: ObjectKey, target: ObjectKey, storage_class: StorageClass) -> ClassFacts:
        """Has the store copy an object of its own, hashing it on the way; what it says of the result. Repeatable.
        ObjectArchived if the source has to be thawed first."""

    def class_facts(self, key: ObjectKey) -> ClassFacts:
        """What the store says; ObjectMissing only if the store is there and the object is not."""

    def restore_object(self, key: ObjectKey, days: int, speed: ThawSpeed) -> None:
        """Asks for a readable copy for `days` days from its completion, or from now on if there is one. One that is on
        its way is fine."""
