"""Which stores a reader can be sent to now, and whether a checkpoint is whole in them (protocol rule 34)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState
from holdfast_service.catalog.copies import is_readable
from holdfast_service.catalog.tables import ChunkListEntry, Copy, Shard
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext


@dataclass(frozen=True)
class Reach:
    """`store_ids` are the stores that answer; `reason` is a sentence about those that do not."""

    store_ids: tuple[int, ...]
    reason: str


def reach_of(context: ServiceContext) -> Reach | None:
    """None where every store answers, or has answered a moment ago: an older checkpoint costs training time, so nobody
    is sent to one for a short silence. Never called inside a transaction: it may ask the stores."""
    ask_stores(context)
    longest = context.settings.store_away_seconds
    silent = [each for each in context.stores if each.watch.away and each.watch.away_seconds >= longest]
    if not silent or len(silent) == len(context.stores):
        return None
    named = " and ".join(f"the {each.role.value} store" for each in silent)
    seconds = round(max(each.watch.away_seconds for each in silent))
    return Reach(
        tuple(each.store_id for each in context.stores if each not in silent),
        f"{named[:1].upper()}{named[1:]} has not answered for {seconds} s.",
    )


def ask_stores(context: ServiceContext) -> None:
    """Where there are several: so that what is known of each is fresh. Never called inside a transaction."""
    if len(context.stores) > 1:
        for attached in context.stores:
            attached.watch.refresh()


def whole_in(session: Session, checkpoint_id: str, attempt_id: int, store_ids: Collection[int]) -> bool:
    """Whether each chunk of the checkpoint can be read from one of these stores now."""
    until = database_now(session)
    readable = exists().where(
        Copy.chunk_id == ChunkListEntry.chunk_id,
        Copy.state != CopyState.SUSPECT,
        is_readable(store_ids, attempt_id, until=until),
    )
    lacking = session.scalar(
        select(ChunkListEntry.chunk_id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .where(Shard.checkpoint_id == checkpoint_id, ~readable)
        .limit(1)
    )
    return lacking is None
