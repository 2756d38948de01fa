"""A fully sharded job under elastic torchrun: it tells which state it has restored, and which it has after each step.

elastic_job.py RUN FOLDER: trains until FOLDER/enough is there. `{rank}-{pid}.log` has a line for each restore and each
step: `restored STEP WORLD DIGEST` or `trained STEP WORLD DIGEST`, the digest over the whole state.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast


def digest_of(state: dict[str, Any]) -> str:
    """Of parameters and AdamW's slots, whole: the same on every number of ranks."""
    found = hashlib.sha256()
    for name, parameter in state["model"].named_parameters():
        for slot, value in [("", parameter), *sorted(state["optimizer"].state.get(parameter, {}).items())]:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found.update(f"{name}{slot}".encode() + whole.detach().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    run, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)))
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05)}
    with (folder / f"{rank}-{os.getpid()}.log").open("w", buffering=1) as log:
        with holdfast.Checkpointer(run, save=holdfast.Every(steps=2), create=True) as checkpointer:
            start = step = checkpointer.restore(state)
            log.write(f"restored {start - 1} {world_size} {digest_of(state)}\n")
            enough = torch.zeros(1)
            while not enough:
                loss = model(torch.randn(4, 5)).square().mean()
                loss.backward()
                state["optimizer"].step()
                state["optimizer"].zero_grad()
                log.write(f"trained {step} {world_size} {digest_of(state)}\n")
                checkpointer.step(step, state)
                step += 1
                enough.fill_((folder / "enough").exists())
                dist.broadcast(enough, 0)
                time.sleep(0.2)
    sys.stdout.flush()
    os._exit(0)  # gloo's teardown aborts now and then when a peer is gone first


if __name__ == "__main__":
    main()
