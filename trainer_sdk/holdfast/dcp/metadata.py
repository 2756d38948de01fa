"""DCP's metadata and non-tensor values <-> the index documents. Pure.

In every rank's index:  trees["dcp"]            = ["dcp", {fqn: typed tree}]
In rank 0's besides:    replicated_trees["dcp"] = ["dcp", {"planner_data": typed tree, "version": text or null,
                                                          "values": {fqn: the rank whose index has it}}]
Tensors are described by the layout, as in every checkpoint.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.errors import TreeFormatError, UnsupportedStateError
from holdfast.state.components import Kind
from holdfast.state.tensors import torch_dtype
from holdfast.state.tree import decode_tree, encode_tree
from holdfast_protocol.index_documents import Layout, Piece, ShardIndex

COMPONENT = Kind.DCP.value


class SavedDcp(NamedTuple):
    """The part of rank 0's index beside the tensors."""

    planner_data: Any
    version: str | None
    values: Mapping[str, int]


def unpickled(saved: io.BytesIO) -> Any:
    """The value that DCP's planner has pickled. Only for a pickle that this process has just made, of its own objects:
    never for one from a store."""
    saved.seek(0)
    return torch.load(saved, weights_only=False)


def encode_value(fqn: str, value: Any) -> Any:
    """The typed tree of a value that is no tensor. Raises UnsupportedStateError with the key and the class."""
    return encode_tree(value, path=fqn, name_tensor=_refuse_hidden_tensor)


def _refuse_hidden_tensor(path: str, tensor: torch.Tensor) -> NoReturn:
    raise UnsupportedStateError(
        path,
        f"it is a {type(tensor).__qualname__} inside a value that dcp.save does not look into",
        "keep tensors in dicts and lists",
    )


def decode_value(encoded: Any) -> io.BytesIO:
    """The inverse: pickled here and now, because DCP's planner reads nothing else."""
    stream = io.BytesIO()
    torch.save(decode_tree(encoded), stream)
    stream.seek(0)
    return stream


def describe(metadata: Metadata, values: Mapping[str, int]) -> dict[str, Any]:
    """For ShardIndex.replicated_trees of rank 0. Raises UnsupportedStateError for planners with data of their own."""
    planner_data = encode_tree(metadata.planner_data, path="planner_data")
    return {COMPONENT: [COMPONENT, {"planner_data": planner_data, "version": metadata.version, "values": dict(values)}]}


def is_dcp(replicated_trees: Mapping[str, Any]) -> bool:
    """Whether a dcp.save wrote it. A user's component `dcp` is of another kind."""
    match replicated_trees.get(COMPONENT):
        case [Kind.DCP.value, _]:
            return True
    return False


def saved_dcp(replicated_trees: Mapping[str, Any]) -> SavedDcp:
    """The inverse. A checkpoint that Holdfast itself saved lacks this part, but its tensors can be read all the same.

    Raises TreeFormatError.
    """
    if not is_dcp(replicated_trees):
        return SavedDcp(None, None, {})
    try:
        _, document = replicated_trees[COMPONENT]
        values = {str(fqn): int(rank) for fqn, rank in document["values"].items()}
        return SavedDcp(decode_tree(document["planner_data"]), document["version"], values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TreeFormatError(f"the index of this DCP checkpoint is malformed: {error}") from error


def values_of(index: ShardIndex) -> Mapping[str, Any]:
    """fqn -> typed tree, of one rank's index. Raises TreeFormatError."""
    match index.trees.get(COMPONENT):
        case [str(), dict(values)]:
            return values
        case _:
            raise TreeFormatError(f"the index of rank {index.rank} has no DCP values")


def whole_tree(indexes: Mapping[int, ShardIndex]) -> dict[str, Any]:
    """All ranks' values of one dcp.save, as one encoded document. Raises TreeFormatError."""
    saved = saved_dcp(indexes[0].replicated_trees)
    _, document = indexes[0].replicated_trees[COMPONENT]
    values = {}
    for fqn, rank in saved.values.items():
        of_rank = values_of(indexes[rank]) if rank in indexes else {}
        if fqn not in of_rank:
            raise TreeFormatError(f"rank {rank} has no value {fqn[:200]!r}, which the index of rank 0 has there")
        values[fqn] = of_rank[fqn]
    return {"planner_data": document["planner_data"], "values": values}


def nested(flat: Mapping[str, Any], planner_data: Any) -> dict[str, Any]:
    """The state as the caller gave it to dcp.save: `flat` by DCP's names, each at the place that its planner took it
    from. DCP keeps every key as text, and no empty dict. Here the state of an optimizer has its parameters' numbers
    again, and is there without entries too: load_state_dict() would take neither otherwise.

    Raises TreeFormatError. Lists have only the existing entries, whatever numbers a damaged index names.
    """
    paths = planner_data if isinstance(planner_data, dict) else {}
    root = _Branch()
    for fqn, value in flat.items():
        path = paths.get(fqn, (fqn,))
        if not isinstance(path, tuple) or not path:
            raise TreeFormatError(f"the place of {fqn[:200]!r} in the state is malformed")
        at = root
        for step in path[:-1]:
            at = at.setdefault(step, _Branch())
            if type(at) is not _Branch:
                raise TreeFormatError(f"{fqn[:200]!r} lies inside a value")
        at[path[-1]] = value
    return _numbered({key: _grown(value) for key, value in root.items()})


class _Branch(dict[Any, Any]):
    """A dict or list of the state, whose values may be dicts themselves."""


def _grown(value: Any) -> Any:
    if type(value) is not _Branch:
        return value
    if all(type(step) is int for step in value):
        return [_grown(value[step]) for step in sorted(value)]
    return _numbered({step: _grown(inner) for step, inner in value.items()})


def _numbered(found: dict[Any, Any]) -> dict[Any, Any]:
    """With its parameters' numbers as keys, if it is an optimizer's state_dict() that numbers them."""
    groups, state = found.get("param_groups"), found.get("state", {})
    if not (found.keys() <= {"state", "param_groups"} and isinstance(groups, list) and isinstance(state, dict)):
        return found
    params = [each.get("params") for each in groups if isinstance(each, dict)]
    numbers = {str(each): each for some in params if isinstance(some, list) for each in some if type(each) is int}
    return {"state": {numbers.get(key, key): each for key, each in state.items()}, "param_groups": groups}


def dcp_metadata(layout: Layout, saved: SavedDcp) -> Metadata:
    """The metadata for DCP's load planner."""
    pieces: dict[str, list[Piece]] = {}
    for shard in layout.shards:
        for piece in shard.pieces:
            pieces.setdefault(piece.tensor, []).append(piece)
    described: dict[str, STORAGE_TYPES] = {fqn: BytesStorageMetadata() for fqn in saved.values}
    for name, entry in layout.tensors.items():
        stored = pieces.get(entry.alias_of or name, [])
        boxes = [(piece.offsets, piece.shape) for piece in stored] or [((0,) * len(entry.shape), entry.shape)]
        described[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=torch_dtype(entry.dtype)),
            size=torch.Size(entry.shape),
            chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)) for offsets, shape in boxes],
        )
    return Metadata(
        state_dict_metadata=described,
        planner_data=saved.planner_data,
        storage_data={MetadataIndex(fqn): rank for fqn, rank in saved.values.items()},
        version=saved.version,
    )
