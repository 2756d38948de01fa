"""DeepSpeed's engine with ZeRO 1, 2 or 3: each rank saves its partitions; resume on as many ranks as you like.

holdfast serve &
torchrun --standalone --nproc-per-node=2 examples/deepspeed_zero.py --stage 3
torchrun --standalone --nproc-per-node=1 examples/deepspeed_zero.py --stage 3 --steps 400
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import deepspeed
import torch
import torch.distributed as dist

import holdfast
from holdfast.integrations.deepspeed import engine_state


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="examples/deepspeed", help="project/run")
    parser.add_argument("--stage", type=int, default=3, choices=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    deepspeed.init_distributed()
    rank = dist.get_rank()
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": options.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config) if options.stage == 3 else nullcontext():
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.manual_seed(1 + rank)

    state = engine_state(engine)
    with holdfast.Checkpointer(options.run, save=holdfast.Every(steps=20)) as checkpointer:
        for step in range(checkpointer.restore(state), options.steps):
            inputs = torch.randn(16, 32, device=engine.device, dtype=torch.bfloat16)
            loss = (engine(inputs) - inputs.sum(dim=1, keepdim=True)).float().square().mean()
            engine.backward(loss)
            engine.step()
            if rank == 0:
                print(f"step {step} loss {loss.item():.9g}", flush=True)
            checkpointer.step(step, state, metrics={"loss": loss})

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
