"""One round of the collector. Nothing is deleted unless the store itself says that it is this catalog's, in this epoch:
a cloned staging database must never delete production's objects (protocol rule 5)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from holdfast_service.catalog.store_row import ForeignStoreError, deletes_are_allowed
from holdfast_service.collect.delete import BATCH, delete_garbage
from holdfast_service.collect.forget import forget
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import MountedStore

_BATCHES_PER_ROUND = 50

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CollectReport:
    deleted_copies: int = 0
    deleted_bytes: int = 0
    forgotten_chunks: int = 0


def tick(context: ServiceContext) -> CollectReport:
    """Raises StoreError if the store is away."""
    if not _may_delete(context):
        return CollectReport()
    copies = size = 0
    for _ in range(_BATCHES_PER_ROUND):
        deleted, deleted_bytes = delete_garbage(context)
        copies, size = copies + deleted, size + deleted_bytes
        if deleted < BATCH:
            break
    if isinstance(context.store, MountedStore):
        settings = context.settings
        context.store.sweep_incoming(older_than_seconds=settings.ticket_seconds + settings.longest_upload_seconds)
    return CollectReport(copies, size, forget(context))


def _may_delete(context: ServiceContext) -> bool:
    try:
        allowed = deletes_are_allowed(context.store, context.catalog_id, context.epoch)
    except ForeignStoreError:
        allowed = False
    if not allowed:
        _log.warning("nothing is deleted: the store does not say that it belongs to this catalog in this epoch")
    return allowed
