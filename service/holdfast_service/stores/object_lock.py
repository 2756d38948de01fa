"""What a store offers that can hold objects by itself (S3 Object Lock): a legal hold, put on and taken off at any time.

Only the legal hold, and no retention until a date: it needs no permission to bypass anything, is taken off when the
last hold on the chunk is released, and a wrong date cannot lock bytes for a century
(docs/adr/0017-a-mirrored-hold-is-a-legal-hold.md).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from holdfast_service.stores.base import ObjectKey


@runtime_checkable
class LockingStore(Protocol):
    """A Store that may be able to; whether its bucket is, it has to be asked. Raises StoreError."""

    def has_object_lock(self) -> bool:
        """Asks the bucket."""

    def set_legal_hold(self, key: ObjectKey, version_id: str | None, *, on: bool) -> None:
        """On exactly this version, or the current one if the store has no versions of it. Twice is fine.
        ObjectMissing if it is not there."""
