"""The local tiers of all ranks, opened together, and a save that is kept in one."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from holdfast.distributed.ranks import Ranks
from holdfast.save.job import SaveJob
from holdfast.session.session import Session
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.local.spool import Spool, SpooledChunk, SpoolRecord, record_name
from holdfast_client.local.tier import LocalTier, keep_shard
from holdfast_client.settings import ClientSettings
from holdfast_protocol.checkpoints import IndexOrdinals


class OnNodes(NamedTuple):
    """What this rank and the others have on their nodes beside the service."""

    tier: LocalTier | None
    """This rank's."""
    any_rank_has_tier: bool
    any_rank_has_agent: bool


def open_on_nodes(ranks: Ranks, settings: ClientSettings, path: str | Path | None, *, has_agent: bool) -> OnNodes:
    """Collective. Opens this rank's tier, if a folder is named. `has_agent`: this rank is told of a node agent. All
    ranks raise the lowest failing one's error, so that none waits for a node whose folder cannot be used."""
    opened: list[LocalTier | None] = []

    def open_own() -> tuple[bool, bool]:
        opened.append(LocalTier.of(settings, path))
        return opened[0] is not None, has_agent

    try:
        have_tiers, have_agents = zip(*ranks.together(open_own), strict=True)
    except BaseException:
        for tier in opened:
            if tier is not None:
                tier.close()
        raise
    return OnNodes(opened[0], any(have_tiers), any(have_agents))


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
