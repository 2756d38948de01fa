"""Routes of negotiating: `POST /v1/checkpoints/{id}/shards/{rank}/chunks` and `POST /v1/mount-proofs`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter

from holdfast_protocol.chunks import ChunksNegotiated, MountProofOffer, NegotiateChunks
from holdfast_protocol.states import Scope
from holdfast_service.auth.principal import Principal
from holdfast_service.auth.require import require
from holdfast_service.context import Context
from holdfast_service.uploads.mount_proofs import offer_mount_proof
from holdfast_service.uploads.negotiate import negotiate_chunks
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["uploads"])


@router.post("/v1/checkpoints/{checkpoint_id}/shards/{rank}/chunks", summary="Negotiate chunks, report finished ones")
def negotiate(
    checkpoint_id: str,
    rank: int,
    body: NegotiateChunks,
    context: Context,
    caller: Annotated[Principal, require(Scope.TRAIN)],
) -> ChunksNegotiated:
    return negotiate_chunks(context, caller, checkpoint_id, rank, body)


@router.post("/v1/mount-proofs", summary="A nonce on the store's filesystem, for clients that see its mount")
def mount_proof(context: Context, _caller: Annotated[Principal, require(None)]) -> MountProofOffer:
    return offer_mount_proof(context)
