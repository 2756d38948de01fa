"""A rank of a job with FSDP1 and its own dcp.save: `python -m tests.support.fsdp1_rank RUN TYPE STEPS KILL_AFTER`.

TYPE is that of its state dicts: `sharded` or `full`. It says the bits of the losses, and a digest of all at the end.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

import holdfast
from holdfast.errors import NoRestorePoint

BATCH = 12


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value):
                found.update(str(key).encode())
                add(value[key])
        else:
            found.update(repr(value).encode())

    for each in whole:
        add(each)
    return found.hexdigest()


def main() -> None:
    run, kind, steps, kill_after = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    model = FullyShardedDataParallel(inner, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = StateDictOptions(full_state_dict=kind == "full")
    losses = []
    with holdfast.Checkpointer(run, save=holdfast.OnPreemption()) as ckpt:
        start = 0
        try:
            reader = ckpt.reader()
        except NoRestorePoint:
            pass
        else:
            of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
            state = {"model": of_model, "optimizer": of_optimizer}
            dcp.load(state, storage_reader=reader)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=options,
            )
            start = reader.step + 1
            print(f"restored {start} {digest_of(model, optimizer)}", flush=True)
        for step in range(start, steps):
            inputs = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))[rank::world_size]
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
            dcp.save({"model": of_model, "optimizer": of_optimizer}, storage_writer=ckpt.writer(step))
            if step == kill_after:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"trained {digest_of(model, optimizer)} {' '.join(losses)}", flush=True)
    os._exit(0)  # gloo's teardown aborts now and then when a peer is gone first


if __name__ == "__main__":
    main()
