"""Data parallel: the model is on every rank, each rank's data and random state are its own.

holdfast serve &
torchrun --standalone --nproc-per-node=2 examples/ddp.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="examples/ddp", help="project/run")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.GELU(), torch.nn.Linear(64, 1)
    )
    # find_unused_parameters keeps DDP's first buckets, so that a resumed run adds gradients in the same order.
    model = DistributedDataParallel(model.to(device), find_unused_parameters=True)
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(options.run, save=holdfast.Every(steps=20)) as checkpointer:
        for step in range(checkpointer.restore(state), options.steps):
            inputs = torch.randn(16, 32, device=device)
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                print(f"step {step} loss {loss.item():.9g}", flush=True)
            checkpointer.step(step, state, metrics={"loss": loss})

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
