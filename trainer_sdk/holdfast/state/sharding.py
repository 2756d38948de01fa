"""Which box of a DTensor this rank holds, from its mesh coordinate alone. No communication; below tensors.py."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast.state.errors import UnsupportedStateError


class LocalBox(NamedTuple):
    """`local` is the box at `offsets` of the global tensor; `replicas` as in PieceSpec."""

    local: torch.Tensor
    offsets: tuple[int, ...]
    replicas: tuple[tuple[int, int], ...]
    replicated: bool
    """Every rank of the mesh holds the whole tensor."""


def mesh_copies(tensor: DTensor) -> tuple[tuple[int, int], ...] | None:
    """(coordinate, size) over all of the tensor's mesh: for a value that each rank of it holds whole. None outside."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    return tuple(zip(coordinate, tensor.device_mesh.shape, strict=True))


def local_box(name: str, tensor: DTensor) -> LocalBox | None:
    """This rank's box, or None where the rank is not part of the tensor's mesh.

    Raises UnsupportedStateError for partial (not yet reduced) values and for shards that are no box.
    """
    copies = mesh_copies(tensor)
    if copies is None:
        return None
    for placement in tensor.placements:
        if not isinstance(placement, Shard | Replicate) and not _is_strided(placement):
            raise UnsupportedStateError(
                name, f"its DTensor placement is {type(placement).__name__}", "redistribute it to Shard or Replicate"
            )
    with torch.no_grad():
        local = tensor.to_local()
    offsets, shape = box_at(name, tuple(tensor.shape), tensor.placements, copies)
    if tuple(local.shape) != shape:
        raise UnsupportedStateError(
            name,
            f"its local shape is {tuple(local.shape)} where its placement {tensor.placements} means {shape}",
            "shard it evenly",
        )
    replicas = tuple(
        copy for copy, placement in zip(copies, tensor.placements, strict=True) if isinstance(placement, Replicate)
    )
    return LocalBox(local, offsets, replicas, replicated=len(replicas) == len(copies))


def box_at(
    name: str, global_shape: tuple[int, ...], placements: Sequence[Placement], copies: Sequence[tuple[int, int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, shape) of the box at a mesh coordinate; torch.chunk's uneven rule. Raises UnsupportedStateError."""
    offsets, shape = [0] * len(global_shape), list(global_shape)
    for mesh_dimension in _cutting_order(name, placements, copies):
        placement = placements[mesh_dimension]
        coordinate, parts = copies[mesh_dimension]
        dimension = getattr(placement, "dim", 0)
        part = -(-shape[dimension] // parts)
        start = min(part * coordinate, shape[dimension])
        offsets[dimension] += start
        shape[dimension] = min(part, shape[dimension] - start)
    return tuple(offsets), tuple(shape)


def _cutting_order(name: str, placements: Sequence[Placement], copies: Sequence[tuple[int, int]]) -> list[int]:
    # Mesh dimensions cut from left to right, but fully_shard over tensor parallel cuts right to left: torch marks it
    # as a strided shard, whose split factor says how many parts the dimensions to its right have already made.
    order: list[int] = []
    for mesh_dimension in reversed(range(len(placements))):
        placement = placements[mesh_dimension]
        if isinstance(placement, Replicate):
            continue
        if not _is_strided(placement):
            order.insert(0, mesh_dimension)
            continue
        right = 1
        for later in range(mesh_dimension + 1, len(placements)):
            if getattr(placements[later], "dim", None) == getattr(placement, "dim", None):
                right *= copies[later][1]
        if getattr(placement, "split_factor", None) != right:
            raise UnsupportedStateError(
                name, f"its placement {placement} is not one that fully_shard makes", "redistribute it to Shard first"
            )
        order.append(mesh_dimension)
    return order


def _is_strided(placement: Placement) -> bool:
    # A private class of torch, in some versions a subclass of Shard: known by the field that only it has.
    return getattr(placement, "split_factor", None) is not None
