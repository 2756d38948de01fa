"""From which stores anything may be deleted now: those that say, when they are asked, that they are this catalog's in
this epoch (protocol rule 5). One that is away or foreign blocks only itself."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from holdfast_service.attached_store import AttachedStore
from holdfast_service.catalog.commit_records import remove_due_records
from holdfast_service.catalog.history import settle_history
from holdfast_service.catalog.store_row import ForeignStoreError, deletes_are_allowed
from holdfast_service.context import ServiceContext
from holdfast_service.errors import WentBackError
from holdfast_service.stores.base import StoreError, StoreNotOurs

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ready:
    """`skipped`: a sentence for each store that is left alone."""

    stores: tuple[AttachedStore, ...]
    skipped: tuple[str, ...]

    @property
    def store_ids(self) -> set[int]:
        return {attached.store_id for attached in self.stores}


def ready_stores(context: ServiceContext) -> Ready:
    stores, skipped = [], []
    for attached in context.stores:
        why = why_not(context, attached) or _why_older(attached)
        if why is None:
            stores.append(attached)
        else:
            skipped.append(f"Nothing is deleted from the {attached.role.value} store: {why}")
            _log.warning("nothing is deleted from the %s store: %s", attached.role.value, why)
    return Ready(tuple(stores), tuple(skipped))


def why_not(context: ServiceContext, attached: AttachedStore) -> str | None:
    """Why nothing may be deleted from it now; None if it may."""
    try:
        settle_history(context)
        allowed = deletes_are_allowed(attached.store, context.catalog_id, context.epoch)
        if allowed:
            remove_due_records(context, attached)  # before any chunk (rule 30); it may have been away until now
    except WentBackError as error:
        return error.detail
    except (ForeignStoreError, StoreNotOurs) as error:
        return str(error)
    except StoreError as error:
        return f"it does not answer ({error})."
    if allowed:
        return None
    return "it does not say that it belongs to this catalog in this epoch. Adopt it, if it is to be this catalog's."


def _why_older(attached: AttachedStore) -> str | None:
    try:
        attached.watch.newer_records.refuse()
    except StoreNotOurs as error:
        return str(error)
    except StoreError as error:
        return f"it does not answer ({error})."
    return None
