"""The content of a checkpoint, read from its documents: one unit per component, or per component and rank.

Flow: pull -> **contents** -> tensors. Every rank's documents are read; names are checked before they name files.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.dcp.metadata import COMPONENT, is_dcp, whole_tree
from holdfast.restore.checkpoint_reader import CheckpointSource
from holdfast.state.capture import open_module, open_optimizer
from holdfast.state.components import Kind
from holdfast.state.tree import tensor_refs
from holdfast_client.chunks.documents import ChunkLists
from holdfast_client.errors import IntegrityError
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.index_documents import Layout, ShardIndex

_UNIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*(@\d{1,6})?")


@dataclass(frozen=True)
class Unit:
    """The content of one file: `model` (saved by all ranks together), `loader@1` (rank 1's own), or `dcp`, the whole
    argument of a dcp.save through ckpt.writer()."""

    name: str
    kind: Kind | None
    """None: only its tensors are known, their tree belongs to another unit."""
    tree: Any
    """The encoded typed tree."""
    tensors: tuple[str, ...]
    """The layout's names of its tensors, sorted."""

    def key_of(self, tensor: str) -> str:
        """The tensor's name within the unit, such as the parameter's FQN."""
        return tensor if self.kind is Kind.DCP else tensor.partition("/")[2] or self.name


@dataclass(frozen=True)
class Contents:
    view: CheckpointView
    layout: Layout
    chunks: ChunkLists
    units: tuple[Unit, ...]
    rng: Mapping[int, Any]
    """Rank -> its random number generators, as an encoded typed tree."""


def read_contents(source: CheckpointSource) -> Contents:
    """Raises IntegrityError if the documents do not belong together."""
    manifest = source.manifest()
    document, first_index = source.first_documents(manifest)
    layout = source.layout(manifest, document)
    ranks = range(manifest.checkpoint.world_size)
    indexes = {0: first_index, **source.indexes(manifest, ranks[1:])}
    chunks = {rank: source.chunk_list(manifest, layout, rank) for rank in ranks}
    for rank, index in indexes.items():
        if index.layout_digest != layout.digest:
            raise IntegrityError(f"The index of rank {rank} in {source.checkpoint_id} names another layout")
    return Contents(
        view=manifest.checkpoint,
        layout=layout,
        chunks=chunks,
        units=tuple(_units(layout, indexes)),
        rng={rank: index.rng for rank, index in indexes.items() if index.rng is not None},
    )


def _units(layout: Layout, indexes: Mapping[int, ShardIndex]) -> Iterator[Unit]:
    if is_dcp(indexes[0].replicated_trees):
        yield Unit(COMPONENT, Kind.DCP, whole_tree(indexes), tuple(sorted(layout.tensors)))
        return
    by_prefix: dict[str, set[str]] = defaultdict(set)
    for tensor in layout.tensors:
        by_prefix[tensor.partition("/")[0]].add(tensor)
    trees = dict(_trees(indexes))
    for name in sorted(by_prefix.keys() | trees.keys()):
        if not _UNIT_NAME.fullmatch(name):
            raise IntegrityError(f"The checkpoint has a component with the unusable name {name[:80]!r}")
        kind, tree = trees.get(name, (None, None))
        referred = set(_referred(name, kind, tree))
        if absent := referred - layout.tensors.keys():
            raise IntegrityError(f"Component {name!r} refers to {min(absent)[:200]!r}, which the layout does not have")
        yield Unit(name, kind, tree, tuple(sorted(by_prefix[name] | referred)))


def _trees(indexes: Mapping[int, ShardIndex]) -> Iterator[tuple[str, tuple[Kind, Any]]]:
    for rank, index in indexes.items():
        if rank == 0:
            yield from ((name, _open(name, entry)) for name, entry in index.replicated_trees.items())
        yield from ((f"{name}@{rank}", _open(name, entry)) for name, entry in index.trees.items())


def _open(name: str, entry: Any) -> tuple[Kind, Any]:
    try:
        kind, tree = entry
        if (kind := Kind(kind)) is Kind.DCP:
            raise ValueError("only a whole checkpoint is of this kind")
        return kind, tree
    except (TypeError, ValueError):
        raise IntegrityError(f"The index entry of component {name[:80]!r} is malformed") from None


def _referred(name: str, kind: Kind | None, tree: Any) -> Iterable[str]:
    if kind is Kind.OPTIMIZER:
        _, groups, slots = open_optimizer(name, tree)
        encoded = (slot for of_parameter in slots.values() for _, slot in of_parameter)
        return (ref.name for part in (*groups, *encoded) for ref in tensor_refs(part))
    if kind is Kind.MODULE:
        open_module(name, tree)
    return () if kind is None else (ref.name for ref in tensor_refs(tree))
