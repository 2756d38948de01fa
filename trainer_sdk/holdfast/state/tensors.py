"""A tensor of the state -> the piece of it that this rank holds, and the memory behind it.

Capture walks the state and calls describe() for each tensor; the planner takes the specs, staging the tensors. A piece
describes the *logical* tensor: strides, conj and neg bits, expansion and the storage behind a view belong to this
process, and are not saved.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from holdfast.errors import UnsupportedStateError
from holdfast.layout.plan import PackGroup, PieceSpec
from holdfast.layout.reshard import row_major_strides
from holdfast_protocol.index_documents import ITEM_BYTES


class LocalBox(NamedTuple):
    """A DTensor's box on this rank, from its mesh coordinate alone, without communication. `local` is the box at
    `offsets` of the global tensor; `replicas` as in PieceSpec."""

    local: torch.Tensor
    offsets: tuple[int, ...]
    replicas: tuple[tuple[int, int], ...]
    replicated: bool
    """Every rank of the mesh holds the whole tensor."""


def is_plain(tensor: torch.Tensor) -> bool:
    """A tensor or a parameter of torch itself, as nearly all are: no DTensor, and no tensors inside of it."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def mesh_copies(tensor: DTensor) -> tuple[tuple[int, int], ...] | None:
    """(coordinate, size) in all of the tensor's mesh, for a value that each of its ranks holds whole. None outside
    it."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    return tuple(zip(coordinate, tensor.device_mesh.shape, strict=True))


def local_box(name: str, tensor: DTensor) -> LocalBox | None:
    """This rank's box, or None if the rank is not in the tensor's mesh.

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


def dtensor_around(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """A DTensor with this very part, on its device: what fully_shard offloads is on the host, and its mesh of GPUs.
    DTensor.from_local() moves the part to the mesh's device."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    kind: Any = DTensor
    made: DTensor = kind(local, DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)
    return made


def placements_beside(shape: tuple[int, ...], parameter: DTensor) -> tuple[Placement, ...]:
    """For a tensor of `shape` whose dimensions are some of the parameter's, in their order: its shards of these. If
    they may be others of the same sizes, or none, it is replicated."""
    ways = [
        dims
        for dims in combinations(range(parameter.ndim), len(shape))
        if tuple(parameter.shape[dim] for dim in dims) == shape
    ]
    kept = ways[0] if len(ways) == 1 else ()
    return tuple(
        Shard(kept.index(placement.dim)) if type(placement) is Shard and placement.dim in kept else Replicate()
        for placement in parameter.placements
    )


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
    # Mesh dimensions cut from left to right, but fully_shard over tensor parallel cuts right to left. torch marks that
    # as a strided shard; its split factor is the number of parts that the dimensions to its right have already made.
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
    # A private class of torch, in some versions a subclass of Shard: only it has this field.
    return getattr(placement, "split_factor", None) is not None


_HUGE_PAGES_FROM_BYTES = 4 * 1024 * 1024
_ALIGNED_BYTES = 64
_ADDRESSED = frozenset({"cpu", "cuda"})
"""Devices whose data_ptr() are addresses, all in one address space."""


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new contiguous tensor of undefined content.

    A large one on the host lies in numpy's memory, which asks the kernel for huge pages: fresh pages of 4 KiB cost
    0.5 s per GB, as much as hashing. Aligned as in torch, for kernels whose rounding depends on it.
    """
    size_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size_bytes < _HUGE_PAGES_FROM_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    room = np.empty(size_bytes + _ALIGNED_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % _ALIGNED_BYTES
    storage = torch.from_numpy(room[start : start + size_bytes]).untyped_storage()
    # Not a view of a byte tensor, because autograd would remember it as a view. The script's default device may be
    # another one.
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape), row_major_strides(shape, 1))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor, writable, one byte per item. It keeps that memory alive. Transfer threads
    write to it without torch's knowledge, so no step may run meanwhile."""
    view: memoryview = flat(tensor).view(torch.uint8).numpy().data
    return view


