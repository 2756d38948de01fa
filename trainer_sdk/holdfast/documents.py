"""What every rank must know of a checkpoint before it reads tensors, read once and shared between the ranks.

Rank 0 reads manifest, layout and its index, and sends them round. The chunk lists, and on another world size the
indexes too, are dealt out: each rank reads its share, and the ranks exchange them. So N ranks make N requests, not
N times N (protocol rule 23).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import IntegrityError
from holdfast.ranks import Ranks
from holdfast.source import CheckpointSource
from holdfast.state.stored import StoredState
from holdfast_protocol.checkpoints import Manifest
from holdfast_protocol.index_documents import Layout, ShardIndex


@dataclass(frozen=True)
class CheckpointDocuments:
    manifest: Manifest
    stored: StoredState
    chunks: Mapping[int, Sequence[str]]
    """Stored rank -> the digests of its chunks, by ordinal."""
    rng: Any
    """This rank's random number generators; None on another world size, where no rank's fits."""

    @property
    def layout(self) -> Layout:
        return self.stored.layout


def read_documents(ranks: Ranks, source: CheckpointSource, *, rank_trees: bool) -> CheckpointDocuments:
    """Collective. All ranks get the same documents (but for `rng`), or all raise what the lowest failing rank met.

    `rank_trees`: also what each rank had of its own; without it only what all ranks share.
    """
    manifest, layout_bytes, first_index = ranks.from_first(lambda: _read_first(source))
    layout = source.layout(manifest, layout_bytes)
    same_world = layout.world_size == ranks.world_size
    shares = ranks.together(lambda: _read_share(ranks, source, manifest, layout, indexes=rank_trees and not same_world))
    chunks = {rank: digests for share in shares for rank, digests in share[0].items()}
    indexes = {rank: index for share in shares for rank, index in share[1].items()}
    if rank_trees and same_world:
        indexes = _own_index(ranks, source, manifest)
    if rank_trees and (ranks.is_first or not same_world):
        indexes[0] = first_index
    for index in (first_index, *indexes.values()):
        if index.layout_digest != layout.digest:
            raise IntegrityError(f"The index of rank {index.rank} in {source.checkpoint_id} names another layout")
    return CheckpointDocuments(
        manifest=manifest,
        stored=StoredState(
            layout=layout,
            replicated_trees=first_index.replicated_trees,
            rank_trees={rank: index.trees for rank, index in indexes.items()},
        ),
        chunks=chunks,
        rng=indexes[ranks.rank].rng if rank_trees and same_world else None,
    )


def _read_first(source: CheckpointSource) -> tuple[Manifest, bytes, ShardIndex]:
    manifest = source.manifest()
    return manifest, source.layout_document(manifest), source.indexes(manifest, [0])[0]


def _read_share(
    ranks: Ranks, source: CheckpointSource, manifest: Manifest, layout: Layout, *, indexes: bool
) -> tuple[dict[int, list[str]], dict[int, ShardIndex]]:
    mine = range(ranks.rank, layout.world_size, ranks.world_size)
    chunks = {rank: source.chunk_list(manifest, layout, rank) for rank in mine}
    # The index of rank 0 is known: it came round with the manifest.
    others = [rank for rank in mine if rank != 0]
    return chunks, source.indexes(manifest, others) if indexes and others else {}


def _own_index(ranks: Ranks, source: CheckpointSource, manifest: Manifest) -> dict[int, ShardIndex]:
    own: dict[int, ShardIndex] = {}
    ranks.together(lambda: None if ranks.is_first else own.update(source.indexes(manifest, [ranks.rank])))
    return own
