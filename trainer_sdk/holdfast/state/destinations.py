"""Where a stored tensor's bytes go: into a live tensor in place, or into a new one like it. Below load.py.

Planning a destination changes nothing and fails on whatever does not fit; filling it comes after all bytes were
verified.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.layout.reshard import WantedPiece
from holdfast.state.errors import StateMismatchError, TreeFormatError
from holdfast.state.sharding import local_box
from holdfast.state.tensors import torch_dtype
from holdfast.state.tree import TensorRef
from holdfast_protocol.index_documents import Layout, TensorEntry

Buffers = Mapping[str, memoryview]
"""Wanted name -> its bytes, row-major, as plan_reads and scatter filled them. Writable, little-endian."""

Filler = Callable[[Buffers], torch.Tensor]
"""Called after verification: writes and returns the tensor."""


class Wants:
    """The wanted pieces of one load, by name; one name may have several destinations."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.pieces: dict[str, WantedPiece] = {}

    def entry(self, name: str) -> TensorEntry:
        """Raises TreeFormatError when a tree refers to a tensor that the layout lacks."""
        entry = self.layout.tensors.get(name)
        if entry is None:
            raise TreeFormatError(f"the index refers to tensor {name[:200]!r}, which the layout does not have")
        return entry

    def into(self, name: str, live: torch.Tensor) -> Filler:
        """Fill `live` in place, casting where the dtypes differ. Raises StateMismatchError on another global shape."""
        entry = self.entry(name)
        if entry.shape != tuple(live.shape):
            raise StateMismatchError(
                name,
                f"its shape was {entry.shape} and is now {tuple(live.shape)}",
                "build it alike, or exclude it",
            )
        if not isinstance(live, DTensor):
            self._whole(name, entry)
            return lambda buffers: _write(live, _source(buffers, self.pieces[name]))
        box = local_box(name, live)
        if box is None:
            return lambda buffers: live
        self._want(WantedPiece(name, entry.dtype, box.offsets, tuple(box.local.shape)))

        def fill(buffers: Buffers) -> torch.Tensor:
            _write(box.local, _source(buffers, self.pieces[name]))
            return live

        return fill

    def new(self, name: str, device: torch.device) -> Filler:
        """A new plain tensor that holds the whole stored one."""
        self._whole(name, self.entry(name))
        return lambda buffers: _source(buffers, self.pieces[name]).to(device, copy=True)

    def like(self, name: str, model: torch.Tensor) -> Filler:
        """A new tensor placed as `model` is (device, sharding, strides), with the stored dtype."""
        dtype = torch_dtype(self.entry(name).dtype)
        if not isinstance(model, DTensor):
            empty: torch.Tensor = torch.empty_like(model, dtype=dtype, device="meta", requires_grad=False)
            self._whole(name, self.entry(name))
            return lambda buffers: _write(
                torch.empty_like(empty, device=model.device), _source(buffers, self.pieces[name])
            )
        box = local_box(name, model)
        if box is None:
            return lambda buffers: torch.empty_like(model, dtype=dtype, requires_grad=False)
        self._want(WantedPiece(name, self.entry(name).dtype, box.offsets, tuple(box.local.shape)))

        def fill(buffers: Buffers) -> torch.Tensor:
            local = _write(torch.empty_like(box.local, dtype=dtype), _source(buffers, self.pieces[name]))
            return DTensor.from_local(
                local,
                model.device_mesh,
                model.placements,
                run_check=False,
                shape=model.shape,
                stride=model.stride(),
            )

        return fill

    def referred(self, ref: TensorRef, live: torch.Tensor | None) -> Filler:
        """What a tree's reference stands for: `live` in place if it fits exactly, else new where it came from."""
        entry = self.entry(ref.name)
        if live is not None and fits(entry, live):
            return self.into(ref.name, live)
        if isinstance(live, DTensor) and entry.shape == tuple(live.shape):
            filler = self.like(ref.name, live)
        else:
            filler = self.new(ref.name, device_of(ref))
        return lambda buffers: _as_declared(filler(buffers), ref)

    def _whole(self, name: str, entry: TensorEntry) -> None:
        self._want(WantedPiece(name, entry.dtype, (0,) * len(entry.shape), entry.shape))

    def _want(self, piece: WantedPiece) -> None:
        first = self.pieces.setdefault(piece.name, piece)
        if first != piece:
            raise StateMismatchError(
                piece.name, "two places of the state want different parts of it", "shard both places alike"
            )


def fits(entry: TensorEntry, live: torch.Tensor) -> bool:
    """Whether the stored tensor can be written over `live` without anything about it changing but its values."""
    return entry.shape == tuple(live.shape) and torch_dtype(entry.dtype) == live.dtype and not live.is_meta


def device_of(ref: TensorRef) -> torch.device:
    """The device type it came from if this process has it (its current ordinal), else the host."""
    if ref.device == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _as_declared(tensor: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    if ref.parameter:
        return torch.nn.Parameter(tensor, requires_grad=ref.requires_grad)
    return tensor.requires_grad_(ref.requires_grad)


def _source(buffers: Buffers, piece: WantedPiece) -> torch.Tensor:
    buffer: Any = buffers[piece.name] if piece.bytes else b""
    if memoryview(buffer).nbytes != piece.bytes:
        raise ValueError(f"the buffer of {piece.name!r} has {memoryview(buffer).nbytes} bytes, not {piece.bytes}")
    dtype = torch_dtype(piece.dtype)
    if not piece.bytes:
        return torch.empty(piece.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(piece.shape)


@torch.no_grad()
def _write(live: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if any(stride == 0 and size > 1 for stride, size in zip(live.stride(), live.shape, strict=True)):
        live.data = source.to(device=live.device, dtype=live.dtype, copy=True)  # expanded: has no element for each
    elif live.numel():
        live.copy_(source)
    return live
