"""Room in a device's memory: the bytes of a verified chunk are copied to the device at once, chunk by chunk.

Flow: fetch -> a chunk is verified in the thread's own host buffer -> **OnDevice.take** -> the device. The copies run
on the transfer threads, beside the other threads' reading and hashing. So the host holds one chunk per thread instead
of the whole state. A device cannot hash, so it only gets verified bytes.
"""

from contextlib import nullcontext

import numpy as np
import torch

from holdfast.layout.reshard import Read, items_of
from holdfast.state.tensors import flat

_OPAQUE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""As in layout/reshard.py; torch copies few of the unsigned ones."""


class OnDevice:
    """For one contiguous tensor. Several threads may use it at once: reads of one plan never overlap."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            # Queued work may still read or write the tensor, and the copies wait for no other stream.
            torch.cuda.synchronize(tensor.device)
        self._items = flat(tensor).view(_OPAQUE[tensor.itemsize])
        self._stream: torch.cuda.Stream | None = None

    def leave_training_alone(self) -> None:
        """The copies do not queue behind the kernels of a training that goes on beside them, and these not behind the
        copies. The training must not use the tensor meanwhile."""
        if self._items.is_cuda:
            self._stream = torch.cuda.Stream(self._items.device)  # type: ignore[no-untyped-call]

    def take(self, read: Read, chunk: memoryview) -> None:
        """Copies `read`'s elements. When it returns they are there, and the chunk may be reused. Raises ValueError if
        the read does not fit the chunk, RuntimeError if it does not fit the tensor."""
        source = items_of(chunk, read.chunk_offset, read.shape, read.chunk_strides, read.item_bytes)
        items = torch.from_numpy(np.ascontiguousarray(source).reshape(-1).view(np.uint8)).view(self._items.dtype)
        strides = [stride // read.item_bytes for stride in read.destination_strides]
        start = self._items.storage_offset() + read.destination_offset // read.item_bytes
        target = self._items.as_strided(read.shape, strides, start)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            with torch.inference_mode() if target.is_inference() else torch.no_grad():
                target.copy_(items.view(read.shape))
            if target.is_cuda:
                torch.cuda.current_stream(target.device).synchronize()
