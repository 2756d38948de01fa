"""What every measured save has in common: warm up, change the state, save, take the medians of the rounds.

Flow: a case gives `save(number)` -> this measures it -> figures, with the last number and its fingerprint.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.measure import PeakMemory, used, warm_pages
from benchmarks.spec import Spec
from benchmarks.state import TrainingState

_PAGES_PER_STATE = 2
"""What is written, and as much again for whoever copies once more."""


@dataclass(frozen=True)
class Saved:
    """One save, durable. `state_dict_seconds` of the stall went into building the state dict."""

    stalled_at: float
    """When the call came back and training could go on; time.perf_counter()."""
    state_dict_seconds: float
    sent_bytes: int


def measure_saves(
    spec: Spec, state: TrainingState, save: Callable[[int], Saved], *, untimed: int = 1
) -> dict[str, Any]:
    """`untimed`: so many saves come first. They count for peak memory: an asynchronous save makes its buffers then."""
    memory = PeakMemory()
    rounds: list[dict[str, float]] = []
    servers: list[dict[str, float]] = []
    for number in range(untimed + spec.rounds):
        changed_bytes = state.change()
        _together()
        warm_pages(_PAGES_PER_STATE * state.bytes)
        _together()
        began = time.perf_counter()
        with used(spec.server_pids) as usage:
            saved = save(number)
        if number < untimed:
            continue
        servers.append(usage.server_cpu_seconds)
        rounds.append(
            {
                "seconds": usage.wall_seconds,
                "cpu_seconds": usage.cpu_seconds,
                "stall_seconds": saved.stalled_at - began - saved.state_dict_seconds,
                "state_dict_seconds": saved.state_dict_seconds,
                "sent_bytes": saved.sent_bytes,
                "changed_bytes": changed_bytes,
            }
        )
    return {
        **{name: median(figures[name] for figures in rounds) for name in rounds[0]},
        "server_cpu_seconds": {name: median(figures[name] for figures in servers) for name in spec.server_pids},
        "bytes": state.bytes,
        "number": number,
        "peak_extra_bytes": memory.extra_bytes(),
        "fingerprint": state.fingerprint(),
    }


def _together() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
