"""Offers a fresh nonce on each mounted store's filesystem: whoever can read it back sees the same mount (rule 18)."""

from __future__ import annotations

from holdfast_protocol.chunks import MountProofOffer
from holdfast_protocol.states import StoreRole
from holdfast_service.catalog.reach import ask_stores
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import MountedStore, StoreError


def offer_mount_proof(context: ServiceContext) -> MountProofOffer:
    """`path` is null where the primary store is not a mounted filesystem. Raises StoreError if it is the only store and
    does not answer; where there are others, a reader goes on with those."""
    ask_stores(context)
    seconds = context.settings.ticket_seconds
    alone = len(context.stores) == 1
    offers: dict[StoreRole, MountProofOffer] = {}
    away = False
    for attached in context.stores:
        if not isinstance(attached.store, MountedStore):
            continue
        try:
            offered = None if attached.watch.away and not alone else _offer(attached.store, seconds)
        except StoreError:
            if alone:
                raise
            offered = None
        if offered is not None:
            offers[attached.role] = offered
        elif attached.role is StoreRole.PRIMARY:
            away = True
    others = [offer for role, offer in offers.items() if role is not StoreRole.PRIMARY]
    nothing = MountProofOffer(proof_id=None, path=None, expires_in_seconds=seconds)
    return offers.get(StoreRole.PRIMARY, nothing).model_copy(update={"away": away, "others": others})


def _offer(store: MountedStore, seconds: int) -> MountProofOffer:
    proof_id, path = store.new_mount_proof(expires_in_seconds=seconds)
    return MountProofOffer(proof_id=proof_id, path=str(path), expires_in_seconds=seconds)
