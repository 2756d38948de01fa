"""The cheap look: sizes and checksums that the store reports, without reading.

It finds what is missing or cut, and rot only where the store itself computes checksums. What does not seem fine is read
back, and only that decides; and what seems fine is not read by it, so a scrub comes no later.
"""

from __future__ import annotations

from holdfast_service.catalog.reread import Claim, store_of_copy
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import ObjectMismatch, ObjectMissing


def seems_fine(context: ServiceContext, claimed: Claim) -> bool:
    """Raises StoreError if the store cannot tell."""
    try:
        facts = store_of_copy(context, claimed).head(claimed.key)
    except (ObjectMissing, ObjectMismatch):
        return False
    return facts.bytes == claimed.stored_bytes and facts.sha256 in (None, claimed.stored_digest)
