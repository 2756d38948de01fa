"""The ceiling of a stall on a GPU: the same bytes, copied into warm page-locked buffers, and nothing else."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from benchmarks.spec import Spec
from benchmarks.state import build


def run(spec: Spec) -> dict[str, Any]:
    state = build(spec.size_bytes, device=spec.device)
    tensors = [tensor.detach() for tensor in state.tensors()]
    pinned = spec.device != "cpu"
    buffers = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned) for tensor in tensors]
    seconds = []
    for number in range(1 + spec.rounds):
        state.change()
        began = time.perf_counter()
        torch._foreach_copy_(buffers, tensors, non_blocking=True)
        state.wait()
        if number:
            seconds.append(time.perf_counter() - began)
    return {"seconds": median(seconds), "bytes": state.bytes}
