"""Bits of tensors -> bits in a slab: which views are copied onto which, and the copies. Bits, never values: NaN
payloads survive.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch

from holdfast.staging.host_copy import Copy, HostCopy
from holdfast_client.chunks.workers import WorkerThreads

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARED_BYTES = 64 * 1024 * 1024
"""So much of a tensor is compared at once: a device that is nearly full has room for that."""


class Copying:
    """Copies that were started. On a device they may still be under way."""

    def __init__(self, events: list[torch.cuda.Event]) -> None:
        self._events = events

    def wait(self) -> None:
        """Until the last byte has arrived. From any thread, and as often as one likes."""
        for event in self._events:
            event.synchronize()


class Copier:
    """Starts copies from one thread: on CUDA on a stream of its own for each device, on the host at once."""

    def __init__(self, helpers: WorkerThreads | None = None) -> None:
        """`helpers` copy as well, as long as there is something left to copy when they come to it."""
        self._helpers = helpers
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @torch.no_grad()
    def start(self, copies: Iterable[Copy]) -> Copying:
        """The sources must stay as they are until `wait` has returned."""
        by_device: dict[torch.device, list[Copy]] = defaultdict(list)
        for copy in copies:
            by_device[copy.source.device].append(copy)
        return Copying([event for device, those in by_device.items() for event in self._start(device, those)])

    def _start(self, device: torch.device, copies: list[Copy]) -> list[torch.cuda.Event]:
        if device.type == "cpu":
            flat = [copy for copy in copies if copy.source.is_contiguous()]
            HostCopy(flat).run(self._helpers)
            copies = [copy for copy in copies if not copy.source.is_contiguous()]
        targets, sources = [copy.target for copy in copies], [copy.source for copy in copies]
        if not copies:
            return []
        if device.type != "cuda":
            torch._foreach_copy_(targets, sources)
            return []
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))  # what training has queued comes first
        with torch.cuda.stream(stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(stream)
        return [arrived]


def whole_copy(target: torch.Tensor, tensor: torch.Tensor) -> Copy:
    """Of the whole tensor; `target` is a bits_view of its shape."""
    return Copy(target, _as_bits(tensor))


def bits_view(flat: torch.Tensor, dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """Bytes in a slab as the target of a copy from a tensor of `dtype` and `shape`."""
    if dtype.is_complex:
        return flat.view(_BITS[dtype.itemsize // 2]).view(*shape, 2)
    return flat.view(_BITS[dtype.itemsize]).view(tuple(shape))


def range_copies(flat: torch.Tensor, tensor: torch.Tensor, start_byte: int) -> Iterator[Copy]:
    """Copies that fill `flat` with the tensor's logical bytes from `start_byte` on, both at elements' borders.

    However the tensor is strided, no more of it is made contiguous than what is copied.
    """
    item = tensor.element_size()
    at = 0
    for box in boxes(tensor, start_byte // item, (start_byte + flat.numel()) // item):
        size = box.numel() * item
        yield Copy(bits_view(flat[at : at + size], box.dtype, box.shape), _as_bits(box))
        at += size


@torch.no_grad()
def same_bits(flat: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether `flat` holds exactly the tensor's logical bytes. Waits for the device."""
    step = _COMPARED_BYTES
    return all(
        torch.equal(staged.to(live.device), live)
        for start in range(0, flat.numel(), step)
        for staged, live in range_copies(flat[start : start + step], tensor, start)
    )


def boxes(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Views that together are the elements [start, stop) of `tensor`, in row-major order."""
    if start >= stop:
        return
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
        return
    row = tensor[0].numel()
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from boxes(tensor[last], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from boxes(tensor[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield tensor[first:last]
    if last * row < stop:
        yield from boxes(tensor[last], 0, stop - last * row)


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    elif tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.view(_BITS[tensor.element_size()])
