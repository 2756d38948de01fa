"""Fully sharded (FSDP2): each rank holds and saves its part. Resume on as many ranks as you like.

holdfast serve &
torchrun --standalone --nproc-per-node=2 examples/fsdp2.py
torchrun --standalone --nproc-per-node=4 examples/fsdp2.py --steps 400
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="examples/fsdp2", help="project/run")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(options.run, save=holdfast.Every(steps=20)) as checkpointer:
        for step in range(checkpointer.restore(state), options.steps):
            inputs = torch.randn(16, 64, device=device)
            loss = (model(inputs) - inputs.roll(1, dims=1)).square().mean()
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
