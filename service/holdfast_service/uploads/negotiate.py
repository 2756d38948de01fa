"""One call of a rank: verify what it has sent, reserve what it will send, hand out tickets.

Flow: the SDK hashes chunks -> negotiate (here) -> PUT straight to the store -> negotiate again, with what is finished
-> seal (commit/seal.py).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from holdfast_protocol.chunks import ChunkAnswer, ChunkOffer, ChunksNegotiated, NegotiateChunks
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import Capabilities
from holdfast_service.stores.make_tickets import make_tickets
from holdfast_service.uploads.check_offers import check_offers
from holdfast_service.uploads.finished import verify_finished
from holdfast_service.uploads.reserve import reserve
from holdfast_service.uploads.tickets import TicketOffice

_CLIENTS_ASK_WITHIN = timedelta(minutes=15)
"""So long a client may go by what it was told of the store."""


def negotiate_chunks(
    context: ServiceContext, caller: Principal, checkpoint_id: str, rank: int, request: NegotiateChunks
) -> ChunksNegotiated:
    """An answer per offered chunk, in the order offered. Repeating it is fine: the same copies, fresh tickets."""
    check_offers(request.chunks, md5_needed=_md5_needed(context.store.capabilities))
    # First what has arrived: a chunk that is reported and offered again in one call is present.
    finished = verify_finished(context, caller, checkpoint_id, rank, request)
    if finished and not request.chunks:
        return ChunksNegotiated(chunks=[], finished=finished)
    reservation = context.database.run(
        lambda session: reserve(session, context, caller, checkpoint_id, rank, request=request)
    )
    office = TicketOffice(context, reservation.project_id, request.mount_proof)

    def answer(offer: ChunkOffer) -> ChunkAnswer:
        copy = reservation.send_into.get(offer.digest)
        if copy is not None:
            return ChunkAnswer(digest=offer.digest, status="upload", ticket=office.ticket(offer, copy))
        return ChunkAnswer(digest=offer.digest, status="absent" if offer.digest in reservation.absent else "present")

    return ChunksNegotiated(chunks=make_tickets(context.store, answer, request.chunks), finished=finished)


def _md5_needed(capabilities: Capabilities | None) -> bool:
    """Not at once where the store has only just come to compare MD5: jobs that run must hear of it first."""
    if capabilities is None or not capabilities.asks_md5:
        return False
    return capabilities.changed_at is None or datetime.now(UTC) - capabilities.changed_at > _CLIENTS_ASK_WITHIN
