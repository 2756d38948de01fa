"""The local tiers of all ranks, opened together, and a save that is kept in one."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from holdfast.distributed.ranks import Ranks
from holdfast.save.job import SaveJob
from holdfast.session.session import Session
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.local.spool import Spool, SpooledChunk, SpoolRecord, record_name
from holdfast_client.local.tier import LocalTier, keep_shard
from holdfast_client.settings import ClientSettings
from holdfast_protocol.checkpoints import IndexOrdinals


def open_local_tier(ranks: Ranks, settings: ClientSettings, path: str | Path | None) -> tuple[LocalTier | None, bool]:
    """Collective. This rank's tier, or None if no folder is named, and whether any rank has one. All ranks raise the
    lowest failing one's error, so that none waits for a node whose folder cannot be used."""
    opened: list[LocalTier | None] = []

    def open_own() -> bool:
        opened.append(LocalTier.of(settings, path))
        return opened[0] is not None

    try:
        any_rank_has_one = any(ranks.together(open_own))
    except BaseException:
        for tier in opened:
            if tier is not None:
                tier.close()
        raise
    return opened[0], any_rank_has_one


def keep_save(
    session: Session,
    spool: Spool,
    job: SaveJob,
    chunks: Iterable[OutgoingChunk],
    *,
    index: IndexOrdinals,
    workers: TransferWorkers,
) -> SpoolRecord:
    """Staged -> hashed -> on this node's disk, with a record: the save outlives the process, and its slab is free
    again. Raises as keep_shard does."""
    rank = session.ranks.rank

    def record(kept: list[SpooledChunk]) -> SpoolRecord:
        return SpoolRecord(
            project=session.run.project,
            run=session.run.run,
            epoch=session.fence.epoch,
            attempt=session.fence.attempt,
            launch_id=session.launch_id,
            number=job.number,
            step=job.step,
            kind=job.kind,
            world_size=session.ranks.world_size,
            rank=rank,
            chunks=kept,
            index=index,
            **dict(job.told),
            host=socket.gethostname(),
            created_at=datetime.now(UTC),
        )

    name = record_name(session.launch_id, job.number, rank)
    return keep_shard(spool, name, chunks, record, workers=workers)
