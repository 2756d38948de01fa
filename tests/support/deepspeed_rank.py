"""A rank of a job with DeepSpeed's engine: `python -m tests.support.deepspeed_rank RUN STAGE DTYPE STEPS KILL_AFTER`.

The optimizer is torch's AdamW. DeepSpeed's own one on CPUs keeps running products of its betas beside its state: a
resumed process computes them anew, and its master weights differ in their last bits.
It says the bits of all losses, and of what the engine has at the end, or kills itself when a save is committed.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.integrations.deepspeed import engine_state

BATCH = 16


def engine_of(stage: int, dtype: str, world_size: int) -> Any:
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // world_size,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13, affine=False), nn.GELU(), nn.Linear(13, 3))
    model[0].bias.requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def digest_of(state: dict[str, Any]) -> str:
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found.update(whole.detach().float().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list):
            [add(each) for each in value]
        else:
            found.update(repr(value).encode())

    for each in state.values():
        if isinstance(each, nn.Module):
            add({name: value for name, value in each.state_dict().items() if "running" not in name})
            continue
        saved = each.state_dict()
        # Of what is flat the padding depends on the number of ranks, and batch norm on each rank's batch.
        if isinstance(saved["shards"], list):
            saved["shards"] = [
                {
                    name: each if name == "items" else each.full_tensor()[: group["items"]]
                    for name, each in group.items()
                }
                for group in saved["shards"]
            ]
        else:
            del saved["shards"]["buffers"]
        add(saved)
    return found.hexdigest()


def main() -> None:
    run, stage, dtype, steps, kill_after = sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:])
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    engine = engine_of(stage, dtype, world_size)
    state = engine_state(engine)
    losses = []
    with holdfast.Checkpointer(run, create=True, save=holdfast.OnPreemption()) as ckpt:
        start = ckpt.restore(state)
        print(f"restored {start} {digest_of(state)}", flush=True)
        for step in range(start, steps):
            whole = torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(step))
            inputs = whole[rank::world_size].to(torch.bfloat16 if dtype == "bf16" else torch.float32)
            loss = (engine(inputs) - inputs[:, :3]).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item().hex())
            ckpt.save(step, state).committed.result(timeout=60)
            if step == kill_after:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"trained {digest_of(state)} {' '.join(losses)}", flush=True)
    os._exit(0)  # gloo's teardown aborts now and then when a peer is gone first


if __name__ == "__main__":
    main()
