"""Training while a save is in flight: steps per second with it over those without it, by turns, in one process.

Training has a core of its own; the save's threads and the servers have the others. So what is lost is what the save
takes from training by other ways than the CPU: the interpreter's lock, and the memory's bandwidth. The stall of save()
itself is another figure and not in this one.

The same training beside a process of its own that only copies and hashes, on the same other cores, tells how much of it
the machine takes whoever does that work: no saving that hashes can be below it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.cases.holdfast_save import RUN
from benchmarks.spec import Spec
from benchmarks.state import build
from holdfast import Checkpointer

_STEPS_TO_WARM_UP = 100


def run(spec: Spec) -> dict[str, Any]:
    """Figures: `rate`, the median ratio; `rate_beside_hashing`; `quiet_steps_per_s`, `save_seconds`."""
    training_cores, other_cores = set(spec.options["training_cores"]), set(spec.options["other_cores"])
    quiet_seconds = float(spec.options["quiet_seconds"])
    torch.set_num_threads(1)
    os.sched_setaffinity(0, other_cores)  # what is started from here on stays there
    state = build(spec.size_bytes, device=spec.device)
    step = _small_training(spec.device)
    ratios, beside_hashing, quiet_rates, saves = [], [], [], []
    with Checkpointer(RUN, create=True, strict=True) as checkpointer:
        os.sched_setaffinity(0, training_cores)  # this thread only
        for _ in range(_STEPS_TO_WARM_UP):
            step()
        for number in range(1 + spec.rounds):
            before = _steps_per_second(step, lambda began: time.perf_counter() - began < quiet_seconds)
            state.change()
            handle = checkpointer.save(number, state.objects())
            began = time.perf_counter()
            during = _steps_per_second(step, lambda _, done=handle.committed.done: not done())
            seconds = time.perf_counter() - began
            handle.committed.result()
            after = _steps_per_second(step, lambda began: time.perf_counter() - began < quiet_seconds)
            if number:  # the first opens connections and makes buffers
                quiet_rates.append((before + after) / 2)
                ratios.append(during / quiet_rates[-1])
                saves.append(seconds)
    for _ in range(spec.rounds):
        before = _steps_per_second(step, lambda began: time.perf_counter() - began < quiet_seconds)
        with _hashing_on(other_cores):
            beside = _steps_per_second(step, lambda began: time.perf_counter() - began < quiet_seconds)
        beside_hashing.append(beside / before)
    return {
        "rate": median(ratios),
        "rate_beside_hashing": median(beside_hashing),
        "quiet_steps_per_s": median(quiet_rates),
        "save_seconds": median(saves),
    }


def _steps_per_second(step: Callable[[], None], goes_on: Callable[[float], bool]) -> float:
    began, steps = time.perf_counter(), 0
    while goes_on(began):
        step()
        steps += 1
    return steps / (time.perf_counter() - began)


@contextmanager
def _hashing_on(cores: set[int]) -> Iterator[None]:
    """While a process on these cores copies and hashes; entered when it has begun."""
    command = [sys.executable, "-m", "benchmarks.cases.copy_and_hash", *map(str, sorted(cores))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the process that copies and hashes beside training did not start")
        try:
            yield
        finally:
            process.kill()


def _small_training(device: str) -> Callable[[], None]:
    """Steps of a few milliseconds, most of it in Python: what is hardest on the interpreter's lock. A step on a GPU is
    over when its loss is read."""
    torch.manual_seed(0)
    width = 256
    model = nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()))
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(64, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        if device != "cpu":
            loss.item()

    return step
