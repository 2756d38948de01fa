"""Which copy of each chunk a reader is sent to: of all that can be read now, in any attached store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.codecs import Codec, codecs_of_minor
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.restore import ReadChunks
from holdfast_protocol.states import CopyState
from holdfast_protocol.version import PROTOCOL_MAJOR, PROTOCOL_VERSION
from holdfast_service.attached_store import AttachedStore
from holdfast_service.catalog.cold_words import cold_problem
from holdfast_service.catalog.copies import PROVEN, is_readable, may_keep
from holdfast_service.catalog.tables import Checkpoint, Chunk, Copy
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError

_Rank = tuple[bool, bool, bool, bool, int]


@dataclass(frozen=True)
class ChosenCopy:
    """`elsewhere`: another store that may answer has the chunk too."""

    copy: Copy
    attached: AttachedStore
    elsewhere: bool


def choose_copies(
    session: Session,
    context: ServiceContext,
    checkpoint: Checkpoint,
    chunks: Sequence[Chunk],
    request: ReadChunks,
    *,
    protocol_minor: int,
) -> dict[int, ChosenCopy]:
    """By chunk id. First what lies in a store that the reader does not avoid and that answers; then verified before
    suspect, proven before unproven, and the primary store before the others. No I/O: what is known of the stores must
    be fresh.

    A reader checks every byte, so a suspect copy does no harm, while a wrong report must not stop a restore. Raises
    `unsupported_protocol` where the client could decode no copy of a chunk, and `checkpoint_cold` where one has to be
    thawed first.
    """
    stores = {attached.store_id: (place, attached) for place, attached in enumerate(context.stores)}
    decodable = codecs_of_minor(protocol_minor)
    until = database_now(session) + timedelta(seconds=context.settings.ticket_seconds)
    rows = session.scalars(
        select(Copy)
        .where(
            Copy.chunk_id.in_([chunk.id for chunk in chunks]),
            is_readable(context.store_ids, checkpoint.attempt_id, until=until),
        )
        .order_by(Copy.id)
    )
    encoded: set[int] = set()
    found: dict[int, list[tuple[_Rank, Copy]]] = {}
    for copy in rows:
        if Codec(copy.codec) not in decodable:
            encoded.add(copy.chunk_id)
            continue
        place, attached = stores[copy.store_id]
        rank = (
            attached.role not in request.avoid_stores,
            not attached.watch.away,
            copy.state != CopyState.SUSPECT,
            copy.proof in PROVEN,
            -place,
        )
        found.setdefault(copy.chunk_id, []).append((rank, copy))
    if encoded - found.keys():
        raise _too_old(protocol_minor)
    _refuse_cold(session, context, checkpoint, {chunk.id for chunk in chunks} - found.keys())
    return {chunk_id: _best(ranked, stores) for chunk_id, ranked in found.items()}


def _refuse_cold(session: Session, context: ServiceContext, checkpoint: Checkpoint, chunk_ids: set[int]) -> None:
    """What is there and cannot be read now is not gone: no other restore point has to be taken for ever."""
    cold = select(Copy.id).where(
        Copy.chunk_id.in_(chunk_ids), Copy.store_id.in_(context.store_ids), may_keep(checkpoint.attempt_id)
    )
    if chunk_ids and session.scalar(cold.limit(1)) is not None:
        raise cold_problem(session, checkpoint)


def _best(ranked: list[tuple[_Rank, Copy]], stores: dict[int, tuple[int, AttachedStore]]) -> ChosenCopy:
    best = max(ranked, key=lambda each: each[0])[1]
    elsewhere = any(rank[0] and rank[1] and copy.store_id != best.store_id for rank, copy in ranked)
    return ChosenCopy(best, stores[best.store_id][1], elsewhere)


def _too_old(protocol_minor: int) -> ProblemError:
    theirs = f"{PROTOCOL_MAJOR}.{protocol_minor}"
    return ProblemError(
        ProblemCode.UNSUPPORTED_PROTOCOL,
        f"This checkpoint was saved with compression, which the client's protocol {theirs} does not know and this "
        f"service's {PROTOCOL_VERSION} does. Install a client of the service's version to read it.",
        client=theirs,
        service=PROTOCOL_VERSION,
    )
