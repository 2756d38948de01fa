"""The ceiling of a stall: the same bytes, copied into warm buffers. The faster of libc's memcpy and torch's copy."""

from __future__ import annotations

import ctypes
import time
from statistics import median
from typing import Any

import torch

from benchmarks.spec import Spec
from benchmarks.state import build


def run(spec: Spec) -> dict[str, Any]:
    state = build(spec.size_bytes)
    tensors = [tensor.detach() for tensor in state.tensors()]
    buffers = [tensor.clone() for tensor in tensors]

    def by_libc() -> None:
        for buffer, tensor in zip(buffers, tensors, strict=True):
            ctypes.memmove(buffer.data_ptr(), tensor.data_ptr(), tensor.nbytes)

    def by_torch() -> None:
        torch._foreach_copy_(buffers, tensors)

    seconds: dict[str, list[float]] = {"libc": [], "torch": []}
    for number in range(1 + spec.rounds):
        for name, copy in (("libc", by_libc), ("torch", by_torch)):
            state.change()
            began = time.perf_counter()
            copy()
            if number:
                seconds[name].append(time.perf_counter() - began)
    by_name = {name: median(taken) for name, taken in seconds.items()}
    return {"seconds": min(by_name.values()), "bytes": state.bytes, "by": min(by_name, key=lambda name: by_name[name])}
