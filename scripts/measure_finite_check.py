"""What `check_finite=` adds to the time for which training stands still for a save: staging with it and without it.

    python scripts/measure_finite_check.py --mib 512

Runs on the GPU where there is one; `--threads 1` leaves out what threads cost that wait for each other on a
busy machine. A state like that of AdamW: a model, and two tensors of its size per parameter. The
saves with and without the check alternate, and the smallest of several times is told, with the CPU time beside it: on a
busy machine that is what comes again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from holdfast.health.diverged import FiniteCheck, Looked
from holdfast.layout.plan import ChunkSizes, build_local_plan
from holdfast.staging import StagingArea
from holdfast.state.capture import capture
from holdfast_client.chunks.workers import WorkerThreads

LAYERS = 16


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--mib", type=int, default=512, help="Of the whole state.")
    arguments.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments.add_argument("--times", type=int, default=7)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = _state(given.mib * 2**20, getattr(torch, given.dtype), device)
    captured = capture(state, rank=0, world_size=1)
    plan = build_local_plan(captured.specs, rank=0, world_size=1, sizes=ChunkSizes())
    area, check = StagingArea(helpers=WorkerThreads(given.threads, "copy")), FiniteCheck()

    def without() -> None:
        area.stage(plan, captured.pieces).release()

    def with_it() -> None:
        looked: list[Looked] = []

        def look() -> None:
            looked.append(check.look(plan, captured.pieces, state))

        area.stage(plan, captured.pieces, meanwhile=look).release()
        if check.found(looked[0]):
            raise SystemExit("the state is finite, and the check says otherwise")

    times: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    for _ in range(given.times + 1):
        for name, work in (("without", without), ("with", with_it)):
            times[name].append(_timed(work, device))
    best = {name: (min(wall for wall, _ in each[1:]), min(cpu for _, cpu in each[1:])) for name, each in times.items()}
    gib = given.mib / 1024
    for name, (wall, cpu) in best.items():
        print(f"{device} {given.dtype} {name:8} {wall / gib:.3f} s/GiB  {cpu / gib:.3f} CPU-s/GiB")
    added = [after - before for after, before in zip(best["with"], best["without"], strict=True)]
    print(f"added: {added[0] / gib:.3f} s/GiB, {added[1] / gib:.3f} CPU-s/GiB")


def _state(size: int, dtype: torch.dtype, device: str) -> dict[str, object]:
    width = int((size / 3 / LAYERS / dtype.itemsize) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"model": model, "optimizer": optimizer}


def _timed(work: Callable[[], None], device: str) -> tuple[float, float]:
    if device == "cuda":
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
