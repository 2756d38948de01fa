"""Horovod: rank 0 has the checkpoints, and the others get the state from it by broadcast.

holdfast serve &
horovodrun -np 2 python examples/horovod_rank0.py

torch.distributed is not used, so a Checkpointer is made on rank 0 alone. Random state is rank 0's; draw what must
differ between ranks from step and rank, as below.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import horovod.torch as hvd
import torch

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="examples/horovod", help="project/run")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    hvd.init()
    first = hvd.rank() == 0
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(device)
    # Horovod makes an optimizer of its own from this one, with slots of its own: that is the one to save.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(options.run, save=holdfast.Every(steps=20)) if first else nullcontext() as checkpointer:
        start = hvd.broadcast_object(checkpointer.restore(state) if checkpointer else None, root_rank=0)
        # First the optimizer: where it has no slots yet, Horovod makes them by a step, which decays the parameters.
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for step in range(start, options.steps):
            generator = torch.Generator().manual_seed(step * hvd.size() + hvd.rank())
            inputs = torch.randn(16, 32, generator=generator).to(device)
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if checkpointer:
                print(f"step {step} loss {loss.item():.9g}", flush=True)
                checkpointer.step(step, state, metrics={"loss": loss})


if __name__ == "__main__":
    main()
