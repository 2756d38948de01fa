"""torch DCP: `save`, `async_save` as it comes, or `async_save` with a DefaultStager that is kept; until durable."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.cases.dcp_storage import writer, written_bytes
from benchmarks.cases.saves import Saved, measure_saves
from benchmarks.spec import Spec
from benchmarks.state import build


def run(spec: Spec) -> dict[str, Any]:
    state = build(spec.size_bytes, frozen=spec.options.get("frozen", False), device=spec.device)
    mode = spec.options.get("mode", "save")
    if mode != "save" and not dist.is_initialized():  # which async_save wants even for one rank
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    stager = _stager(on_gpu=spec.device != "cpu") if mode == "stager" else None

    def save(number: int) -> Saved:
        began = time.perf_counter()
        model, optimizer = get_state_dict(state.model, state.optimizer)
        state_dict_seconds = time.perf_counter() - began
        state_dict, storage = {"model": model, "optimizer": optimizer}, writer(spec, number)
        if mode == "save":
            dcp.save(state_dict, storage_writer=storage)
            stalled_at = time.perf_counter()
        else:
            future = dcp.async_save(state_dict, storage_writer=storage, async_stager=stager)
            stalled_at = time.perf_counter()
            future.result()
        return Saved(stalled_at, state_dict_seconds, written_bytes(spec, number))

    try:
        return measure_saves(spec, state, save)
    finally:
        if stager is not None:
            stager.close()


def _stager(*, on_gpu: bool) -> Any:
    """Pinned memory that is kept, where there is a GPU. Without its threads, with which the state would have to wait
    for the copy after the call has come back; shared memory serves savers in another process."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # not in torch 2.8

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
    )
