"""Offers a fresh nonce on the store's filesystem: whoever can read it back sees the same mount (protocol rule 18)."""

from __future__ import annotations

from holdfast_protocol.chunks import MountProofOffer
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import MountedStore


def offer_mount_proof(context: ServiceContext) -> MountProofOffer:
    """`path` is null where the store is not a mounted filesystem."""
    seconds = context.settings.ticket_seconds
    if not isinstance(context.store, MountedStore):
        return MountProofOffer(proof_id=None, path=None, expires_in_seconds=seconds)
    proof_id, path = context.store.new_mount_proof(expires_in_seconds=seconds)
    return MountProofOffer(proof_id=proof_id, path=str(path), expires_in_seconds=seconds)
