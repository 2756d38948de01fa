"""Two checkpoints side by side: what the catalog knows of them, and their tensors, told by digests. No tensor is read.

    layout of each: which bytes of which chunk  +  chunk lists: the chunks' digests  ->  a verdict for each tensor
    indexes of each: the trees of the components                                      ->  which have other values

What the digests prove of each tensor: `holdfast_protocol.comparison.tensors` (docs/adr/0081).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast_client.chunks.documents import CheckpointDocuments, without_collections
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import IntegrityError
from holdfast_protocol.attempts import CheckpointDiff
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.comparison.tensors import StoredTensors, TensorDiff, compare_tensors
from holdfast_protocol.comparison.values import ValuesCompared
from holdfast_protocol.digests import canonical_bytes, chunk_digest
from holdfast_protocol.index_documents import Layout, SavedAs, ShardIndex


class Comparison(CheckpointDiff):
    """With the tensors and the other values, which the service does not know."""

    tensors: TensorDiff
    other_values: list[str]
    """The components whose values that are no tensors are other ones, or are in one checkpoint alone, sorted. What each
    rank has of its own is `loader@1`, and its random number generators are `rng@1`."""
    values: ValuesCompared | None = None
    """How far apart the tensors are, if a worker was asked to measure."""


def compare(client: Client, before_id: str, after_id: str) -> Comparison:
    """Raises CheckpointNotFound for one that the caller may not see, and as `client.checkpoints.diff` does; ChunkLost,
    StoreUnavailable and IntegrityError if the documents of one cannot be read or do not belong together."""
    found = client.checkpoints.diff(before_id, after_id)
    layouts: dict[str, Layout] = {}
    with TransferWorkers() as workers:
        before, after = (read_tensors(client, view, workers, layouts) for view in (found.before, found.after))
    with without_collections():
        tensors = compare_tensors(before, after)
    return Comparison(
        **dict(found),
        tensors=tensors,
        other_values=sorted({name for name, _ in before.values.items() ^ after.values.items()}),
    )


def read_tensors(
    client: Client, view: CheckpointView, workers: TransferWorkers, layouts: dict[str, Layout] | None = None
) -> StoredTensors:
    """Reads and proves the documents of a committed checkpoint. `layouts`, by the digests of their documents: what is
    there is not decoded again, and what is decoded is added. The saves of one plan have one layout."""
    saved_as = SavedAs(f"{view.project}/{view.run}", view.step, view.world_size)
    with CheckpointDocuments(client, view.id, saved_as, view.digest, workers=workers) as source:
        manifest = source.manifest()
        document, index = source.first_documents(manifest)
        layouts = {} if layouts is None else layouts
        with without_collections():
            layout = layouts[manifest.layout_digest] = source.layout(manifest, document, layouts)
        indexes = {0: index, **source.indexes(manifest, range(1, view.world_size))}
        chunks = {rank: source.chunk_list(manifest, layout, rank) for rank in indexes}
    for rank, each in indexes.items():
        if each.layout_digest != layout.digest:
            raise IntegrityError(f"The index of rank {rank} in {view.id} names another layout")
    return StoredTensors(layout, chunks, tree_digests(dict(_trees(indexes))))


def tree_digests(trees: Mapping[str, Any]) -> dict[str, str]:
    return {name: chunk_digest(canonical_bytes(tree)) for name, tree in trees.items()}


def _trees(indexes: Mapping[int, ShardIndex]) -> Iterator[tuple[str, Any]]:
    yield from indexes[0].replicated_trees.items()
    for rank, index in indexes.items():
        yield from ((f"{name}@{rank}", tree) for name, tree in index.trees.items())
        if index.rng is not None:
            yield f"rng@{rank}", index.rng
