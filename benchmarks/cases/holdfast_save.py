"""Holdfast: `ckpt.save()` until `committed`. SHA-256 is always on; the service is found by the environment. With
`overlap` a step computes meanwhile for longer than the copy takes, and its optimizer's wait is part of the stall.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.cases.saves import Saved, measure_saves
from benchmarks.spec import Spec
from benchmarks.state import build
from holdfast import Checkpointer
from holdfast.layout.plan import ChunkSizes
from holdfast.save import saver as saving
from holdfast_protocol.states import AttemptOutcome

RUN = "bench/state"
_COMPUTES_SECONDS_PER_GB = 0.5
"""Five times what a copy within the memory takes."""


def run(spec: Spec) -> dict[str, Any]:
    state = build(spec.size_bytes, frozen=spec.options.get("frozen", False), device=spec.device)
    chunk_bytes = spec.options.get("chunk_bytes")
    overlap = spec.options.get("overlap", False)
    checkpointer = Checkpointer(
        RUN,
        create=True,
        strict=True,
        chunk_sizes=None if chunk_bytes is None else ChunkSizes(chunk_bytes, chunk_bytes, chunk_bytes),
        frozen=["model/base.*"] if spec.options.get("declared") else [],
        host_memory=spec.options.get("host_memory"),
        overlap=overlap,
    )
    # state.change() stands for a step. `overlap=True` watches for all other writes until a hook of torch says so.
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with capture_timed() as capture_seconds, checkpointer:

        def save(number: int) -> Saved:
            sent_bytes = checkpointer.stats.sent_bytes
            handle = checkpointer.save(number, state.objects())
            stalled_at = time.perf_counter()
            if overlap:
                _compute_until(stalled_at + spec.size_bytes / 1e9 * _COMPUTES_SECONDS_PER_GB)
                before_step = time.perf_counter()
                other.step()
                stalled_at += time.perf_counter() - before_step
            handle.committed.result()
            return Saved(stalled_at, capture_seconds[-1], checkpointer.stats.sent_bytes - sent_bytes)

        # An agent keeps the state of one save while the next is staged, in memory that is made after the first save.
        untimed = 2 if "HOLDFAST_AGENT" in os.environ else 1
        figures = measure_saves(spec, state, save, untimed=untimed)
        if spec.options.get("relaunched"):
            checkpointer.close(AttemptOutcome.PREEMPTED, "the benchmark launches it again")
        return figures


def _compute_until(moment: float) -> None:
    """On one core, as a training that waits for its GPU."""
    matrix = torch.ones(64, 64)
    while time.perf_counter() < moment:
        matrix @ matrix


@contextmanager
def capture_timed() -> Iterator[list[float]]:
    """Holdfast walks the state inside of save(), where others ask for a state dict before; so it is timed in there."""
    seconds: list[float] = []
    original = saving.capture

    def timed(*arguments: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*arguments, **keywords)
        finally:
            seconds.append(time.perf_counter() - began)

    saving.capture = timed
    try:
        yield seconds
    finally:
        saving.capture = original
