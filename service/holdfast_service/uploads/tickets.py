"""How to send a chunk: a presigned request, or a file on the store's own mount. No transaction is open here."""

from __future__ import annotations

from holdfast_protocol.chunks import ChunkOffer, MountProof, UploadTicket
from holdfast_service.catalog.copies import object_key
from holdfast_service.catalog.tables import Copy
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import MountedStore


class TicketOffice:
    """Makes the tickets of one call. `mount_proof` is checked once; a wrong one only means signed URLs."""

    def __init__(self, context: ServiceContext, project_id: str, mount_proof: MountProof | None) -> None:
        self._store = context.store
        self._expires_in_seconds = context.settings.ticket_seconds
        self._project_id = project_id
        self._mounted: MountedStore | None = None
        store = context.store
        if mount_proof is not None and isinstance(store, MountedStore):
            seen = store.check_mount_proof(mount_proof.proof_id, mount_proof.content)
            self._mounted = store if seen else None

    def ticket(self, offer: ChunkOffer, copy: Copy) -> UploadTicket:
        if self._mounted is not None:
            path = self._mounted.incoming_path(copy.generation)
            return UploadTicket(kind="file", path=str(path), expires_in_seconds=self._expires_in_seconds)
        put = self._store.presign_put(
            object_key(self._project_id, offer.digest, copy),
            stored_bytes=copy.stored_bytes,
            stored_sha256=copy.stored_digest,
            md5=offer.md5,
            expires_in_seconds=self._expires_in_seconds,
        )
        return UploadTicket(
            kind="http",
            method=put.method,
            url=put.url,
            headers=put.headers,
            expires_in_seconds=put.expires_in_seconds,
        )