def row_major_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The logical bytes of a tensor on any device, one after another. In its own memory if it is contiguous on the
    host."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    found: np.ndarray[Any, np.dtype[np.uint8]] = plain.reshape(-1).view(torch.uint8).numpy()
    return found


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The items of a contiguous tensor in their order, in the same memory. A dimension of size 1 may have any
    stride."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def takes_bytes(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the row-major bytes of a tensor of `shape` and `dtype` can be this tensor's memory unchanged."""
    return (
        tensor.device.type in _ADDRESSED
        and tuple(tensor.shape) == shape
        and tensor.dtype == dtype
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() >= tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    )


def is_row_major(tensor: torch.Tensor) -> bool:
    """Whether its strides are those of a new tensor of its shape."""
    return tensor.stride() == row_major_strides(tensor.shape, 1)


def apart(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The id() of each tensor whose memory no other of them touches, in whole or in part.

    Bytes arrive in no particular order. If two tensors share memory an order must decide, and only apply has one.
    """
    spans = sorted(_span(tensor) for tensor in tensors if _has_address(tensor))
    found = {identity for _, _, identity in spans}
    reached, furthest = 0, 0
    for start, end, identity in spans:
        if start < reached:
            found -= {identity, furthest}
        if end > reached:
            reached, furthest = end, identity
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    items = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + items * tensor.itemsize, id(tensor)


class TakenMemory:
    """The memory of tensors that a load fills in place, and the first name of each view. Tensors of two storages share
    none."""

    def __init__(self) -> None:
        self._views: dict[tuple[object, ...], str] = {}
        self._spans: dict[int, tuple[list[int], list[int]]] = {}
        """Storage -> begins and ends of what is taken: ascending, and no two touch the same bytes."""

    def taken_as(self, tensor: torch.Tensor) -> str | None:
        """The first name of exactly this view."""
        return self._views.get(_view(tensor)) if _has_address(tensor) else None

    def touches(self, tensor: torch.Tensor) -> bool:
        """Whether any of its bytes are taken."""
        if not _has_address(tensor):
            return False
        start, end, _ = _span(tensor)
        begins, ends = self._spans.get(tensor.untyped_storage().data_ptr(), ([], []))
        return bisect_right(ends, start) < bisect_left(begins, end)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        if not _has_address(tensor):
            return
        self._views.setdefault(_view(tensor), name)
        start, end, _ = _span(tensor)
        begins, ends = self._spans.setdefault(tensor.untyped_storage().data_ptr(), ([], []))
        low, high = bisect_right(ends, start), bisect_left(begins, end)
        if low < high:
            start, end = min(start, begins[low]), max(end, ends[high - 1])
        begins[low:high], ends[low:high] = [start], [end]


def _has_address(tensor: torch.Tensor) -> bool:
    return tensor.device.type in _ADDRESSED and tensor.numel() > 0


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


class TensorPiece(NamedTuple):
    """One rank's box of a tensor. `local` is the live tensor, detached: stage it before training goes on."""

    spec: PieceSpec
    local: torch.Tensor
    guarded: torch.Tensor | None = None
    """The tensor as its component holds it, if only an optimizer's step changes it; else None."""


class Held(NamedTuple):
    """How the component holds its plain tensors. DTensors carry this themselves."""

    replicated: bool
    pack: PackGroup = "trainable"
    owner: int | None = None
    replicas: tuple[tuple[int, int], ...] = ()
    guarded: bool = False
    """Only a step of an optimizer changes it, and the hook on optimizers sees that step."""


class TieBook:
    """The tensors of one component that were described already, so that tied tensors are staged once. One per
    component."""

    def __init__(self) -> None:
        self._by_address: dict[int, list[tuple[str, PieceSpec, torch.Tensor]]] = {}

    def tied_to(self, name: str, spec: PieceSpec, local: torch.Tensor, tensor: torch.Tensor) -> str | None:
        """The earlier name of exactly this view of this storage, or None (and the view is remembered). `tensor`: all of
        it. A rank whose part is empty has no address to compare, and must find the same ties as the other ranks, also
        between a parameter and what was detached from it: fully_shard pads the storage behind an empty part."""
        if 0 in spec.global_shape:
            return None
        address = local.data_ptr() if local.numel() else local.untyped_storage().data_ptr() or id(tensor)
        described = self._by_address.setdefault(address, [])
        for first, its_spec, its_local in described:
            if _tie_of(spec, local) == _tie_of(its_spec, its_local):
                return None if first == name else first
        described.append((name, spec, local))
        return None


def _tie_of(spec: PieceSpec, local: torch.Tensor) -> tuple[object, ...]:
    return (
        (local.device, local.stride(), local.is_conj(), local.is_neg()),
        (spec.dtype, spec.global_shape, spec.offsets, spec.shape, spec.replicated, spec.replicas),
    )


def describe(name: str, component: str, tensor: torch.Tensor, held: Held, ties: TieBook) -> TensorPiece | None:
    """The piece of `tensor` that this rank holds; None if a DTensor's mesh leaves this rank out.

    Never copies or changes the tensor. Raises UnsupportedStateError for a tensor without logical bytes here.
    """
    refuse_unsupported(name, tensor)
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        box = local_box(name, tensor)
        if box is None:
            return None
        refuse_unsupported(name, box.local)
        local = box.local.detach()
        spec = PieceSpec(
            name, component, dtype_name(tensor.dtype), shape, box.offsets, tuple(local.shape), box.replicated,
            pack=held.pack, replicas=box.replicas,
        )  # fmt: skip
    else:
        local = tensor.detach()
        spec = PieceSpec(
            name, component, dtype_name(tensor.dtype), shape, (0,) * len(shape), shape, held.replicated,
            pack=held.pack, owner=held.owner, replicas=held.replicas,
        )  # fmt: skip
    return piece_of(spec, local, tensor, held, ties)


def piece_of(spec: PieceSpec, local: torch.Tensor, tensor: torch.Tensor, held: Held, ties: TieBook) -> TensorPiece:
    """The piece `local` of `tensor`, whose spec has no tie yet."""
    alias_of = ties.tied_to(spec.name, spec, local, tensor)
    if alias_of is not None:
        spec = spec._replace(alias_of=alias_of)
    return TensorPiece(spec, local, tensor if held.guarded else None)


def _is_strided_memory(tensor: torch.Tensor) -> bool:
    """For a plain tensor: whether its elements are bytes that Holdfast can store."""
    is_memory = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)
    return is_memory and dtype_name(tensor.dtype) in ITEM_BYTES


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without `torch.`, as the layout has it."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of dtype_name, for the names of ITEM_BYTES."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype of this torch {torch.__version__}")
    return dtype


