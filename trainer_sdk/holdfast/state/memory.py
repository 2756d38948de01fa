"""The memory behind tensors, for bytes to arrive in. Below arrivals.py.

What arrives in it is written behind torch's back, from transfer threads: nothing here is done while a step runs.
"""

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
import torch

from holdfast.layout.reshard import row_major_strides

_HUGE_PAGES_FROM_BYTES = 4 * 1024 * 1024
_ALIGNED_BYTES = 64
_ADDRESSED = frozenset({"cpu", "cuda"})
"""Devices whose data_ptr() are addresses, all in one space."""


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new contiguous tensor of undefined content.

    A large one on the host lies in numpy's memory, which asks the kernel for huge pages: taking fresh pages of 4 KiB
    costs 0.5 s per GB, as much as hashing. Aligned as torch aligns, for kernels whose rounding depends on it.
    """
    size_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size_bytes < _HUGE_PAGES_FROM_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    room = np.empty(size_bytes + _ALIGNED_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % _ALIGNED_BYTES
    storage = torch.from_numpy(room[start : start + size_bytes]).untyped_storage()
    # Not a view of a tensor of bytes, which autograd would remember as one.
    return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), row_major_strides(shape, 1))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor, writable, one byte per item. It keeps that memory alive."""
    view: memoryview = flat(tensor).view(torch.uint8).numpy().data
    return view


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The items of a contiguous tensor in their order, the same memory. A dimension of size 1 may have any stride."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def takes_bytes(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the row-major bytes of a tensor of `shape` and `dtype` can be this tensor's memory as they are."""
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
    """Whether its strides are just those of a new tensor of its shape."""
    return tensor.stride() == row_major_strides(tensor.shape, 1)


def apart(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The id() of each tensor whose memory none of the others touches, in whole or in part.

    Bytes arrive in no particular order. Where two share memory an order must decide, and only apply has one.
    """
    spans = sorted(_span(tensor) for tensor in tensors if tensor.device.type in _ADDRESSED and tensor.numel())
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
