"""How to read a chunk: a signed URL, or a path where the reader sees the store's own mount. No transaction is open."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from holdfast_protocol.codecs import Codec
from holdfast_protocol.restore import ReadChunks, ReadTicket
from holdfast_service.attached_store import AttachedStore
from holdfast_service.catalog.copies import object_key
from holdfast_service.catalog.tables import Chunk
from holdfast_service.context import ServiceContext
from holdfast_service.restore.choose_copies import ChosenCopy
from holdfast_service.stores.base import MountedStore, StoreError
from holdfast_service.stores.make_tickets import make_tickets


def read_tickets(
    context: ServiceContext,
    project_id: str,
    request: ReadChunks,
    chunks: dict[str, Chunk],
    chosen: dict[int, ChosenCopy],
) -> list[ReadTicket]:
    """One for each digest of the request, in their order; `gone` for a chunk without a copy that can be read."""
    tickets: dict[str, ReadTicket] = {}
    by_store: dict[int, list[tuple[Chunk, ChosenCopy]]] = defaultdict(list)
    for digest in dict.fromkeys(request.digests):
        chunk = chunks[digest]
        if chunk.id in chosen:
            by_store[chosen[chunk.id].attached.store_id].append((chunk, chosen[chunk.id]))
        else:
            tickets[digest] = ReadTicket(
                digest=digest, bytes=chunk.bytes, stored_bytes=0, kind="gone", expires_in_seconds=0
            )
    for wanted in by_store.values():
        for ticket in _of_one_store(context, project_id, request, wanted):
            tickets[ticket.digest] = ticket
    return [tickets[digest] for digest in request.digests]


def _of_one_store(
    context: ServiceContext, project_id: str, request: ReadChunks, wanted: Sequence[tuple[Chunk, ChosenCopy]]
) -> list[ReadTicket]:
    attached = wanted[0][1].attached
    store = attached.store
    seconds = context.settings.ticket_seconds
    mounted = store if isinstance(store, MountedStore) and _sees_mount(store, attached, request) else None

    def ticket(each: tuple[Chunk, ChosenCopy]) -> ReadTicket:
        chunk, chosen = each
        key = object_key(project_id, chunk.digest, chosen.copy)
        known = ReadTicket(
            digest=chunk.digest,
            bytes=chunk.bytes,
            stored_bytes=chosen.copy.stored_bytes,
            codec=Codec(chosen.copy.codec),
            kind="file",
            expires_in_seconds=seconds,
            store=attached.role,
            elsewhere=chosen.elsewhere,
        )
        if mounted is not None:
            return known.model_copy(update={"path": str(mounted.object_path(key))})
        get = store.presign_get(key, expires_in_seconds=seconds)
        signed = {"kind": "http", "url": get.url, "headers": get.headers, "expires_in_seconds": get.expires_in_seconds}
        return known.model_copy(update=signed)

    return make_tickets(store, ticket, wanted)


def _sees_mount(store: MountedStore, attached: AttachedStore, request: ReadChunks) -> bool:
    """A proof that is wrong, or cannot be looked at now, only means URLs."""
    if attached.watch.away:
        return False
    proofs = [request.mount_proof] if request.mount_proof is not None else []
    with suppress(StoreError):
        return any(
            store.check_mount_proof(proof.proof_id, proof.content) for proof in (*proofs, *request.other_mount_proofs)
        )
    return False
