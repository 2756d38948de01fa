"""DeepSpeed ZeRO-3: each rank saves its partitions of parameters and optimizer; resume on as many ranks as you like.

holdfast serve &
torchrun --standalone --nproc-per-node=2 examples/deepspeed_zero3.py
torchrun --standalone --nproc-per-node=1 examples/deepspeed_zero3.py --steps 400
"""

from __future__ import annotations

import argparse
from copy import deepcopy
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast

SLOTS = ("exp_avg", "exp_avg_sq")
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


class ZeroState:
    """What `engine.save_checkpoint()` would write, with the partitions as the shards that they are. For Adam and AdamW.

    DeepSpeed cuts each flat parameter as torch.chunk does and pads the last part; here it goes without the padding.
    Save where `engine.step()` has stepped, as gradients are not kept. Not for what is on NVMe, for MoE, or beside
    tensor parallelism.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self.engine = engine
        self.zero = engine.optimizer
        self.mesh = init_device_mesh(engine.device.type, (dist.get_world_size(),))
        # DeepSpeed makes them at the first step, as here; a restore needs them before.
        is_torchs = isinstance(self.zero.optimizer, torch.optim.Adam | torch.optim.AdamW)
        for flat in self.zero.fp32_partitioned_groups_flat:
            slots = {key: torch.zeros_like(flat) for key in SLOTS}
            self.zero.optimizer.state[flat] = {"step": torch.tensor(0.0) if is_torchs else 0, **slots}

    def state_dict(self) -> dict[str, Any]:
        engine, zero, scaler = self.engine, self.zero, vars(self.zero.loss_scaler)
        return {
            "parameters": {name: self._shards(parameter) for name, parameter in engine.module.named_parameters()},
            "buffers": dict(engine.module.named_buffers()),
            "step": next(iter(zero.optimizer.state.values()))["step"],
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in zero.param_groups],
            "loss_scale": {key: value for key, value in scaler.items() if isinstance(value, int | float)},
            "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler else None,
            "counters": {name: getattr(engine, name) for name in COUNTERS},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        engine, zero = self.engine, self.zero
        zero.checkpoint_event_prologue()  # small parameters are whole on every rank: parted here, gathered again below
        for name, parameter in engine.module.named_parameters():
            padded = {key: self._padded(parameter, shard) for key, shard in saved["parameters"][name].items()}
            parameter.ds_tensor.data.copy_(padded["value"])  # what is gathered for the forward pass, in its precision
            if parameter.requires_grad:
                safe_set_local_fp32_param(parameter, padded["value"])
                for key in SLOTS:
                    safe_set_local_optimizer_state(parameter, padded[key], key)
        zero.checkpoint_event_epilogue()
        for name, buffer in engine.module.named_buffers():
            buffer.copy_(saved["buffers"][name])
        for slots in zero.optimizer.state.values():
            slots["step"] = deepcopy(saved["step"])
        for group, values in zip(zero.param_groups, saved["groups"], strict=True):
            group.update(values)
        vars(zero.loss_scaler).update(saved["loss_scale"])
        if engine.lr_scheduler:
            engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])
        for name in COUNTERS:
            setattr(engine, name, saved["counters"][name])

    def _shards(self, parameter: torch.nn.Parameter) -> dict[str, DTensor]:
        if not parameter.requires_grad:  # it has no 32-bit copy and no slots
            return {"value": self._shard(parameter, parameter.ds_tensor)}
        slots = {key: self._shard(parameter, safe_get_local_optimizer_state(parameter, key)) for key in SLOTS}
        return {"value": self._shard(parameter, safe_get_local_fp32_param(parameter)), **slots}

    def _shard(self, parameter: torch.nn.Parameter, padded: torch.Tensor) -> DTensor:
        begin = self.mesh.get_local_rank() * padded.numel()
        local = padded[: max(0, min(padded.numel(), parameter.ds_numel - begin))]
        shape = torch.Size([parameter.ds_numel])
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))

    def _padded(self, parameter: torch.nn.Parameter, shard: DTensor) -> torch.Tensor:
        local = shard.to_local()
        return torch.nn.functional.pad(local, (0, parameter.ds_tensor.numel() - local.numel()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="examples/deepspeed", help="project/run")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    deepspeed.init_distributed()
    rank = dist.get_rank()
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.manual_seed(1 + rank)

    state = {"zero": ZeroState(engine)}
    every = holdfast.Every(steps=20)
    with holdfast.Checkpointer(options.run, save=every, replicated=["zero"]) as checkpointer:
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