def refuse_unsupported(name: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedStateError for a tensor whose bytes cannot be saved and loaded exactly."""
    plain = is_plain(tensor)
    if plain and _is_strided_memory(tensor):  # nearly all are, and training waits for this
        return
    if not plain and type(tensor).__name__ == "ShardedTensor":  # first: its methods fail or answer unlike a tensor's
        raise UnsupportedStateError(
            name,
            "it is a ShardedTensor, which torch has given up for DTensor",
            "shard with fully_shard(), or save it by your own dcp.save with ckpt.writer(), which keeps it",
        )
    if not plain and isinstance(tensor, UninitializedTensorMixin):
        raise UnsupportedStateError(name, "it is a lazy parameter without a shape", "run one forward pass first")
    if tensor.is_nested:
        raise UnsupportedStateError(name, "it is a nested tensor", "keep its values and lengths as plain tensors")
    if tensor.is_quantized:
        raise UnsupportedStateError(name, "it is a quantized tensor", "keep its int_repr(), scale and zero point")
    if tensor.layout != torch.strided:
        raise UnsupportedStateError(name, f"it is a sparse tensor ({tensor.layout})", "keep its indices and values")
    if not plain and not isinstance(tensor, DTensor):
        raise UnsupportedStateError(
            name,
            f"it is a {type(tensor).__qualname__}, whose bytes holdfast does not know",
            "convert it to a plain tensor",
        )
    if tensor.device.type == "meta":
        raise UnsupportedStateError(name, "it is on the meta device and has no bytes", "materialise it with to_empty()")
    if dtype_name(tensor.dtype) not in ITEM_BYTES:
        raise UnsupportedStateError(name, f"holdfast cannot store the dtype {tensor.dtype}", "view it as uint8")
