"""A store that the service has opened, and what it is for."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_protocol.states import StoreRole
from holdfast_service.store_watch import StoreWatch
from holdfast_service.stores.base import Store

SETTING_OF_ROLE = {
    StoreRole.PRIMARY: "HOLDFAST_STORE",
    StoreRole.SECOND: "HOLDFAST_SECOND_STORE",
    StoreRole.COLD: "HOLDFAST_COLD_STORE",
}


@dataclass(frozen=True)
class AttachedStore:
    """`store_id` is its row in the catalog; `watch` knows whether it is there and this catalog's."""

    role: StoreRole
    store: Store
    store_id: int
    watch: StoreWatch
