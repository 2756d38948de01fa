"""The documents of a checkpoint, read once by all ranks together: after its choice, before the plan of the reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.distributed.ranks import Ranks
from holdfast.errors import IntegrityError
from holdfast.restore.checkpoint_reader import CheckpointSource
from holdfast.state.components import generators_alike
from holdfast.state.load import StoredState
from holdfast_protocol.checkpoints import Manifest
from holdfast_protocol.index_documents import Layout, ShardIndex


@dataclass(frozen=True)
class CheckpointDocuments:
    """Facts of a checkpoint that every rank needs before it reads tensors; read once and shared between the ranks.

    Rank 0 reads manifest, layout and its index, and sends them to all. Other indexes and the chunk lists are divided:
    each rank reads its share. The ranks exchange the lists and, on another world size, the indexes. So N ranks make N
    requests, not N times N (rule one-layout-per-plan)."""

    manifest: Manifest
    stored: StoredState
    chunks: Mapping[int, Sequence[str]]
    """Stored rank -> the digests of its chunks, by ordinal."""
    rng: Any
    """This rank's random number generators; None on another world size, because no rank's fit."""
    alike: frozenset[str]
    """On another world size: the generators whose states were equal on all ranks."""

    @property
    def layout(self) -> Layout:
        return self.stored.layout


def read_documents(ranks: Ranks, source: CheckpointSource, *, rank_trees: bool) -> CheckpointDocuments:
    """Collective. All ranks get the same documents (except `rng`), or all raise the error of the lowest failing rank.

    `rank_trees`: also each rank's own values; without it only those that all ranks share.
    """
    manifest, layout_bytes, first_index = ranks.from_first(lambda: _read_first(source))
    layout = source.layout(manifest, layout_bytes)
    same_world = layout.world_size == ranks.world_size
    mine = range(ranks.rank, layout.world_size, ranks.world_size)
    own: dict[int, ShardIndex] = {}

    def read_share() -> tuple[dict[int, list[str]], dict[int, ShardIndex]]:
        # Rank 0's index came with the layout. The indexes before the chunk lists, which may come along with them.
        others = [rank for rank in mine if rank != 0]
        read = source.indexes(manifest, others) if rank_trees and others else {}
        own.update(read)
        # Here, where every rank hears of it: a rank that leaves alone meets the others in another collective.
        for index in (first_index, *read.values()):
            if index.layout_digest != layout.digest:
                raise IntegrityError(f"The index of rank {index.rank} in {source.checkpoint_id} names another layout")
        return {rank: source.chunk_list(manifest, layout, rank) for rank in mine}, {} if same_world else read

    shares = ranks.together(read_share)
    chunks = {rank: digests for share in shares for rank, digests in share[0].items()}
    indexes = own if same_world else {rank: index for share in shares for rank, index in share[1].items()}
    if rank_trees and (ranks.is_first or not same_world):
        indexes[0] = first_index
    return CheckpointDocuments(
        manifest=manifest,
        stored=StoredState(
            layout=layout,
            replicated_trees=first_index.replicated_trees,
            rank_trees={rank: index.trees for rank, index in indexes.items()},
        ),
        chunks=chunks,
        rng=indexes[ranks.rank].rng if rank_trees and same_world else None,
        alike=generators_alike([indexes[rank].rng for rank in range(layout.world_size)])
        if rank_trees and not same_world
        else frozenset(),
    )


def _read_first(source: CheckpointSource) -> tuple[Manifest, bytes, ShardIndex]:
    manifest = source.manifest()
    layout, index = source.first_documents(manifest)
    return manifest, layout, index
