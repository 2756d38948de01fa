"""A training job for the test on Slurm: it tells where each launch began, and what the state was at the end.

slurm_job.py FOLDER STEPS SLOW_LAUNCHES: a step of the first SLOW_LAUNCHES launches takes a quarter of a second, and a
preemption finds them at work.
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
from torch.nn.parallel import DistributedDataParallel

import holdfast


def main() -> None:
    folder, steps, slow_launches = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    launch = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    run = os.environ["HOLDFAST_RUN"].replace("/", "-")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(layers)
    torch.manual_seed(2 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "losses": []}
    with holdfast.Checkpointer(save=holdfast.Every(steps=10), create=True) as checkpointer:
        start = checkpointer.restore(state)
        (folder / f"{run}-began-{launch}-{rank}").write_text(str(start))
        for step in range(start, steps):
            optimizer.zero_grad()
            loss = (model(torch.randn(8, 16)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            state["losses"] = [*state["losses"], loss.item()]
            if launch < slow_launches:
                time.sleep(0.25)
            checkpointer.step(step, state)
            (folder / f"{run}-reached-{launch}-{rank}").write_text(str(step))
    everything = [*model.state_dict().values(), torch.tensor(state["losses"], dtype=torch.float64), torch.randn(4)]
    for values in optimizer.state_dict()["state"].values():
        everything += values.values()
    digest = hashlib.sha256()
    for tensor in everything:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    (folder / f"{run}-ended-{rank}").write_text(f"{len(state['losses'])} {digest.hexdigest()}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's teardown aborts now and then when a peer is gone first


if __name__ == "__main__":
    main()
