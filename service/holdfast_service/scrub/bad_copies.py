"""Everything that is bad or suspect in a project: a page of copies, those found first at the top."""

from __future__ import annotations

from sqlalchemy import func, select

from holdfast_protocol.base import Page
from holdfast_protocol.scrub import BadCopy
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.cursors import cut_page, decode_cursor
from holdfast_service.catalog.readable import WHOLE
from holdfast_service.catalog.resolve import project_named
from holdfast_service.catalog.tables import Checkpoint, Chunk, ChunkListEntry, Copy, Shard
from holdfast_service.context import ServiceContext
from holdfast_service.scrub.copy_views import copy_fields, is_bad, is_kept

_CURSOR = "bad-copies"


def list_bad_copies(
    context: ServiceContext, caller: Principal, project: str, *, cursor: str | None, limit: int
) -> Page[BadCopy]:
    """Raises `forbidden` and `project_not_found`."""
    needing = (
        select(func.count(Checkpoint.id.distinct()))
        .join(Shard, Shard.checkpoint_id == Checkpoint.id)
        .join(ChunkListEntry, ChunkListEntry.chunk_list_id == Shard.chunk_list_id)
        .where(ChunkListEntry.chunk_id == Copy.chunk_id, Checkpoint.state.in_(WHOLE))
        .correlate(Copy)
        .scalar_subquery()
    )
    query = select(Copy, Chunk, is_kept(context.store_ids).label("kept"), needing.label("checkpoints"))
    query = query.join(Chunk, Chunk.id == Copy.chunk_id).where(is_bad()).order_by(Copy.id).limit(limit + 1)
    if cursor is not None:
        (after,) = decode_cursor(_CURSOR, cursor, int)
        query = query.where(Copy.id > after)
    with context.database.read() as session:
        owner = project_named(session, caller, project)
        found = session.execute(query.where(Copy.project_id == owner.id)).all()
        rows, next_cursor = cut_page(_CURSOR, found, limit, lambda row: (row.Copy.id,))
        return Page(
            items=[
                BadCopy(
                    **copy_fields(context, row.Copy),
                    project=owner.name,
                    digest=row.Chunk.digest,
                    bytes=row.Chunk.bytes,
                    lost=not row.kept,
                    checkpoints=row.checkpoints,
                )
                for row in rows
            ],
            next_cursor=next_cursor,
        )
